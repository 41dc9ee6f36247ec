"""Greedy and sampled decoding of `generate`, replayed from a CUDA graph.

A decoding step is some hundred launches, which the host takes several times as long to make as the GPU to run. Here the
step reads the cache's length on the device (`static_cache`), so it is the same at every length. It is captured as a
CUDA graph once for each power of two that the cache passes. The first token comes from transformers' own loop, which
also prefills. On a CPU transformers' loop does the decoding. Tests name "cpu" in `DEVICES`: the step then runs there,
uncaptured.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformers import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from retrofox.acceleration.captured_step import Decoding, reads_for
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.acceleration.growing_cache import CACHE
from retrofox.acceleration.pooled_cache import PooledDecoding
from retrofox.config_values import depends_on_length, horizon_of, rope_types

DEVICES = ("cuda",)
LEAST_TOKENS = 8  # a capture costs the host about two steps
MOST_TOKENS = 1 << 24  # of a text: a step has room for all their ids; asking for more is asking for no limit
KNOWN_INPUTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position", "tokenizer"}
"""Model inputs that a step makes itself; others that aren't None keep transformers' loop."""
logger = logging.getLogger(__name__)


def forgets(model: Any) -> bool:
    """Whether `generate` should make a ForgettingCache: the model has a horizon, and decodes as fast with it."""
    if horizon_of(model.config) is None:
        return False
    return model.device.type not in DEVICES or not _has_latents(model)


def _has_latents(model: Any) -> bool:
    """Whether keys are expanded from a latent (MLA): the captured step does that over a full cache alone."""
    return any(hasattr(layer.self_attn, "expand_kv") for layer in model.get_decoder().layers)


def reason_against(
    model: Any, input_ids: torch.Tensor, stopping: Any, config: Any, synced_gpus: bool, inputs: dict[str, Any]
) -> str | None:
    """Why `generate` has to take transformers' own loop, or None if a captured step serves it."""
    cache, mask, positions = (inputs.get(name) for name in (CACHE, "attention_mask", "position_ids"))
    other = sorted(name for name, x in inputs.items() if x is not None and name not in KNOWN_INPUTS)
    limit = MOST_TOKENS + 1 if stopping.max_length is None else stopping.max_length
    devices = {str(x) for x in (getattr(model, "hf_device_map", None) or {}).values()}
    reasons = {
        f"the model is on {input_ids.device.type}, a step is captured on {' and '.join(DEVICES)}": (
            input_ids.device.type not in DEVICES
        ),
        "processes wait for each other (synced_gpus)": synced_gpus,
        "more than tokens is to be returned (return_dict_in_generate)": config.return_dict_in_generate,
        "the model is in training mode": model.training,
        "hooks on all modules (torch.nn.modules.module) run on the host": _has_any_global_hook(),
        f"the model is spread over several devices: {', '.join(sorted(devices))}": len(devices) > 1,
        "there is no cache (use_cache=False)": not inputs.get("use_cache", True) or cache is None,
        f"the cache is a {type(cache).__name__}, not a DynamicCache": cache is not None and not _fixable(cache),
        f"the model gets {', '.join(other)} beside tokens": bool(other),
        f"rotary frequencies depend on the length of the text ({', '.join(sorted(rope_types(model.config)))})": (
            depends_on_length(model.config)
        ),
        "the prompt is given as embeddings": input_ids.dim() != 2 or input_ids.shape[1] == 0,
        "the length of the text has no limit": limit > MOST_TOKENS,
        "it is an assistant's": bool(getattr(config, "is_assistant", False)),
    }
    reason = next((why for why, holds in reasons.items() if holds), None)
    if reason is not None:
        return reason
    new = limit - input_ids.shape[1]
    if new < LEAST_TOKENS:
        return f"a capture doesn't pay for {new} new tokens, fewer than {LEAST_TOKENS}"
    if isinstance(cache, ForgettingCache):
        if any(layer.whole for layer in cache.layers):  # type: ignore[attr-defined]
            return "the cache keeps what a mask with holes left of a text"
        if _has_latents(model):
            return "a cache that forgets expands a latent's keys in transformers' loop alone"
        shortest = input_ids.shape[1] if mask is None else int(mask.sum(1).min())
        if shortest <= (model.config.fox["sink_tokens"] or 0):
            return "a text is shorter than its sinks"
    if positions is not None and positions.dim() != 2:
        return "positions have more than one dimension per token"
    if mask is not None:
        if mask.shape != input_ids.shape:
            return "the attention mask isn't one value per token"
        seen = mask.bool()
        if not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
            return "the attention mask hides more than tokens before the text"
    return None


def _fixable(cache: Any) -> bool:
    if type(cache) is ForgettingCache:
        return True
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return False
    names = {type(layer).__name__ for layer in cache.layers}
    return names <= {"GrowingLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "GatedDynamicSlidingWindowLayer"}


@torch.no_grad()
def decode(
    model: Any,
    native: Callable[..., Any],
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> Any:
    """`GenerationMixin._sample`, by steps of our own where they serve; arguments and result as there.

    `model.decoded_by` says afterwards which way it took: "a captured step", or why transformers' loop.
    """
    reason = reason_against(model, input_ids, stopping_criteria, generation_config, synced_gpus, inputs)
    given = {"logits_processor": logits_processor, "generation_config": generation_config, **inputs}
    loop = functools.partial(native, input_ids, **given)
    if reason is not None:
        model.decoded_by = f"transformers' loop: {reason}"
        logger.info("decoding by transformers' loop: %s", reason)
        return loop(stopping_criteria=stopping_criteria, synced_gpus=synced_gpus, streamer=streamer)
    cache, total = inputs.get(CACHE), stopping_criteria.max_length
    ids, unfinished = _first(loop, cache, stopping_criteria, streamer, input_ids.shape[1])
    model.decoded_by = "the prefill: one token ended the text"
    if bool(unfinished.any()):
        kind = PooledDecoding if isinstance(cache, ForgettingCache) else Decoding
        decoding = kind(model, cache, ids, inputs.get("attention_mask"), inputs.get("position_ids"), total)
        with decoding:
            sampler = Sampler(ids, unfinished, total, logits_processor, stopping_criteria, generation_config)
            ids = _loop(decoding, sampler, streamer)
        model.decoded_by = decoding.how
    if streamer is not None:
        streamer.end()
    return ids


def _first(
    loop: Callable[..., Any], cache: Any, stopping_criteria: Any, streamer: Any, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt of T = `length` tokens and a token more by transformers' loop: ids (B, T + 1), and which rows go on."""
    total = stopping_criteria.max_length
    cache.tokens_to_reserve = min(total, reads_for(min(total, length + 1)))
    one = _StopAfterOneToken(stopping_criteria)
    goes_on = streamer and SimpleNamespace(put=streamer.put, end=lambda: None)  # its text has not ended yet
    ids = loop(stopping_criteria=one, streamer=goes_on)
    del cache.tokens_to_reserve
    assert one.done is not None, "the loop asks its stopping criteria after each token"
    return ids, ~one.done


class _StopAfterOneToken(StoppingCriteriaList):
    """The criteria given, remembered and overruled: transformers' loop stops after one token."""

    def __init__(self, criteria: Any):
        super().__init__(criteria)
        self.done: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        self.done = done = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        return torch.ones_like(done)


class Sampler:
    """Chooses the next tokens as transformers does (processors, draws, criteria); notes which rows have ended.

    Greedy search without processors is made of device operations only (`captures`), so it may be part of the graph. ids
    (B, total) holds the tokens so far, `column` is the next token's place.
    """

    def __init__(
        self, ids: torch.Tensor, unfinished: torch.Tensor, total: int, processors: Any, criteria: Any, config: Any
    ):
        self.column, self.total = ids.shape[1], total
        self.ids = ids.new_zeros(ids.shape[0], total)
        self.ids[:, : self.column] = ids
        self.tokens = ids[:, -1:].clone()
        self.at = torch.tensor([self.column], device=ids.device)
        self.unfinished = unfinished.clone()
        self.processors, self.criteria, self.samples = processors, criteria, config.do_sample
        ends = [x for x in criteria if hasattr(x, "eos_token_id")]
        self.pads, pad = bool(ends), getattr(config, "_pad_token_tensor", None)
        self.pad = torch.zeros_like(self.at) if pad is None else pad.to(ids.device)
        plain = all(type(x) in (EosTokenCriteria, MaxLengthCriteria) for x in criteria)
        self.captures = plain and not self.samples and not len(processors)
        self.ends = torch.cat([x.eos_token_id.flatten().to(ids.device) for x in ends]) if plain and ends else None

    def on_device(self, logits: torch.Tensor) -> None:
        """Greedy: the next token of each row, written, and whether the row ends with it."""
        tokens = logits.argmax(-1)
        if self.pads:
            tokens = torch.where(self.unfinished, tokens, self.pad)
        self.ids.index_copy_(1, self.at, tokens[:, None])
        self.at.add_(1)
        self.tokens.copy_(tokens[:, None])
        if self.ends is not None:
            self.unfinished.logical_and_((tokens[:, None] != self.ends).all(1))

    def from_host(self, logits: torch.Tensor) -> None:
        """The same with processors, draws and criteria of any kind."""
        so_far = self.ids[:, : self.column]
        scores = self.processors(so_far, logits.to(torch.float32, copy=True))
        if self.samples:
            tokens = torch.multinomial(torch.softmax(scores, -1), 1)[:, 0]
        else:
            tokens = scores.argmax(-1)
        if self.pads:
            tokens = torch.where(self.unfinished, tokens, self.pad)
        self.ids[:, self.column] = tokens
        self.tokens.copy_(tokens[:, None])
        self.unfinished.logical_and_(~self.criteria(self.ids[:, : self.column + 1], None))


def _loop(decoding: Decoding, sampler: Sampler, streamer: Any) -> torch.Tensor:
    """Decodes until all rows have ended; returns the ids (B, tokens).

    On a GPU the host learns one step late that the last row has ended, so that the GPU never waits for it; the random
    numbers of the extra step are given back.
    """
    lag = 1 if sampler.ids.is_cuda else 0
    pending: collections.deque[_PendingToken] = collections.deque()
    decoding.end, decoding.tokens = sampler.column, sampler.tokens
    while sampler.column < sampler.total:
        token = _PendingToken(sampler)
        decoding.step(sampler)
        sampler.column += 1
        token.note(sampler, streamer is not None)
        pending.append(token)
        while len(pending) > lag or (pending and sampler.column == sampler.total):
            first = pending.popleft()
            done = first.arrived(streamer)
            decoding.end = first.column
            if done:
                if pending:
                    pending[0].undraw()
                return sampler.ids[:, : first.column]
    return sampler.ids[:, : sampler.column]


class _PendingToken:
    """The token of one step, on its way to the host."""

    def __init__(self, sampler: Sampler):
        self.generator = self.drawn = self.event = None
        if sampler.samples and sampler.ids.is_cuda:
            self.generator = torch.cuda.default_generators[sampler.ids.device.index or 0]
            self.drawn = self.generator.get_offset()

    def note(self, sampler: Sampler, tokens: bool) -> None:
        self.column, pinned = sampler.column, sampler.ids.is_cuda
        told = (
            torch.cat([sampler.unfinished.any()[None].long(), sampler.tokens[:, 0]]) if tokens else sampler.unfinished
        )
        if not pinned:
            self.told = told.clone()
            return
        self.told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        self.told.copy_(told, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def arrived(self, streamer: Any) -> bool:
        """Hands the tokens to the streamer; whether all rows have ended."""
        if self.event is not None:
            self.event.synchronize()
        if streamer is None:
            return not bool(self.told.any())
        streamer.put(self.told[1:])
        return not bool(self.told[0])

    def undraw(self) -> None:
        if self.generator is not None and self.drawn is not None:
            self.generator.set_offset(self.drawn)
