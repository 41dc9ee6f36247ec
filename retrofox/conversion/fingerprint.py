"""A hash of a model's files: what a result was made with."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from retrofox.data.files import Digests
from retrofox.loading.adapter import base_of
from retrofox.loading.source import read_config

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
        return hash_of([digests.of(path)])
    if not path.is_dir():
        read_config(source)  # fetches it
        cached = try_to_load_from_cache(source, "config.json")
        commit = Path(cached).parent.name if isinstance(cached, str) else None
        return hash_of([source, commit])
    files = {file.name: file for pattern in COUNTED for file in path.glob(pattern) if file.is_file()}
    parts: list[Any] = [[name, digests.of(files[name])] for name in sorted(files)]
    if (path / "adapter_config.json").is_file():
        parts.append(model_fingerprint(base_of(path), digests))
    return hash_of(parts)


def hash_of(value: Any) -> str:
    """sha256 of a value as JSON, hex; paths by their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=os.fspath).encode()).hexdigest()
