"""Positions that skip ahead (`max_position`): one skip a segment at most, in half of them, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox.data.packed import IGNORE, PackedDataset, collate, skipping
from tests.data.conftest import prepared

LENGTH, REACH = 16, 1000


@pytest.fixture
def opened(tmp_path, texts, tokenizer):
    """opened(**options) -> windows of LENGTH tokens of the five texts."""

    def dataset(**options) -> PackedDataset:
        return PackedDataset(prepared([texts[0].parent], tokenizer, tmp_path / "out"), LENGTH, **options)

    return dataset


def segments(data: PackedDataset) -> list[list[int]]:
    """The positions of every segment of every window, padding left out."""
    found = []
    for item in (data[index] for index in range(len(data))):
        bounds = [0, *item["doc_lengths"].cumsum(0).tolist()]
        held = [part for part in pairwise(bounds) if bool((item["labels"][slice(*part)] != IGNORE).any())]
        found += [item["position_ids"][start:stop].tolist() for start, stop in held]
    return found


def jumps(positions: list[int]) -> list[int]:
    """How many positions are left out at each place of a segment where some are."""
    return [after - before - 1 for before, after in pairwise(positions) if after != before + 1]


@settings(deadline=None, max_examples=200)
@given(count=st.integers(1, 40), beyond=st.integers(1, 10**12), seed=st.integers(0, 2**32))
def test_a_skip_of_any_segment_stays_below_any_max_position(count, beyond, seed):
    positions = np.arange(count) + skipping(count, count + beyond, np.random.default_rng(seed))
    assert positions[0] == 0
    assert positions[-1] < count + beyond
    steps = np.diff(positions)
    assert np.all(steps >= 1)
    assert (steps > 1).sum() <= 1


def test_skips_come_at_every_token_and_reach_every_position_below_max_position():
    random = np.random.default_rng(0)
    drawn = {tuple(np.arange(4) + skipping(4, 7, random)) for _ in range(500)}
    skipped = {tuple(i + (jump if i >= place else 0) for i in range(4)) for place in (1, 2, 3) for jump in range(4)}
    assert drawn == skipped


def test_about_half_of_the_segments_skip(opened):
    found = [positions for seed in range(40) for positions in segments(opened(seed=seed, max_position=10**6))]
    assert len(found) > 1000
    assert np.mean([bool(jumps(positions)) for positions in found]) == pytest.approx(0.5, abs=0.05)


def test_tokens_labels_and_boundaries_are_what_they_are_without_skips(opened):
    plain, skips = opened(), opened(max_position=REACH)
    assert len(plain) == len(skips)
    for index in range(len(plain)):
        for key in ("input_ids", "labels", "doc_lengths"):
            assert torch.equal(plain[index][key], skips[index][key])
    assert skips[0]["position_ids"].dtype == torch.int64


def test_a_window_skips_alike_every_time_and_otherwise_under_another_seed(opened):
    first = segments(opened(seed=3, max_position=REACH))
    assert segments(opened(seed=3, max_position=REACH)) == first
    for seed in (4, -1):
        assert segments(opened(seed=seed, max_position=REACH)) != first
    differing = {tuple(jumps(positions)) for positions in first}
    assert len(differing) > 10  # each window has skips of its own


def test_collate_gives_the_documents_boundaries_not_the_skips(opened):
    data = opened(max_position=REACH)
    windows = [data[index] for index in range(len(data))]
    whole = [item for item in windows if len(item["doc_lengths"]) == 1]
    skipped = [item for item in whole if jumps(item["position_ids"].tolist())]
    counted = [item for item in whole if not jumps(item["position_ids"].tolist())]
    several = [item for item in windows if len(item["doc_lengths"]) > 1]
    assert min(map(len, (skipped, counted, several))) >= 2
    assert collate(skipped[:2])["cu_seqlens"].tolist() == [0, LENGTH, 2 * LENGTH]
    assert collate([counted[0], skipped[0]])["cu_seqlens"].tolist() == [0, LENGTH, 2 * LENGTH]
    assert "cu_seqlens" not in collate(counted[:2])
    ends = [LENGTH, *(LENGTH + several[0]["doc_lengths"].cumsum(0)).tolist()]
    assert collate([skipped[0], several[0]])["cu_seqlens"].tolist() == [0, *ends]
