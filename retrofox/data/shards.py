"""Token shards on disk: written once per unit of a source, whole or not at all, opened as memory maps.

A shard is KEY.tokens (little-endian uint16 or uint32, documents in a row), KEY.bounds (int64, where each begins, and
the end) and KEY.json (counts, checksum), renamed into place last: a shard without it does not exist.
KEY covers the contents read, how, the tokenizer and the format, so a changed file gets another shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrofox.config import Source
from retrofox.data import synthetic_facts
from retrofox.data.backend import fingerprint
from retrofox.data.chat import VERSION as CHAT_VERSION
from retrofox.data.encode import Reading
from retrofox.data.files import DIGESTS, FORMAT, Digests, Shard, is_complete, read_shard
from retrofox.data.source_units import Unit
from retrofox.data.sources import resolve
from retrofox.data.tokenise import PendingShard, tokenise
from retrofox.support.files import left_behind, why_unwritable, write_whole
from retrofox.support.report import check_folder


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source, in order."""

    path: str
    weight: float
    shards: list[Shard]

    def total(self, count: str) -> int:
        """The sum of one of the shards' counts, such as "tokens"."""
        return sum(getattr(shard, count) for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens and boundaries, wherever the files lie."""
        content = [[shard.sha256, shard.documents, shard.tokens] for shard in self.shards if shard.tokens]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Manifest:
    """Prepared data: the sources with their shards, the tokenizer's fingerprint, this call's counts."""

    folder: Path
    tokenizer: str
    eos: int | None
    sources: list[PreparedSource]
    made: int = 0
    reused: int = 0

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(source.total("documents") for source in self.sources)

    def summary(self) -> dict[str, Any]:
        """Counts for a report, plain values."""
        return {
            "tokens": sum(source.total("tokens") for source in self.sources),
            "documents": self.documents,
            "shards_written": self.made,
            "shards_reused": self.reused,
            "sources": [
                {
                    "path": source.path,
                    "weight": source.weight,
                    "documents": source.total("documents"),
                    "empty_documents": source.total("empty"),
                    "tokens": source.total("tokens"),
                    "special_tokens_spelled_out": source.total("literals"),
                    "documents_without_words_for_facts": source.total("untold"),
                }
                for source in self.sources
            ],
        }


SHARDS = "token shards (`data.cache`)"


def check_cache(folder: Path) -> None:
    """Raises ValueError where shards can't be written; one that holds some may be complete, and another user's."""
    if not any(folder.glob("*.tokens")):
        check_folder(folder, SHARDS)


def prepare_sources(
    sources: Sequence[Source],
    tokenizer: Any,
    out_dir: str | os.PathLike[str],
    *,
    progress: bool = True,
    text_field: str = "text",
    split_special_tokens: bool = True,
) -> Manifest:
    """Tokenises sources into shards, keeping those that exist; interrupted, the next call goes on.

    Every document is what `tokenizer(text)` gives, with the tokenizer's EOS (if it has one) as last token.

    Args:
        sources: see `retrofox.data.sources.resolve`; a source's own text_field goes before `text_field`.
        out_dir: where shards are kept; several recipes may share it.
        progress: a bar with the remaining time, and what is worth knowing, on stderr.
        split_special_tokens: special tokens that are spelled out in a text, such as </s>, are plain text; else they
            become the special token.

    Raises:
        FileNotFoundError: nothing at a source's path.
        ValueError: a source can't be read, or holds no text; the text says which and what to do.
        OSError: the shards can't be written.
    """
    folder = Path(out_dir).expanduser()
    units = [resolve(source) for source in sources]
    readings = [Reading.of(source, text_field, split_special_tokens) for source in sources]
    check_cache(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for left in left_behind(folder, "*", "tmp"):  # gigabytes, where a run was killed
        with suppress(OSError):
            left.unlink()
    digests = Digests(folder / DIGESTS)
    made_from = fingerprint(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    key = partial(_key, tokenizer=made_from, template=template, digests=digests)
    wanted = [
        [PendingShard(unit, reading, key(unit, reading), partial(key, unit, reading)) for unit in of_source]
        for of_source, reading in zip(units, readings, strict=True)
    ]
    shards = [shard for of_source in wanted for shard in of_source]
    todo = [shard for shard in shards if not is_complete(folder, shard.key)]
    if why_unwritable(folder) is None:
        write_whole(folder / DIGESTS, json.dumps(digests.known).encode())
    elif todo:
        check_folder(folder, SHARDS)
    tokenise(todo, tokenizer, folder, progress)
    prepared = []
    for source, reading, of_source in zip(sources, readings, wanted, strict=True):
        made = PreparedSource(source.path, source.weight, [read_shard(folder, shard.key) for shard in of_source])
        prepared.append(made)
        if not made.total("tokens"):
            nothing, give = ("no turn of an assistant", "conversations") if reading.chat else ("no text", "texts")
            raise ValueError(f"{source.path}: {nothing} in it (empty documents: {made.total('empty')}): give {give}")
        if progress and (literals := made.total("literals")):
            read = "plain text" if split_special_tokens else "these tokens (split_special_tokens: false)"
            told = f"{source.path}: its texts spell out special tokens {literals:,} times: read as {read}"
            print(told, file=sys.stderr)
        if progress and (untold := made.total("untold")):
            print(f"{source.path}: documents without words for facts (16, of 4-9 letters): {untold:,}", file=sys.stderr)
    return Manifest(folder, made_from, tokenizer.eos_token_id, prepared, len(todo), len(shards) - len(todo))


def _key(unit: Unit, reading: Reading, tokenizer: str, template: Any, digests: Digests) -> str:
    identity = unit.identity(digests)
    if reading.fact_share:
        questions = [reading.questions] if reading.questions else []
        identity = json.dumps([identity, "facts", synthetic_facts.VERSION, reading.fact_share, *questions])
    content = [FORMAT, identity, reading.field, tokenizer]
    content += ["split"] if reading.split_special_tokens else []
    content += ["chat", CHAT_VERSION, template] if reading.chat else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
