"""teacher.json: whose logits a directory holds and of what data; refusals where it is not what a stage needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrofox.support.files import write_json

FORMAT = 1
NOTE = "teacher.json"
REWRITE = "run `retrofox teacher RECIPE`, which writes them"


@dataclass(frozen=True)
class Record:
    """Whose logits they are, and of what.

    Attributes:
        model, revision, fingerprint: the teacher, and a hash of its files.
        tokenizer, data: fingerprints of the tokenizer and of the packed windows, as training knows them.
        seed: of the data's order, which is the order of the shards.
        top_k: likeliest tokens kept at each position; the rest is one outcome.
        vocabulary: token ids are below it.
        shard_windows: windows in a shard; the last has fewer.
    """

    model: str
    revision: str | None
    fingerprint: str
    precision: str
    tokenizer: str
    data: str
    seed: int
    sequence_length: int
    temperature: float
    top_k: int
    vocabulary: int
    shard_windows: int

    @property
    def identity(self) -> str:
        """Whose logits, and in what detail: what a resumed run has to find again."""
        return f"{self.fingerprint:.16}, {self.precision}, top {self.top_k}"

    def save(self, folder: Path, written: dict[str, Any] | None = None) -> None:
        """Writes teacher.json, with what the shards take once they are written."""
        write_json(folder / NOTE, {"format": FORMAT, **asdict(self), "written": written})


KINDS = {
    **dict.fromkeys(("model", "fingerprint", "precision", "tokenizer", "data"), str),
    **dict.fromkeys(("seed", "sequence_length", "top_k", "vocabulary", "shard_windows"), int),
    "temperature": (int, float),
}
"""What the values of a record are; a revision may be missing."""


def read_record(folder: Path) -> Record:
    """The record of a directory.

    Raises:
        ValueError: there is none, or a damaged one, or one of another format.
    """
    file = folder / NOTE
    if not file.is_file():
        raise ValueError(f"{folder} holds no teacher logits (no {NOTE}): {REWRITE}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        values.pop("written")
        record = Record(**values)
        for key, kind in KINDS.items():
            if not isinstance(getattr(record, key), kind):
                raise ValueError(f"{key}: {getattr(record, key)!r}")
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged, or of another version ({error}): delete {folder} and {REWRITE}"
        ) from error


def claim(folder: Path, record: Record) -> None:
    """Raises ValueError where a directory holds other logits, or anything else; writes nothing."""
    if (folder / NOTE).is_file():
        there, wanted = asdict(read_record(folder)), asdict(record)
        differ = [f"{key} {there[key]}, not {wanted[key]}" for key in wanted if there[key] != wanted[key]]
        if differ:
            raise ValueError(f"{folder} holds other logits ({'; '.join(differ)}): choose another --out, or delete it")
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --out")
    elif folder.is_dir() and any(path for path in folder.iterdir() if not path.name.startswith(".")):
        raise ValueError(f"{folder} holds files that are no teacher logits: choose another --out")
