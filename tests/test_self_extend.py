"""Self-Extend and dual chunk attention, against their formulas and the model that they extend."""

from typing import Any

import pytest
import torch
from self_extend import DualChunk, SelfExtend, extended  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 50
PLACE = torch.arange(LENGTH)
DISTANCE = PLACE[:, None] - PLACE


def rotate(x, places):
    angles = torch.outer(places.float(), 1e4 ** -(torch.arange(0, 8, 2) / 8)).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, LENGTH, 8).unbind()


def logits(qkv, query_places, key_places):
    return 0.3 * rotate(qkv[0], query_places) @ rotate(qkv[1], key_places).transpose(-1, -2)


def attended(qkv, chosen):
    return chosen.masked_fill(DISTANCE < 0, -torch.inf).softmax(-1) @ qkv[2]


@pytest.mark.parametrize(("window", "group"), [(7, 3), (16, 8), (25, 2), (49, 4)])
def test_self_extend_is_the_softmax_over_both_products(qkv, window, group):
    far = logits(qkv, PLACE // group + window - window // group, PLACE // group)
    wanted = attended(qkv, torch.where(window > DISTANCE, logits(qkv, PLACE, PLACE), far))
    torch.testing.assert_close(SelfExtend(window, group)(*qkv, rotate, 0.3), wanted)


@pytest.mark.parametrize("size", [8, 10, 25])
def test_dual_chunk_is_the_softmax_over_three_products(qkv, size):
    trained, inside, chunk = size + 3, PLACE % size, PLACE // size
    apart = chunk[:, None] - chunk
    after = logits(qkv, (size + inside).clamp(max=trained - 1), inside)
    far = logits(qkv, torch.full_like(PLACE, trained - 1), inside)
    wanted = torch.where(apart == 0, logits(qkv, inside, inside), torch.where(apart == 1, after, far))
    torch.testing.assert_close(DualChunk(size, trained)(*qkv, rotate, 0.3), attended(qkv, wanted))


def test_a_model_is_itself_at_group_one_and_within_the_window_and_afterwards():
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    ids = torch.randint(0, 99, (2, LENGTH))

    @torch.no_grad()
    def read():
        return model(input_ids=ids, use_cache=False).logits

    plain = read()
    with extended(model, SelfExtend(16, 1)):
        torch.testing.assert_close(read(), plain, rtol=1e-3, atol=1e-3)
    for method in (SelfExtend(16, 4), DualChunk(16, 64)):
        with extended(model, method):
            found = read()
        torch.testing.assert_close(found[:, :16], plain[:, :16], rtol=1e-3, atol=1e-3)
        assert (found - plain).abs().max() > 0.1
    torch.testing.assert_close(read(), plain, rtol=0, atol=0)
