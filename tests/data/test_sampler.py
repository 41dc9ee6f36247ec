"""The order: a permutation each epoch, shares kept at every block, constant state."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox.data.sampler import Mixture, Order, StepSampler


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    drawn = Order(n, seed).take(np.arange(epoch * n, (epoch + 1) * n))
    assert np.array_equal(np.sort(drawn), np.arange(n))


def test_epochs_and_seeds_differ_and_look_shuffled():
    n = 10_000
    first, second = Order(n, 1).take(np.arange(n)), Order(n, 1).take(np.arange(n, 2 * n))
    other = Order(n, 2).take(np.arange(n))
    for a, b in ((first, second), (first, other), (first, np.arange(n))):
        assert (a == b).mean() < 0.002
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    small = np.array([Order(4, seed).take(np.arange(4)) for seed in range(2400)])
    assert len({tuple(row) for row in small.tolist()}) == 24
    counts = np.unique(small, axis=0, return_counts=True)[1]
    assert counts.min() > 60  # 100 expected


def test_blocks_and_sources_of_a_mixture_are_shuffled_differently():
    order = Mixture([500, 500], [1, 1], 3)
    first, second = order.take(np.arange(2 * order.block)).reshape(2, -1)
    assert ((first < 500) != (second < 500)).mean() > 0.4  # else every block has its sources in the same places
    one, other = (drawn[:500] for drawn in (first[first < 500], first[first >= 500] - 500))
    assert (one == other).mean() < 0.05


def test_epochs_are_those_of_the_source_read_most():
    order = Mixture([5, 70], [1, 2], 5)
    drawn = np.bincount(order.take(np.arange(3 * order.block)), minlength=75)
    np.testing.assert_allclose(order.epochs(3 * order.block), drawn[:5].mean(), rtol=1e-2)


def test_huge_orders_need_no_memory():
    order = Order(10**12, 3)
    drawn = order.take(np.arange(10**15, 10**15 + 1000))
    assert len(np.unique(drawn)) == 1000
    assert drawn.min() >= 0
    assert drawn.max() < 10**12


@settings(deadline=None, max_examples=20)
@given(
    parts=st.lists(st.tuples(st.integers(1, 400), st.floats(0.1, 10)), min_size=2, max_size=5),
    seed=st.integers(0, 2**40),
)
def test_shares_hold_and_each_source_is_permuted(parts, seed):
    counts, shares = zip(*parts, strict=True)
    order = Mixture(counts, shares, seed)
    n = 4 * order.block
    drawn = order.take(np.arange(n))
    source = np.searchsorted(order.offsets, drawn, side="right") - 1
    share = np.array(shares) / sum(shares)
    assert np.all(np.abs(np.bincount(source, minlength=len(counts)) - n * share) <= 1)
    for j, count in enumerate(counts):
        inside = drawn[source == j] - order.offsets[j]
        assert inside.min() >= 0
        for first in range(0, len(inside) - count + 1, count):  # none comes again before all have come
            assert len(np.unique(inside[first : first + count])) == count


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    runs=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(0, 9)), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_run_on_changing_worlds_consumes_exactly_the_order(counts, runs, data):
    """Each interruption may change the number of processes and the micro-batch; a step stays 24 windows."""
    order = Mixture(counts, [1.0, 0.3, 2.5][: len(counts)], 3)
    consumed, seen = 0, []
    for world, steps in runs:
        micro = data.draw(st.sampled_from([m for m in (1, 2, 3, 4, 6, 12, 24) if 24 % (world * m) == 0]))
        accumulated = 24 // (world * micro)
        ranks = [iter(StepSampler(order, micro, consumed, rank, world)) for rank in range(world)]
        for _ in range(steps):
            step = [index for _ in range(accumulated) for rank in ranks for index in next(rank)]
            assert step == order.take(np.arange(consumed, consumed + 24)).tolist()
            consumed += 24
            seen += step
    assert seen == order.take(np.arange(consumed)).tolist()
    if len(counts) == 1:
        for epoch in range(consumed // counts[0]):
            assert sorted(seen[epoch * counts[0] : (epoch + 1) * counts[0]]) == list(range(counts[0]))
