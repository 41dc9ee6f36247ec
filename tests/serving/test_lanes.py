"""Lanes: the product of longer vectors is Forgetting Attention's logit, and c survives its stay in a cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox.serving.lanes import TERMS, Lanes, plan_lanes, running_sum, split

CPU_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def anywhere(width: int) -> bool:
    return True


def cpu(width: int) -> bool:
    return width in CPU_WIDTHS


def keys_and_queries(log_f: torch.Tensor, sinks: int, lanes: Lanes, scale: float, dtype: torch.dtype):
    """Lanes of all keys (T, Hkv, width) and queries (T, Hkv, G, width) of one text, made as a server makes them."""
    start, before = torch.tensor([0, len(log_f)]), torch.zeros(1, *log_f.shape[1:])
    c, position = running_sum(log_f.double(), start, torch.tensor([len(log_f)]), before)
    query = lanes.query(c, scale, dtype).unflatten(1, log_f.shape[1:])
    return lanes.key(c, position >= sinks, scale, dtype), query, lanes.value(c, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_logits_are_those_of_forgetting_attention(dtype, groups, sinks):
    torch.manual_seed(0)
    tokens, kv_heads, scale = 40, 2, 64**-0.5
    log_f = -torch.rand(tokens, kv_heads, groups) * 2
    lanes = plan_lanes(groups, 64, dtype, anywhere)
    keys, queries, values = keys_and_queries(log_f, sinks, lanes, scale, dtype)
    logits = torch.einsum("ihgw,jhw->hgij", queries.double(), keys.double()) * scale
    c = log_f.double().cumsum(0)
    wanted = (c[:, None] - c[None]).permute(2, 3, 0, 1)
    wanted[..., :sinks] = 0.0
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert (logits - wanted)[..., causal].abs().max() < (2e-5 if dtype == torch.bfloat16 else 1e-9)
    assert (lanes.state(values) - c).abs().max() < 1e-6


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 30), min_size=6, max_size=6),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_texts_in_any_chunks_and_batches_have_the_sum_of_the_whole(lengths, cuts, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    texts = [-torch.rand(n, 2, 3, generator=generator).double() for n in lengths]
    cuts = [min(cut, n) for cut, n in zip(cuts, lengths, strict=False)]
    new = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    before = torch.stack(
        [text[:cut].sum(0) if cut else torch.full((2, 3), 99.0).double() for text, cut in zip(texts, cuts, strict=True)]
    )
    starts = torch.tensor([0, *torch.tensor([len(x) for x in new]).cumsum(0).tolist()], dtype=torch.int32)
    batch = torch.cat([*new, torch.full((padding, 2, 3), -7.0).double()])
    if not len(batch):
        return
    c, position = running_sum(batch, starts, torch.tensor(lengths, dtype=torch.int32), before)
    for number, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
        torch.testing.assert_close(c[starts[number] : starts[number + 1]], text.cumsum(0)[cut:])
        assert position[starts[number] : starts[number + 1]].tolist() == list(range(cut, len(text)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_decoded_token_by_token_goes_on_from_what_the_cache_kept(dtype):
    """A steep start and then nearly open gates: where c is read back in too few bits it no longer moves."""
    lanes = plan_lanes(4, 64, dtype, cpu)
    log_f = torch.full((4000, 1, 4), -1e-4)
    log_f[:1000] = -8.0
    c = torch.zeros(1, 1, 4).double()
    for row in log_f:
        c, _ = running_sum(row[None].double(), torch.tensor([0, 1]), torch.tensor([9]), c)
        c = lanes.state(lanes.value(c, dtype))
    whole = log_f.double().sum(0)
    assert (c - whole).abs().max() < 2e-3
    assert (c - -8000.0).abs().min() > 0.25


def test_three_bfloat16_lanes_hold_steep_gates_at_32k_tokens():
    torch.manual_seed(0)
    scale, keys = 64**-0.5, 32768
    c = (-torch.rand(keys) * 2).double().cumsum(0)
    content = torch.randn(keys).double()
    exact = (content - c).softmax(0)
    lanes = sum(part.double() for part in split(-c / scale, TERMS[torch.bfloat16], torch.bfloat16))
    assert ((content + lanes * scale).softmax(0) - exact).abs().sum() < 2e-3


@pytest.mark.parametrize(
    ("groups", "head_dim", "dtype", "width"),
    [
        (3, 64, torch.bfloat16, 16),
        (4, 64, torch.bfloat16, 16),
        (8, 64, torch.bfloat16, 32),
        (8, 64, torch.float32, 32),
        (1, 80, torch.bfloat16, 16),
        (4, 96, torch.bfloat16, 16),
        (4, 128, torch.bfloat16, 32),  # 144 is no width of the CPU's kernels
        (8, 128, torch.bfloat16, 32),
    ],
)
def test_widths_are_the_next_that_the_kernels_have(groups, head_dim, dtype, width):
    lanes = plan_lanes(groups, head_dim, dtype, cpu)
    assert lanes.width == width
    assert lanes.terms * (groups + 1) <= width
    assert lanes.state_terms * groups <= width
    assert lanes.state_terms >= (4 if dtype == torch.bfloat16 else 2)


def test_a_head_without_room_is_refused():
    with pytest.raises(ValueError, match="no attention kernel here takes heads of 256 channels"):
        plan_lanes(4, 256, torch.bfloat16, lambda width: width <= 256)
