"""The closed form of the live share."""

from __future__ import annotations

import pytest

from retrofox.planning.live_share import live_shares


def test_operations_are_a_mean_and_the_cache_keeps_the_largest_share_of_a_group():
    found = live_shares([[16 / 8192, 16 / 16384], [1e-9, 0.0]], 16.0, kv_heads=1)
    assert found["live_operations_8k"] == pytest.approx(1.0)
    assert found["live_cache_32k"] == pytest.approx((0.5 + 1) / 2)
    assert found["live_operations_32k"] == pytest.approx((0.4375 + 0.75 + 1 + 1) / 4)
