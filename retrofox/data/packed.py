"""Packed windows of prepared tokens, in an order that resumes exactly.

    manifest = prepare_sources([Source(path="books/")], tokenizer, "cache")
    dataset = PackedDataset(manifest, sequence_length=4096, seed=0)
    sampler = StepSampler(dataset.order, batch_size=2, consumed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

A window is a function of its number: all that a run must remember is how many samples it has consumed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from retrofox.data.pack import pack
from retrofox.data.sampler import Mixture
from retrofox.data.shards import Manifest, PreparedSource

IGNORE = -100
"""Label of a position that nothing is predicted at."""
OPEN_MAPS = 128
SKIPPING_SHARE = 0.5
"""Share of the segments whose positions skip ahead where `max_position` is given; the others keep near order exact."""


@functools.lru_cache(maxsize=OPEN_MAPS)
def _mapped(file: Path, dtype: str) -> np.ndarray:
    """A read-only memory map of a shard's file; the least recently read are closed: a map holds a file descriptor."""
    return np.memmap(file, dtype=dtype, mode="r")


class Tokens:
    """One prepared source, its shards as one stream of documents; documents never cross shards."""

    def __init__(self, source: PreparedSource, folder: Path):
        self.source, self.folder = source, folder
        self.shards = [shard for shard in source.shards if shard.tokens]
        self.firsts = np.concatenate([[0], np.cumsum([shard.tokens for shard in self.shards], dtype=np.int64)])
        begins = [shard.bounds(folder)[:-1] + first for shard, first in zip(self.shards, self.firsts, strict=False)]
        self.bounds = np.concatenate([*begins, self.firsts[-1:]])

    def slice(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens start .. start + length of the stream, within one shard, and 1 at those to be learnt; None: all."""
        part = int(np.searchsorted(self.firsts, start, side="right")) - 1
        shard, inside = self.shards[part], start - int(self.firsts[part])
        here = slice(inside, inside + length)
        tokens = _mapped(self.folder / f"{shard.key}.tokens", shard.dtype)[here]
        return tokens, _mapped(self.folder / f"{shard.key}.learnt", "u1")[here] if shard.chat else None


def open_tokens(manifest: Manifest) -> list[Tokens]:
    """The sources of a manifest, memory-mapped; ValueError where a shard is missing or damaged."""
    return [Tokens(source, manifest.folder) for source in manifest.sources]


class PackedDataset(torch.utils.data.Dataset):
    """Windows of `sequence_length` tokens, packed from whole documents; each window is of one source.

    An item has, with T = sequence_length:

        input_ids     (T,) int64
        labels        (T,) int64, equal to input_ids (the model shifts), -100 at the first token of each segment, which
                      would be predicted across a boundary, on padding, and on what the assistant of a conversation
                      did not write
        position_ids  (T,) int64, restarting at 0 at each segment; with `max_position` half of the segments skip
                      ahead at a random token (`skipping`), the same one each time
        doc_lengths   (segments,) int64, summing to T; the unfilled tail, if any, is the last segment (EOS, label -100)

    A segment is a document, or a part of one longer than T. `order` maps global sample numbers to items, such that the
    sources' weights are the shares of tokens drawn; see `data.sampler.Mixture`.

    Raises:
        ValueError: a source without two tokens in a document, shards that are missing.
    """

    def __init__(self, manifest: Manifest, sequence_length: int, seed: int = 0, max_position: int | None = None):
        assert max_position is None or max_position > sequence_length
        self.sequence_length, self.seed, self.max_position = sequence_length, seed, max_position
        self.filler = manifest.eos or 0
        self.tokens = open_tokens(manifest)
        self.packings = [pack(tokens.bounds, sequence_length, tokens.source.path) for tokens in self.tokens]
        counts = [len(packing) for packing in self.packings]
        self.offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Weights are shares of tokens: windows of a source that fills them less must come more often.
        weights = [float(tokens.source.weight) for tokens in self.tokens]
        shares = [w * n / p.tokens for w, n, p in zip(weights, counts, self.packings, strict=True)]
        self.order = Mixture(counts, shares, seed)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def fill(self) -> float:
        """Share of the windows' positions that hold tokens, not padding."""
        return sum(packing.tokens for packing in self.packings) / (len(self) * self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        tokens, packing, row = self.tokens[source], self.packings[source], index - int(self.offsets[source])
        first, last = packing.rows[row : row + 2].tolist()
        length = self.sequence_length
        ids = np.full(length, self.filler, dtype=np.int64)
        positions = np.arange(length, dtype=np.int64)
        random = np.random.default_rng([self.seed % (1 << 64), index])  # as `Order`, of any seed
        hidden = np.zeros(length, dtype=bool)
        at, begins = 0, []
        for start, count in zip(packing.start[first:last].tolist(), packing.length[first:last].tolist(), strict=True):
            ids[at : at + count], learnt = tokens.slice(start, count)
            if learnt is not None:
                hidden[at : at + count] = learnt == 0
            positions[at : at + count] -= at
            if self.max_position is not None:
                positions[at : at + count] += skipping(count, self.max_position, random)
            begins.append(at)
            at += count
        labels = ids.copy()
        labels[hidden] = IGNORE
        labels[begins] = IGNORE
        labels[at:] = IGNORE
        if at < length:
            positions[at:] -= at
            begins.append(at)
        lengths = np.diff([*begins, length])
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
            "doc_lengths": torch.from_numpy(lengths),
        }


def skipping(count: int, max_position: int, random: np.random.Generator) -> np.ndarray:
    """Offsets to add to positions 0 .. count - 1 of a segment, (count,) int64: 0, then one skip from a random token on.

    The skip is uniform in 0 .. max_position - count, so tokens on both sides of it meet at every distance below
    max_position, while each side keeps its own order. A share 1 - SKIPPING_SHARE of the segments has none.
    Source: positional skip-wise training (PoSE; Zhu et al. 2023, arXiv 2309.10400), with two chunks.
    """
    added = np.zeros(count, dtype=np.int64)
    if count > 1 and random.random() < SKIPPING_SHARE:
        added[random.integers(1, count) :] = random.integers(0, max_position - count, endpoint=True)
    return added


def collate(batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stacks windows: input_ids, labels, position_ids (B, T) int64, and cu_seqlens (N + 1,) int32 over B * T tokens.

    cu_seqlens (segment ends, rows included) is left out where every row is one segment whose positions count its
    tokens: plain causal attention.
    """
    result = {key: torch.stack([item[key] for item in batch]) for key in ("input_ids", "labels", "position_ids")}
    if not bool((result["position_ids"] == torch.arange(result["position_ids"].shape[1])).all()):
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), *(item["doc_lengths"] for item in batch)])
        result["cu_seqlens"] = lengths.cumsum(0).to(torch.int32)
    return result


def next_token_targets(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Targets (B, T) int64: the next label of the same document, IGNORE where there is none."""
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:].masked_fill(position_ids[:, 1:] == 0, IGNORE)
    return targets
