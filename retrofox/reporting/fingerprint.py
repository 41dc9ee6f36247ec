"""What a result depends on: hashes of a model's files, of texts, and of options and versions together."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache

from retrofox.data.files import Digests
from retrofox.data.sources import DataSource, resolve
from retrofox.loading.adapter import base_of
from retrofox.loading.source import read_config
from retrofox.version import __version__

COUNTED = (
    *("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.gguf", "*.model"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
)
"""Files of a model's directory that decide its logits or its tokens; cards, code and optimizer states do not."""


def model_fingerprint(source: str, digests: Digests | None = None) -> str:
    """A hash of a model's weights, config and tokenizer by content: a copy elsewhere has the same one.

    Of a Hub id it is the commit that is used; of an adapter its base counts, too.

    Raises:
        FileNotFoundError: no model there.
    """
    digests = digests or Digests()
    path = Path(source)
    if path.is_file():
        return _hash([digests.of(path)])
    if not path.is_dir():
        read_config(source)  # fetches it
        cached = try_to_load_from_cache(source, "config.json")
        commit = Path(cached).parent.name if isinstance(cached, str) else None
        return _hash([source, commit])
    files = {file.name: file for pattern in COUNTED for file in path.glob(pattern) if file.is_file()}
    parts: list[Any] = [[name, digests.of(files[name])] for name in sorted(files)]
    if (path / "adapter_config.json").is_file():
        parts.append(model_fingerprint(base_of(path), digests))
    return _hash(parts)


def data_fingerprint(data: Sequence[str], digests: Digests) -> str:
    """A hash of the texts by content, in their order."""
    return _hash([unit.identity(digests) for path in data for unit in resolve(DataSource(path))])


def folder_fingerprint(folder: str | None, digests: Digests) -> str | None:
    """A hash of all files of a folder by name and content."""
    if folder is None or not Path(folder).is_dir():
        return None
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    return _hash([[file.relative_to(folder).as_posix(), digests.of(file)] for file in files])


def part_fingerprint(identity: dict[str, Any]) -> str:
    """The key of a part's result: its options, models and texts, and the versions that it ran with."""
    versions = {"retrofox": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return _hash({**identity, "versions": versions})


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=os.fspath).encode()).hexdigest()
