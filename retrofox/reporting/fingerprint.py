"""What a result depends on beside its models: hashes of texts, and of options and versions together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from retrofox.config import Source
from retrofox.conversion.fingerprint import hash_of
from retrofox.data.files import Digests
from retrofox.data.sources import resolve
from retrofox.version import __version__


def data_fingerprint(data: Sequence[str], digests: Digests) -> str:
    """A hash of the texts by content, in their order."""
    return hash_of([unit.identity(digests) for path in data for unit in resolve(Source(path=path))])


def folder_fingerprint(folder: str | None, digests: Digests) -> str | None:
    """A hash of all files of a folder by name and content."""
    if folder is None or not Path(folder).is_dir():
        return None
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    return hash_of([[file.relative_to(folder).as_posix(), digests.of(file)] for file in files])


def part_fingerprint(identity: dict[str, Any]) -> str:
    """The key of a part's result: its options, models and texts, and the versions that it ran with."""
    versions = {"retrofox": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return hash_of({**identity, "versions": versions})
