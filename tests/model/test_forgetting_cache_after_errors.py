"""What a cache that forgets does after an error, Ctrl-C, or a change that it can't follow."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.anatomy import attention_mode, attentions
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import ids_of, mask_of
from tests.model.test_forgetting_cache import SPEC, logits

pytestmark = pytest.mark.usefixtures("small_pages")


def test_a_refused_crop_leaves_the_cache_as_it_was(pico_fox):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(1, 120), mask_of(1, 120), ForgettingCache()
    gate: Any = next(attention for _, attention in attentions(model)).forget_gate
    torch.nn.init.zeros_(gate.weight)
    torch.nn.init.constant_(gate.bias, 30.0)  # the first layer forgets nothing
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (120,))
    logits(model, ids[:, :110], mask[:, :110], cache, (110,))
    with pytest.raises(ValueError, match="has forgotten keys"):
        cache.crop(-60)
    layers: list[Any] = cache.layers
    assert [layer.get_seq_length() for layer in layers] == [110, 110]
    with torch.no_grad():
        found = model(ids[:, 110:], attention_mask=mask, position_ids=torch.arange(110, 120)[None], **{CACHE: cache})
    torch.testing.assert_close(found.logits, wanted[:, 110:], atol=1e-4, rtol=1e-4)


def test_another_mode_or_mask_than_it_forgot_in_is_refused(pico_fox):
    model, ids, cache = pico_fox(**SPEC), ids_of(1, 101), ForgettingCache()
    with torch.no_grad():
        model(ids[:, :100], **{CACHE: cache})
        with attention_mode(model, "open"), pytest.raises(ValueError, match=r"forgot by a horizon of 8\.0 nats"):
            model(ids[:, 100:], **{CACHE: cache})
        mask = torch.ones(1, 101, dtype=torch.long)
        mask[0, 98] = 0
        with pytest.raises(ValueError, match=r"takes left padding and no other mask: .*cache_implementation"):
            model(ids[:, 100:], attention_mask=mask, **{CACHE: cache})


def test_another_padding_or_batch_or_model_than_it_forgot_is_refused(pico_fox, pico_llama):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(3, 200), mask_of(3, 200), ForgettingCache()
    logits(model, ids, mask, cache, (200,))
    wider = mask.clone()
    wider[:, :190] = 0
    for other in (wider, torch.ones_like(mask)):
        with pytest.raises(ValueError, match="hides other tokens on the left than when this cache forgot"):
            model(ids[:, :1], attention_mask=torch.nn.functional.pad(other, (0, 1), value=1), **{CACHE: cache})
    with pytest.raises(ValueError, match="4 rows don't fit a cache of 3"):
        model(ids_of(4, 1), **{CACHE: cache})
    for held in (cache, ForgettingCache()):
        with pytest.raises(ValueError, match="forget gates of a converted model"):
            pico_llama()(ids[:, :1], **{CACHE: held})


def test_a_copy_goes_on_by_itself(pico_fox):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(3, 300), mask_of(3, 300), ForgettingCache()
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (300,))[:, 200:]
    logits(model, ids[:, :200], mask[:, :200], cache, (200,))
    other: Any = copy.deepcopy(cache)
    assert all(layer._found is None for layer in other.layers)
    for held in (cache, other):
        given = {"position_ids": (mask.cumsum(1) - 1)[:, 200:], CACHE: held}
        with torch.no_grad():
            found = model(ids[:, 200:], attention_mask=mask, **given).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def interrupted(call: Any, line: int) -> int:
    """Runs `call` up to a line of the model or its cache, as if Ctrl-C came there; returns how many lines it ran."""
    count = 0
    traced = ("acceleration", "modeling_fox", "cache_utils")

    def trace(frame, event, argument):
        nonlocal count
        if event == "line" and any(name in frame.f_code.co_filename for name in traced):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


WINDOWS = {"family": "mistral", "config": {"sliding_window": 7}}
SHIFTS = {"pro": "all"}


@pytest.mark.parametrize(("forgets", "more"), [(True, {}), (True, SHIFTS), (False, {}), (False, WINDOWS)], ids=str)
@pytest.mark.parametrize(("begin", "end"), [(0, 120), (100, 135), (100, 101)])
def test_ctrl_c_anywhere_in_a_call_leaves_a_cache_that_goes_on_or_a_clear_error(pico_fox, forgets, more, begin, end):
    model, ids, mask = pico_fox(**SPEC, **more), ids_of(2, 160), mask_of(2, 160)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (160,))
    whole: Any = ForgettingCache() if forgets else DynamicCache(config=model.config)
    if begin:
        logits(model, ids[:, :begin], mask[:, :begin], whole, (80, 20))

    @torch.no_grad()
    def read(cache: Any, first: int, last: int) -> torch.Tensor:
        given = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last], CACHE: cache}
        return model(ids[:, first:last], **given).logits

    went_on = failed = 0
    for line in range(1, 1 + interrupted(lambda: read(copy.deepcopy(whole), begin, end), 0), 7):
        cache = copy.deepcopy(whole)
        interrupted(lambda cache=cache: read(cache, begin, end), line)
        first = cache.get_seq_length()
        try:
            found = read(cache, first, 160)
        except ValueError as error:
            if "interrupted" not in str(error):
                raise
            failed += 1
        else:
            real = mask[:, first:].bool()
            torch.testing.assert_close(found[real], wanted[:, first:][real], atol=1e-4, rtol=1e-4)
            went_on += 1
    assert went_on > 10
    assert not (forgets and not more and end - begin == 1 and failed)  # within a page nothing is lost
