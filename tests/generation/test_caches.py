"""The cache that grows in place: its operations keep the sums of the gates."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import ids_of


def filled(opened: LoadedModel, ids: torch.Tensor, **options):
    cache = DynamicCache(config=opened.model.config)
    with torch.no_grad():
        opened.model(input_ids=ids, **{CACHE: cache}, **options)
    return cache


@pytest.fixture
def pico(pico_fox, pico_tokenizer) -> LoadedModel:
    return open_model(pico_fox(), tokenizer=pico_tokenizer)


def after(opened: LoadedModel, cache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last 6 tokens of ids (B, T): the cache holds those before."""
    with torch.no_grad():
        return opened.model(input_ids=ids[:, -6:], **{CACHE: cache}).logits


def from_scratch(opened: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return opened.model(input_ids=ids, use_cache=False).logits[:, -6:]


OPERATIONS = {
    "reorder_cache": (torch.tensor([2, 0, 0]), lambda x: x[[2, 0, 0]]),
    "batch_select_indices": (torch.tensor([1]), lambda x: x[[1]]),
    "batch_select_mask": (torch.tensor([True, False, True]), lambda x: x[[True, False, True]]),
    "batch_repeat_interleave": (2, lambda x: x.repeat_interleave(2, 0)),
    "crop": (-7, lambda x: x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_cache_operations_keep_sums(pico, name):
    argument, change = OPERATIONS[name]
    ids = ids_of(3, 40)
    kept = ids[:, : 33 if name == "crop" else 40]
    cache = filled(pico, ids)
    getattr(cache, name.replace("mask", "indices"))(argument)
    for step in range(2):  # the second goes on in place
        kept = torch.cat([kept if step else change(kept), ids_of(change(ids).shape[0], 6, seed=step)], 1)
        torch.testing.assert_close(after(pico, cache, kept), from_scratch(pico, kept), atol=2e-5, rtol=2e-5)
    copied = copy.deepcopy(cache)
    longer = torch.cat([kept, ids_of(kept.shape[0], 6, seed=7)], 1)
    expected = from_scratch(pico, longer)
    for one in (cache, copied):  # each writes to memory of its own
        torch.testing.assert_close(after(pico, one, longer), expected, atol=2e-5, rtol=2e-5)


def test_a_cache_is_kept_over_growth_and_modes(pico):
    """Prefilled in chunks, past what was allocated, with and without gradients, in inference mode and out of it."""
    ids = ids_of(2, 400)
    cache: Any = DynamicCache()
    parts = []
    contexts = [torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad, torch.no_grad]
    for n, (a, b) in enumerate(itertools.pairwise([0, 100, 101, 120, 121, 130, 131, 132, 390, 391, 392, 399, 400])):
        with contexts[n % len(contexts)]():
            parts.append(pico.model(input_ids=ids[:, a:b], **{CACHE: cache}).logits.detach().clone())
    with torch.no_grad():
        whole = pico.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=5e-5, rtol=5e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(after(pico, cache, ids[:, :6]), whole[:, :6], atol=5e-5, rtol=5e-5)


def test_gradients_reach_through_a_cache(pico):
    ids, model = ids_of(2, 20), pico.model
    gradients = []
    for cached in (True, False):
        model.zero_grad()
        if cached:
            cache = DynamicCache(config=model.config)
            parts = [model(input_ids=x, **{CACHE: cache}).logits for x in ids.split(10, 1)]
            logits = torch.cat(parts, 1)
            with torch.no_grad():  # what the backward needs is not written over
                model(input_ids=ids_of(2, 5), **{CACHE: cache})
        else:
            logits = model(input_ids=ids, use_cache=False).logits
        logits[:, 10:].square().mean().backward()
        layer = model.model.layers[-1].self_attn  # the first keys of deeper layers hang on no earlier gates
        gradients.append([layer.k_proj.weight.grad.clone(), layer.q_proj.weight.grad.clone()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_decoding_step_copies_nothing_of_the_cache(pico):
    cache: Any = filled(pico, ids_of(2, 100))
    places = []
    for step in range(3):  # the first may move what is there to where there is room
        with torch.no_grad():
            pico.model(input_ids=ids_of(2, 1, seed=step), **{CACHE: cache})
        places.append([x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values, layer.sums)])
    assert places[0] == places[1] == places[2]


def test_a_cache_of_another_model_or_batch_is_refused(pico, pico_llama):
    ids = ids_of(2, 20)
    with pytest.raises(ValueError, match="new cache"):
        pico_llama()(input_ids=ids, **{CACHE: filled(pico, ids)})
    foreign = DynamicCache(config=pico.model.config)
    pico_llama()(input_ids=ids, **{CACHE: foreign})
    with pytest.raises(ValueError, match="without forget gates"):
        after(pico, foreign, ids)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        after(pico, filled(pico, ids), ids_of(1, 6))
    replaced: Any = filled(pico, ids)
    for layer in replaced.layers:
        layer.keys, layer.values = layer.keys[:, :, :9], layer.values[:, :, :9]
    with pytest.raises(ValueError, match="from outside"):
        after(pico, replaced, ids)
