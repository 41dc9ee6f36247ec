"""What separates documents, and what a masked token leaves behind: nothing."""

from __future__ import annotations

import fox_kernels
import pytest
import torch
from transformers import DynamicCache

from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.model import attention_torch
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import ids_of, logits

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 1]])
BOUNDS = torch.tensor([0, 6, 9, 10, 12], dtype=torch.int32)


def alone(model, ids, bounds=BOUNDS) -> torch.Tensor:
    """Logits of each document of one row by itself."""
    pieces = [logits(model, ids[:, a:b]) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return torch.cat(pieces, 1)


SEQ_IDX = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3]], dtype=torch.int32)
CU = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 6, "max_length_k": 6}


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": PACKED},
        {"position_ids": PACKED, "attention_mask": torch.ones(1, 12, dtype=torch.long)},
        {"position_ids": PACKED, "attention_mask": torch.ones(1, 12, dtype=torch.bool)},
        CU,
        {**CU, "position_ids": PACKED},
        {**CU, "position_ids": PACKED, "attention_mask": torch.ones(1, 12, dtype=torch.long)},
        {"cu_seqlens": BOUNDS},
        {"cu_seq_lens_k": BOUNDS},
        {"cu_seq_lens": BOUNDS},
        {"seq_idx": SEQ_IDX},
        {"seq_idx": SEQ_IDX, "position_ids": PACKED, **CU},
    ],
    ids=str,
)
def test_packed_documents_do_not_see_each_other(pico_fox, path, inputs):
    model, ids = pico_fox(), ids_of(1, 12)
    torch.testing.assert_close(logits(model, ids, **inputs), alone(model, ids), atol=2e-5, rtol=2e-5)


def test_packed_documents_before_padding(pico_fox, path):
    model, ids = pico_fox(), ids_of(1, 15)
    mask = torch.cat([torch.ones(1, 12, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)], 1)
    positions = torch.cat([PACKED, torch.zeros(1, 3, dtype=torch.long)], 1)
    found = logits(model, ids, position_ids=positions, attention_mask=mask)[:, :12]
    torch.testing.assert_close(found, alone(model, ids[:, :12]), atol=2e-5, rtol=2e-5)


def test_a_hole_inside_a_packed_document_is_refused(pico_fox):
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="hides tokens within a packed document"):
        logits(pico_fox(), ids_of(1, 12), position_ids=PACKED, attention_mask=mask)


def test_documents_of_queries_and_keys_that_differ_are_refused(pico_fox):
    for other in ({"cu_seq_lens_k": BOUNDS - 1}, {"seq_idx": SEQ_IDX.clamp_max(2)}):
        with pytest.raises(ValueError, match="must name the same documents"):
            logits(pico_fox(), ids_of(1, 12), cu_seq_lens_q=BOUNDS, **other)


@pytest.mark.parametrize("hidden", [[9, 10, 11], [3, 4], [0, 1]], ids=["right padding", "hole", "left padding"])
@pytest.mark.parametrize("cached", [False, True])
def test_masked_tokens_leave_nothing_behind(pico_fox, path, hidden, cached):
    """Whatever stands where the mask is 0, real tokens before, between and after it have the same logits."""
    model, ids = pico_fox(), ids_of(2, 16)
    mask = torch.ones_like(ids)
    mask[1, hidden] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    other = ids.clone()
    other[1, hidden] = 7
    found = []
    for row in (ids, other):
        if cached:
            with torch.no_grad():
                first = model(input_ids=row[:, :12], attention_mask=mask[:, :12], position_ids=positions[:, :12])
                kept = {CACHE: first[CACHE]}
                rest = model(input_ids=row[:, 12:], attention_mask=mask, position_ids=positions[:, 12:], **kept)
            found.append(torch.cat([first.logits, rest.logits], 1))
        else:
            found.append(logits(model, row, attention_mask=mask, position_ids=positions))
    seen = mask.bool()
    torch.testing.assert_close(found[0][seen], found[1][seen], atol=1e-5, rtol=1e-5)
    text = ids[1:, seen[1]]
    torch.testing.assert_close(found[0][1:, seen[1]], logits(model, text), atol=2e-5, rtol=2e-5)


GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
HIDDEN = {"right": [11, 12, 13, 14, 15], "left": [0, 1, 2], "hole": [5, 6], "left and right": [0, 14, 15]}


def masked(hidden: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids (2, 16), their mask, which hides these tokens of the second row)."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, hidden] = 0
    return ids_of(2, 16), mask


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("horizon", [None, 3.0], ids=["full", "forgetting"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_with_open_gates_a_masked_prompt_goes_on_as_the_bases(pico_base, pico_fox, hidden, horizon, family):
    """Also where the first new token comes from the logits of a hidden one, as for a right-padded row."""
    config = {"sliding_window": 9} if family == "mistral" else {}
    ids, mask = masked(HIDDEN[hidden])
    model = pico_fox(stirred=False, family=family, config=config, rope="keep", half_life=(1e9, 1e9), horizon=horizon)
    wanted = pico_base(family, **config).generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), wanted)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=6, **GREEDY), wanted)
    assert torch.equal(model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY), wanted)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_static_cache_is_told_of_hidden_tokens(pico_fox, hidden):
    model, (ids, mask) = pico_fox(pro=("k-shift", "v-shift")), masked(HIDDEN[hidden])
    options = {**GREEDY, "attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    dynamic, static = (model.generate(ids, cache_implementation=kind, **options) for kind in ("dynamic", "static"))
    torch.testing.assert_close(static.logits, dynamic.logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cache", [None, DynamicCache, ForgettingCache])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_new_tokens_after_a_masked_prompt_see_its_text_alone(pico_fox, monkeypatch, hidden, cache):
    monkeypatch.setattr("retrofox.acceleration.forgetting_cache.PAGE", 4)
    model = pico_fox(half_life=(1.0, 3.0), horizon=6.0, sink_tokens=2)
    ids, mask = masked(HIDDEN[hidden])
    new = ids_of(2, 40, seed=6)
    row, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    if cache is None:
        found = logits(model, row, attention_mask=mask, position_ids=positions)[:, 16:]
    else:
        kept, parts = {CACHE: cache()}, []
        with torch.no_grad():
            for a, b in ((0, 16), (16, 20), *((n, n + 1) for n in range(20, 56))):
                given = {"attention_mask": mask[:, :b], "position_ids": positions[:, a:b], **kept}
                parts.append(model(row[:, a:b], **given).logits)
        found = torch.cat(parts, 1)[:, 16:]
    wanted = [logits(model, x[None, m.bool()])[:, -40:] for x, m in zip(row, mask, strict=True)]
    torch.testing.assert_close(found, torch.cat(wanted), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_of_left_padding_are_zero_without_the_package(softcap):
    q, k, v = (torch.randn(1, 12, 2, 8, requires_grad=True) for _ in range(3))
    log_f = (-torch.rand(1, 12, 2)).requires_grad_()
    start = torch.tensor([5], dtype=torch.int32)
    out = attention_torch.forgetting_attention(q, k, v, log_f, seq_start=start, softcap=softcap, horizon=2.0)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient[:, :5].abs().sum() == 0
        assert gradient[:, 5:].isfinite().all()


@pytest.mark.parametrize("horizon", [None, 2.0])
def test_a_window_leaves_sinks_visible_without_the_kernels(horizon):
    q, k, v = (torch.randn(2, 20, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    log_f = torch.nn.functional.logsigmoid(torch.randn(2, 20, 2, generator=torch.Generator().manual_seed(3)))
    options = {"window": 5, "sink": 2, "horizon": horizon}
    expected = fox_kernels.forgetting_attention(q, k, v, log_f, backend="reference", **options)
    torch.testing.assert_close(attention_torch.forgetting_attention(q, k, v, log_f, **options), expected)
