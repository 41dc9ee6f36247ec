"""Finished parts of a report on disk, each with all that its numbers depend on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from retrofox.config import Source
from retrofox.conversion.fingerprint import hash_of, model_fingerprint
from retrofox.data.files import Digests
from retrofox.data.sources import resolve
from retrofox.loading.device import resolve_device
from retrofox.reporting.sections import Asked, Part
from retrofox.support.files import write_result
from retrofox.version import __version__


@dataclass
class Kept:
    """Finished parts in OUT/parts, one folder each, whose part.json says what they are the result of."""

    folder: Path
    asked: Asked
    dtype: str | None
    given_device: str | None

    def __post_init__(self) -> None:
        digests = Digests()
        self.models = [model_fingerprint(source, digests) for source in (self.asked.model, *self.asked.against)]
        units = [unit for path in self.asked.data for unit in resolve(Source(path=path))]
        self.texts = hash_of([unit.identity(digests) for unit in units])
        place = self.asked.include_path
        files = sorted(file for file in Path(place).rglob("*") if file.is_file()) if place else []
        self.task_files = hash_of([[str(file.relative_to(str(place))), digests.of(file)] for file in files])

    def identity(self, part: Part) -> dict[str, Any]:
        """All that decides a part's numbers, as JSON has it: files by their content, not by where they lie."""
        paths = ("model", "against", "data", "include_path")
        identity = {
            "part": part.name,
            "options": {name: value for name, value in part.options.items() if name not in paths},
            "models": self.models,
            "device": resolve_device(self.given_device).type,
            "dtype": self.dtype,
            "texts": self.texts if "data" in part.options else None,
            "task_files": self.task_files if "tasks" in part.options else None,
            "versions": [__version__, torch.__version__, transformers.__version__],
        }
        return json.loads(json.dumps(identity, default=os.fspath))

    def place(self, part: Part) -> Path:
        return self.folder / "parts" / part.name

    def read(self, part: Part) -> dict[str, Any] | None:
        """A part's entry, if it is the result of just this; None where there is none, or one of something else."""
        try:
            entry = json.loads((self.place(part) / "part.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return entry if isinstance(entry, dict) and entry.get("identity") == self.identity(part) else None

    def write(self, part: Part, seconds: float) -> dict[str, Any]:
        """Keeps what a part wrote, whole or not at all."""
        entry = {
            "identity": self.identity(part),
            "measures": part.measures,
            "seconds": seconds,
            "tokens": part.tokens,
            "result": json.loads((self.place(part) / part.file).read_text(encoding="utf-8")),
        }
        write_result(self.place(part) / "part.json", (json.dumps(entry, indent=1, allow_nan=False) + "\n").encode())
        return entry
