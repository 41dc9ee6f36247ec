"""What separates documents, and what a masked token leaves behind: nothing."""

from __future__ import annotations

import pytest
import torch

import retrofox
from retrofox.model.modeling_fox import CACHE

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 1]])
BOUNDS = torch.tensor([0, 6, 9, 10, 12], dtype=torch.int32)


def ids_of(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 288, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **inputs) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **inputs).logits


def alone(model, ids, bounds=BOUNDS) -> torch.Tensor:
    """Logits of each document of one row by itself."""
    pieces = [logits(model, ids[:, a:b]) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return torch.cat(pieces, 1)


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
    ],
    ids=["positions", "ones", "true", "cu_seq_lens", "both", "all", "cu_seqlens"],
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
    with pytest.raises(ValueError, match="must name the same documents"):
        logits(pico_fox(), ids_of(1, 12), cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS - 1)


def test_positions_that_skip_forward_stay_in_their_document(pico_llama, path):
    base = pico_llama()
    model = retrofox.convert(pico_llama(), fox=retrofox.FoxSpec(rope="keep", init="open")).eval()
    ids, positions = ids_of(1, 12), torch.tensor([[0, 1, 2, 3, 100, 101, 102, 240, 241, 242, 243, 244]])
    expected = logits(base, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(logits(model, ids, position_ids=positions), expected, atol=2e-5, rtol=2e-5)


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
