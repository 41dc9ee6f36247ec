"""benchmarks/train_step.py without a GPU: its control attends as a document at a time does, and turns are timed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import train_step as bench  # pyright: ignore[reportMissingImports]
from torch.nn.functional import scaled_dot_product_attention


def flash(q, k, v, ends, ends_of_keys, longest, longest_of_keys, dropout, causal, debug, *, scale):
    """FlashAttention's operator for rows of several lengths, by SDPA."""
    assert ends is ends_of_keys
    assert longest == longest_of_keys == int(ends.diff().max())
    assert (dropout, causal, debug) == (0.0, True, False)
    parts = []
    for start, stop in itertools.pairwise(ends.tolist()):
        one = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True, scale=scale)[0])
    return (torch.cat([x.transpose(0, 1) for x in parts]),)


@pytest.mark.parametrize("ends", [[0, 5, 32, 40, 64], None], ids=str)
def test_all_documents_at_once_attend_as_one_at_a_time(monkeypatch, ends):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    q, k, v = (torch.randn(2, heads, 32, 16).bfloat16() for heads in (6, 3, 3))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    given = (module, q, k, v, None, ends)
    found, wanted = (f(*given, scaling=0.3)[0] for f in (bench.attend_at_once, bench.attend_by_document))
    torch.testing.assert_close(found, wanted)
