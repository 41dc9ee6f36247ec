"""Configs of unconverted models, supported or not, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from retrofox.families import check_known
from retrofox.loading.errors import opening
from retrofox.loading.gguf_files import gguf_config
from retrofox.loading.source import read_config


def any_config(source: str | Path, revision: str | None = None) -> Any:
    """The transformers config of an unconverted model, supported or not: Hub id, directory or .gguf file.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: its file is damaged, or the model needs code of its own, which is not run.
    """
    if str(source).endswith(".gguf"):
        return gguf_config(source)
    check_known(source, read_config(source, revision))
    with opening(f"config.json of {source}"):
        return AutoConfig.from_pretrained(str(source), revision=revision or "main", trust_remote_code=False)
