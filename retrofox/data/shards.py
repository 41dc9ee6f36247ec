"""Token shards on disk: written once per unit of a source, whole or not at all, opened as memory maps.

A shard is KEY.tokens (little-endian uint16 or uint32, documents in a row), KEY.bounds (int64, where each begins, and
the end) and KEY.json (counts, checksum), renamed into place last: a shard without it does not exist.
KEY covers the contents read, how, the tokenizer and the format, so a changed file gets another shard.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from retrofox.config import Source
from retrofox.data.backend import fingerprint
from retrofox.data.chat import VERSION as CHAT_VERSION
from retrofox.data.encode import Reading
from retrofox.data.files import (
    DIGESTS,
    FORMAT,
    Digests,
    Shard,
    cache_folder,
    clear_disk_errors,
    is_complete,
    read_shard,
    sweep,
)
from retrofox.data.source_shards import Unit
from retrofox.data.sources import MESSAGES, resolve
from retrofox.data.synthetic_facts import FEWEST_WORDS
from retrofox.data.tokenise import tokenise
from retrofox.support.files import write_whole


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source, in order."""

    path: str
    weight: float
    text_field: str
    shards: list[Shard]

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

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
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.tokens for source in self.sources)

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(source.documents for source in self.sources)

    def summary(self) -> dict[str, Any]:
        """Counts for a report, plain values."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shards_written": self.made,
            "shards_reused": self.reused,
            "seconds": round(self.seconds, 3),
            "sources": [
                {
                    "path": source.path,
                    "weight": source.weight,
                    "documents": source.documents,
                    "empty_documents": sum(shard.empty for shard in source.shards),
                    "tokens": source.tokens,
                    "special_tokens_spelled_out": sum(shard.literals for shard in source.shards),
                }
                for source in self.sources
            ],
        }


def prepare_sources(
    sources: Sequence[Source],
    tokenizer: Any,
    out_dir: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = True,
    text_field: str = "text",
    split_special_tokens: bool = True,
) -> Manifest:
    """Tokenises sources into shards, keeping those that exist; interrupted, the next call goes on.

    Every document is what `tokenizer(text)` gives, with the tokenizer's EOS (if it has one) as last token.

    Args:
        sources: see `retrofox.data.sources.resolve`; a source's own text_field goes before `text_field`.
        out_dir: where shards are kept; several recipes may share it.
        workers: tokenising threads; None = one per core.
        progress: a bar with tokens per second and the remaining time, and what is worth knowing, on stderr.
        split_special_tokens: special tokens that are spelled out in a text, such as </s>, are plain text; else they
            become the special token.

    Raises:
        FileNotFoundError: nothing at a source's path.
        ValueError: a source can't be read, holds no text, or the disk is full; the text says which and what to do.
    """
    started = time.perf_counter()
    folder = Path(out_dir).expanduser()
    workers = workers or _cores()
    with clear_disk_errors(folder), cache_folder(folder):
        sweep(folder)
        memory = folder / DIGESTS
        digests = Digests.load(memory)
        made_from = fingerprint(tokenizer)
        readings = [
            Reading(source.text_field or (MESSAGES if source.chat else text_field), source.chat, split_special_tokens)
            for source in sources
        ]
        plan = [
            (source, reading, resolve(source, leave_out=folder))
            for source, reading in zip(sources, readings, strict=True)
        ]
        template = getattr(tokenizer, "chat_template", None)
        key_of = functools.partial(_key, tokenizer=made_from, template=template, digests=digests)
        keys = {id(unit): key_of(unit, reading) for _, reading, units in plan for unit in units}
        write_whole(memory, json.dumps(digests.known).encode())
        missing = [
            (unit, reading, keys[id(unit)])
            for _, reading, units in plan
            for unit in units
            if not is_complete(folder, keys[id(unit)])
        ]
        total = sum(len(units) for *_, units in plan)
        if progress and len(missing) < total:
            there, todo = total - len(missing), f"{len(missing)} to make" if missing else "nothing to tokenise"
            Console(stderr=True, soft_wrap=True, emoji=False).print(
                f"{there} of {total} token shards are in {folder}, {todo}", highlight=False, markup=False
            )
        tokenise(missing, tokenizer, folder, workers, progress)
        for unit, reading, key in missing:
            if key_of(unit, reading) != key:
                (folder / f"{key}.json").unlink(missing_ok=True)
                raise ValueError(f"{unit.name} changed while it was read: run it again when it is complete")
        prepared = [
            PreparedSource(
                source.path,
                source.weight,
                reading.field,
                [read_shard(folder, keys[id(unit)]) for unit in units],
            )
            for source, reading, units in plan
        ]
        for source, reading in zip(prepared, readings, strict=True):
            if not source.tokens:
                nothing, wanted = ("no assistant", "conversations") if reading.chat else ("no text", "texts")
                empty = sum(s.empty for s in source.shards)
                raise ValueError(f"{source.path}: {nothing} in it (empty documents: {empty}): give {wanted}")
        with_facts = [into for into, (source, *_) in zip(prepared, plan, strict=True) if source.fact_share]
        for line in (_without_facts(with_facts), *_with_literals(prepared, split_special_tokens)):
            if line and progress:
                Console(stderr=True, soft_wrap=True, emoji=False).print(line, highlight=False, markup=False)
        manifest = Manifest(folder, made_from, tokenizer.eos_token_id, prepared, len(missing), total - len(missing))
    manifest.seconds = time.perf_counter() - started
    return manifest


def _without_facts(sources: Sequence[PreparedSource]) -> str:
    """How many documents of the sources that get made-up facts can take none; empty if all can."""
    documents = sum(source.documents for source in sources)
    wordless = sum(shard.wordless for source in sources for shard in source.shards)
    if not wordless:
        return ""
    few = f"fewer than {FEWEST_WORDS} different words of 4 to 9 letters"
    return f"{wordless:,} of {documents:,} documents take no made-up facts (fact_share): they have {few}"


def _with_literals(sources: Sequence[PreparedSource], split: bool) -> Iterator[str]:
    """A line for each source whose texts spell out special tokens."""
    for source in sources:
        if literals := sum(shard.literals for shard in source.shards):
            read = "read as plain text" if split else "read as these tokens (split_special_tokens: false)"
            yield f"{source.path}: its texts spell out special tokens, such as </s>, {literals:,} times: {read}"


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _key(unit: Unit, reading: Reading, tokenizer: str, template: Any, digests: Digests) -> str:
    content = [FORMAT, unit.identity(digests), reading.field, tokenizer]
    content += ["split"] if reading.split_special_tokens else []
    content += ["chat", CHAT_VERSION, template] if reading.chat else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
