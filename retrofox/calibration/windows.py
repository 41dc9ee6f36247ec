"""Windows of tokens to calibrate on, cut from the documents of text files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from retrofox.data.sources import DataSource, SourceLike, resolve
from retrofox.data.windows import documents

Text = str | os.PathLike[str] | SourceLike
"""Where calibration's text comes from: a file, directory or glob, "hf:...", "longcrawl64:...", or a source of them."""

TOKENS_READ = 1 << 21
"""Most tokens read of the files together: windows for a hundred calibrations, a few seconds of tokenising."""


def require_sources(texts: Sequence[Text]) -> None:
    """Raises FileNotFoundError or ValueError for a text that is not here; sets on the Hub are looked for later."""
    for text in map(_source, texts):
        if not text.path.startswith(("hf:", "longcrawl64:")):
            resolve(text)


def _source(text: Text) -> SourceLike:
    return DataSource(os.fspath(text)) if isinstance(text, str | os.PathLike) else text


def documents_of(files: Sequence[Text], tokenizer: Any) -> list[np.ndarray]:
    """Documents as tokens, int32, each source giving its first documents up to its weight's share of TOKENS_READ.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no source, no tokenizer, or no text in the sources.
    """
    if not files:
        raise ValueError("no calibration text: name at least one file")
    if tokenizer is None:
        raise ValueError(
            "calibration files need a tokenizer: put its files beside the model (in Python: pass tokenizer=, or token "
            "windows instead of files)"
        )
    found: list[np.ndarray] = []
    sources = [_source(file) for file in files]
    weights = sum(source.weight for source in sources)
    for source in sources:
        left = max(1, int(TOKENS_READ * source.weight / weights))
        for _, ids in documents([source], tokenizer):
            found.append(ids[:left])
            left -= len(ids)
            if left <= 0:
                break
    if not any(len(ids) for ids in found):
        raise ValueError(f"no text in {', '.join(source.path for source in sources)}")
    return found


def pieces(found: Sequence[np.ndarray], tokenizer: Any, length: int) -> list[np.ndarray]:
    """Stretches of `length` tokens, each beginning with the token that the tokenizer begins documents with, if any.

    Without such a token none begins with one token twice: alike in all layers, both would be attention sinks.
    """
    begin = tokenizer.bos_token_id
    if found[0][0] != begin:
        begin = None
    cut = []
    for ids in found:
        at = 0
        while at + length <= len(ids):
            if begin is None and length > 1 and ids[at] == ids[at + 1]:
                at += 1
                continue
            piece = ids[at : at + length]
            cut.append(piece if begin is None or piece[0] == begin else np.r_[begin, piece[:-1]])
            at += length
    return cut


def fitting_windows(
    found: Sequence[np.ndarray], tokenizer: Any, lengths: Sequence[int], most: int, least: int, seed: int
) -> torch.Tensor:
    """(N, T) int64 tokens, least <= N <= most, from all over the documents, chosen by seed.

    T is the one of `lengths` (longest first) with which up to `most` windows hold the most tokens.

    Raises:
        ValueError: fewer than `least` windows with any of the lengths.
    """
    whole = {length: pieces(found, tokenizer, length) for length in lengths}
    enough = [length for length in lengths if len(whole[length]) >= least]
    if not enough:
        total, shortest = sum(map(len, found)), min(lengths)
        raise ValueError(
            f"the calibration files hold {total} tokens, the longest of {len(found)} documents {max(map(len, found))}: "
            f"that is {len(whole[shortest])} windows of {shortest} tokens, and at least {least} are needed; give more "
            "text or a smaller length"
        )
    length = max(enough, key=lambda n: n * min(most, len(whole[n])))
    chosen = np.random.default_rng(seed).permutation(len(whole[length]))[:most]
    return torch.from_numpy(np.stack([whole[length][i] for i in chosen])).long()


def full_windows(found: Sequence[np.ndarray], tokenizer: Any, length: int) -> torch.Tensor:
    """(1 or 2, T) int64: windows of the length a model was trained to, or of the longest document if that is less."""
    length = min(length, max(map(len, found)))
    while not (whole := pieces(found, tokenizer, length)):  # the longest begins with one token twice
        length -= 1
    return torch.from_numpy(np.stack([whole[i] for i in sorted({0, len(whole) // 2})])).long()
