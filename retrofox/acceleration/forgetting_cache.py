"""A cache that frees the keys which a horizon hides for good: less memory, the same logits.

With a horizon, query i sees key j only while c_i - c_j > -horizon. c falls with i, so a key that no query head of its
kv head sees any more is never seen again. Every PAGE tokens such keys are dropped; sinks stay. What is left of a layer
lies in flat tensors without gaps, the newest PAGE tokens and more in a dense tail, within which a crop is exact.

A step gathers the live keys of one layer into a padded tensor: it moves three times the bytes that it keeps, and costs
as much memory as that layer's longest head, for a moment.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer

from retrofox.acceleration.growing_cache import summed, two_floats

PAGE = 256
LN_2 = 0.6931471805599453
SCORES = 1 << 24  # of a chunk of queries: 64 MB in float32
MARGIN = 1e-3  # nats beyond the horizon that a key must have decayed by: more than c loses by rounding
Tensor = torch.Tensor


class ForgettingLayer(DynamicLayer):
    """A layer of a `ForgettingCache`; tail (B, Hkv, t, width), flat (N, width), rows of flat sorted by (B, Hkv), place.

    The parts of tail and flat are keys, values, and c of a kv head's query heads as two floats (2 G). Behind the
    channels of the tail's keys lie the projections that key and value shift need of a token's predecessor.
    """

    incoming: Any = None  # (log f (B, T, H), [projections (B, T, Hkv, D) that the next call needs]) of the running call

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reset()

    def reset(self) -> None:
        self.is_initialized, self.seen, self.horizon = False, 0, None
        self.tail: list[Tensor] = []
        self.flat: list[Tensor] = []
        self.place: Any = None  # (N,) int32: position of each flat key
        self.counts: Any = None  # (B, Hkv) int64: flat keys of each kv head

    def get_seq_length(self) -> int:
        return self.seen

    @property
    def num_live(self) -> int:
        """Keys held, of all rows and kv heads."""
        return sum(x[0].shape[:-1].numel() for x in (self.flat, self.tail) if x)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        incoming, self.incoming = self.incoming, None
        if incoming is None:
            raise ValueError("this cache holds the forget gates of a converted model: give another model a new cache")
        self.newest_log_f, carried = incoming
        batch, kv_heads, tokens, self.head_dim = key_states.shape
        c = summed(self.newest_log_f)
        if self.seen:
            high, low = self.tail[2][:, :, -1].double().chunk(2, -1)
            c = c + (high + low).flatten(1)[..., None]
        c = torch.cat([x.unflatten(1, (kv_heads, -1)).transpose(2, 3) for x in two_floats(c)], -1)
        wide = torch.cat([key_states, *(x.transpose(1, 2).to(key_states.dtype) for x in carried)], -1)
        new = [wide, value_states, c]
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.flat = [x.new_empty(0, width) for x, width in zip(new, self._widths(new), strict=True)]
            self.place = torch.empty(0, dtype=torch.int32, device=self.device)
            self.counts = torch.zeros(batch, kv_heads, dtype=torch.int64, device=self.device)
        self.tail = [torch.cat(pair, 2) for pair in zip(self.tail, new, strict=True)] if self.seen else new
        self.seen += tokens
        return key_states, value_states

    def _widths(self, parts: list[Tensor]) -> list[int]:
        return [self.head_dim, *(x.shape[-1] for x in parts[1:])]

    def log_f(self) -> Tensor:
        """(B, T, H) float32 of the running call's keys."""
        return self.newest_log_f

    def cumulative(self) -> tuple[Tensor, Tensor]:
        """c (B, H, T) of the running call's keys, where they are all there are."""
        high, low = (x.transpose(2, 3).flatten(1, 2).contiguous() for x in self.tail[2].chunk(2, -1))
        return high, low

    def previous(self, count: int, head_dim: int) -> list[Tensor] | None:
        """`count` projections (B, Hkv, D) that the newest token carries, None where there is no token."""
        return list(self.tail[0][:, :, -1, -count * head_dim :].split(head_dim, -1)) if self.seen else None

    def gathered(self) -> tuple[list[Tensor], Tensor]:
        """([keys, values, c], places (B, Hkv, S), -1 where there is no key), each (B, Hkv, S, width): all live keys."""
        batch, kv_heads, tokens = self.tail[0].shape[:3]
        recent = torch.arange(self.seen - tokens, self.seen, dtype=torch.int32, device=self.device)
        recent = recent.expand(batch, kv_heads, -1)
        tail = [x[..., :width] for x, width in zip(self.tail, self._widths(self.tail), strict=True)]
        if not len(self.place):
            return tail, recent
        counts = self.counts.flatten()
        slot = torch.arange(int(counts.max()), device=self.device)
        source = ((counts.cumsum(0) - counts)[:, None] + slot).clamp_max(len(self.place) - 1)
        place = self.place[source].masked_fill(slot >= counts[:, None], -1).view(batch, kv_heads, -1)
        flat = [x[source].unflatten(0, (batch, kv_heads)) for x in self.flat]
        return [torch.cat(pair, 2) for pair in zip(flat, tail, strict=True)], torch.cat([place, recent], 2)

    def forget(self, horizon: float | None, sink: int, window: int | None, seq_start: Tensor | None) -> None:
        """Drops all that the options hide from the newest PAGE tokens, where as many more have come."""
        if self.horizon not in (None, horizon):
            raise ValueError(f"this cache forgot by a horizon of {self.horizon} nats, not {horizon}: start a new one")
        tokens = self.tail[0].shape[2]
        if tokens < 2 * PAGE:
            return
        self.horizon = horizon
        (keys, values, c), place = self.gathered()
        begin = self.seen - PAGE  # where the tail begins from now on
        first = 0 if seq_start is None else seq_start[:, None, None]
        live = (place >= first) & (place < begin)
        if window is not None:
            live &= place > begin - window
        if horizon is not None:
            high, low = (c[:, :, -PAGE - 1, None] - c).chunk(2, -1)  # of the last key before the tail, less all others
            live &= ((high + low) * LN_2 > -horizon - MARGIN).any(-1) | (place < first + sink)
        self.counts = live.sum(-1)
        self.flat, self.place = [x[live] for x in (keys, values, c)], place[live]
        self.tail = [x[:, :, -PAGE:].clone() for x in self.tail]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest -n tokens; n > 0: all but n.

        Raises:
            ValueError: tokens of which something has been forgotten.
        """
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if not removed or not self.is_initialized:
            return
        if removed >= self.seen:
            return self.reset()
        if removed >= self.tail[0].shape[2]:
            raise ValueError(
                f"the cache has forgotten keys that a text of {self.seen - removed} tokens needs: crop it by at most "
                f"{self.tail[0].shape[2] - 1}, or start a new one"
            )
        self.seen -= removed
        self.tail = [x[:, :, :-removed] for x in self.tail]

    def _take_rows(self, index: Tensor) -> None:
        if not self.is_initialized:
            return
        self.tail = [x[index] for x in self.tail]
        counts, starts = self.counts[index].flatten(), (self.counts.flatten().cumsum(0) - self.counts.flatten())
        starts = starts.view_as(self.counts)[index].flatten()
        shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
        source = torch.arange(len(shift), device=self.device) + shift
        self.flat, self.place = [x[source] for x in self.flat], self.place[source]
        self.counts = self.counts[index]

    def reorder_cache(self, beam_idx: Any) -> None:
        self._take_rows(beam_idx.to(self.device) if self.is_initialized else beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(len(self.counts), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(len(self.counts), device=self.device)[indices.to(self.device)])

    def offload(self) -> None:
        raise ValueError("a cache that forgets has no offloading: leave out cache_implementation")


class ForgettingCache(DynamicCache):
    """The cache to give a converted model with a horizon as `past_key_values`: it holds live keys only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = ForgettingLayer

    @property
    def num_live(self) -> int:
        """Keys held, of all layers, rows and kv heads."""
        return sum(layer.num_live for layer in self.layers)  # type: ignore[attr-defined]


def by_live_keys(call: Any, whole: Any) -> Tensor:
    """(B, T, H, D): attention over the live keys; a prompt, before which there are none, goes by `whole`."""
    layer, options = call.gates.layer, call.options
    if call.mask is not None or call.cu_seqlens is not None:
        raise ValueError("a cache that forgets takes left padding, no other mask: use another cache")
    length = call.query.shape[2]
    if layer.seen == length:
        out = whole(call)
    else:
        (keys, values, c), place = layer.gathered()
        step = max(1, SCORES // (call.query.shape[0] * call.query.shape[1] * place.shape[-1]))
        chunks = [
            _attend(call, keys, values, c, place, slice(begin, min(begin + step, length)))
            for begin in range(0, length, step)
        ]
        out = torch.cat(chunks, 1)
    layer.forget(options["horizon"], options["sink"], options["window"], call.seq_start)
    return out


def _attend(call: Any, keys: Tensor, values: Tensor, c: Tensor, place: Tensor, part: slice) -> Tensor:
    options, layer = call.options, call.gates.layer
    batch, heads, length, dim = call.query.shape
    kv_heads = keys.shape[1]
    query = call.query[:, :, part].reshape(batch, kv_heads, -1, dim)  # (B, Hkv, G T, D)
    own = torch.arange(layer.seen - length, layer.seen, device=place.device)[part]
    at = slice(c.shape[2] - length + part.start, c.shape[2] - length + part.stop)
    high, low = ((x[:, :, at, None] - x[:, :, None]) for x in c.chunk(2, -1))  # (B, Hkv, T, S, G)
    decay = ((high + low) * LN_2).permute(0, 1, 4, 2, 3)  # (B, Hkv, G, T, S)
    first = 0 if call.seq_start is None else call.seq_start[:, None, None, None]
    place = place[:, :, None]
    seen = (place <= own[:, None]) & (place >= first)
    if options["window"] is not None:
        seen = seen & (own[:, None] - place < options["window"])
    exempt = place < first + options["sink"]
    hidden = (~seen[:, :, None]).expand_as(decay)
    if options["horizon"] is not None:
        hidden = hidden | ((decay <= -options["horizon"]) & (decay < 0.0) & ~exempt[:, :, None])
    empty = hidden.all(-1, keepdim=True)  # a query in the padding
    bias = decay.masked_fill(exempt[:, :, None], 0.0).masked_fill(hidden & ~empty, float("-inf")).flatten(2, 3)
    if options["softcap"] is None:
        bias = bias.to(query.dtype)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=options["scale"])
    else:
        scale = dim**-0.5 if options["scale"] is None else options["scale"]
        scores = (query @ keys.transpose(-1, -2)).float() * scale
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        out = torch.softmax(scores + bias, -1).to(values.dtype) @ values
    out = out.view(batch, heads, -1, values.shape[-1]).masked_fill(empty.flatten(1, 2), 0.0)
    return out.transpose(1, 2).contiguous()
