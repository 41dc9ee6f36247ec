"""A cache that frees the keys which a horizon hides for good: less memory, fewer reads, the same logits.

With a horizon, query i sees key j only while c_i - c_j > -horizon. c falls with i, so a kv head loses a prefix of its
text, but for sinks. A layer of the cache is a GrowingLayer until something is lost. Then what is left of each row's kv
heads is gathered, one behind another, which a captured step takes as it is (`pooled_cache`). Any other call first makes
the heads rows of as few GrowingLayers as their lengths allow. In front of a shorter head's keys lies padding whose c is
so large that it has decayed to nothing. So the attention of such a group is that of a batch: every backend serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from retrofox.acceleration.growing_cache import INTERRUPTED, LOG2_E, GrowingLayer
from retrofox.acceleration.head_groups import packed, partition, slots_of

LATER, LARGE = ("cuda",), 128 << 20
"""On these devices a prompt frees nothing while a layer holds fewer bytes; the next token, or a capture, does."""
BEHIND = 2  # layers: what one has found is freed while the GPU computes the next ones, so that neither waits
PAGE = 256
"""Tokens between two checks for keys to free; the newest PAGE tokens may be cropped."""
MARGIN = 2e-3  # beyond the horizon, in base 2, that a key must have decayed by: more than c loses by rounding
KEEP_ALL = 'start with a cache that keeps all keys (`generate` with cache_implementation="dynamic")'
Tensor = torch.Tensor


class ForgettingLayer(DynamicLayer):
    """A layer of a `ForgettingCache`.

    Attributes:
        seen: tokens of the text so far.
        starts: (B * Hkv,) int64 on the host, the position in the text from which keys behind the sinks are held; None
            while nothing is forgotten.
        groups: one GrowingLayer of all heads, (B, Hkv, S, width), or several whose rows are kv heads, (n, 1, S, width).
        pairs: b * Hkv + h of each row of each of several groups, in their order.
        first: (B,) the first visible position of each row, None without padding; set when something is forgotten.
    """

    incoming: Any = None  # (log f (B, T, gates), [projections (B, T, Hkv, D) the next call needs]) of the running call
    options: Any = None  # of the latest call
    order: Tensor  # `pairs` in one
    inverse: Tensor

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reset()

    def reset(self) -> None:
        self.is_initialized, self.seen, self.whole = False, 0, False
        self._groups, self.bases = [GrowingLayer()], [0]
        self._found: Any = None  # by `forget`, to be freed by `settle`
        self._segments: Any = None  # what is held in place of groups since the last `hold`
        self.pairs: Any = None
        self.starts: Tensor | None = None
        self.first: Tensor | None = None
        self.horizon: float | None = None
        self.begin, self.next_check = 0, 2 * PAGE

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which can't hold what is still on its way from the GPU."""
        self.settle()
        return vars(self)

    def get_seq_length(self) -> int:
        return self.seen

    @property
    def num_live(self) -> int:
        """Keys held, of all rows and kv heads, padding included."""
        self.settle()
        if self._segments is not None:
            return int(self._segments[2].sum())
        return sum(x.keys.shape[:3].numel() for x in self.groups if x.keys is not None)

    @property
    def groups(self) -> list[GrowingLayer]:
        self.settle()
        if self._segments is not None:
            (buffers, begin, _), sink = self._segments, self.options["sink"]
            held = sink + self.seen - self.starts
            pairs = [sorted(x) for x in partition(held.tolist())]
            groups = [packed(buffers, begin[x], held[x], sink, PAGE) for x in pairs]
            self._take(groups, pairs, self.batch, self.first, self.starts)
        return self._groups

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        self._show()
        incoming, self.incoming = self.incoming, None
        if self.starts is None:
            self.groups[0].incoming = incoming
            shown = self.groups[0].update(key_states, value_states)
        else:
            shown = key_states, value_states
            (log_f, carried), kv_heads = incoming, key_states.shape[1]
            new = [key_states.flatten(0, 1)[:, None], value_states.flatten(0, 1)[:, None]]
            new += [log_f.unflatten(-1, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)]
            new += [x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in carried]
            for group, (keys, values, gates, *more) in zip(self.groups, self._split(new), strict=True):
                group.incoming = gates, more
                group.update(keys, values)
        self.batch, self.kv_heads = key_states.shape[:2]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.seen += key_states.shape[2]
        return shown

    def _show(self) -> None:
        """Cuts groups back to `seen` tokens: later ones were cropped, or come from an interrupted call."""
        for group, base in zip(self.groups, self.bases, strict=True):
            if group.is_initialized and group.get_seq_length() != base + self.seen:
                group._show(base + self.seen)

    def _split(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Tensors over all pairs (B * Hkv, ...) as the groups have them; ValueError for other rows than theirs."""
        if len(tensors[0]) != len(self):
            raise ValueError(
                f"{len(tensors[0]) // self.kv_heads} rows don't fit a cache of {self.batch}: start a new one"
            )
        if len(self.groups) == 1:
            return [tensors]
        sizes = [len(x) for x in self.pairs]
        return [list(x) for x in zip(*(x[self.order].split(sizes) for x in tensors), strict=True)]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """The groups' tensors as one over all pairs (B * Hkv, ...)."""
        return parts[0] if len(parts) == 1 else torch.cat(parts)[self.inverse]

    def previous(self, count: int, head_dim: int) -> list[Tensor] | None:
        """`count` projections (B, Hkv, D) that the newest token carries, None where there is no token."""
        self._show()
        found = [group.previous(count, head_dim) for group in self.groups]
        if self.starts is None or found[0] is None:
            return found[0]
        return [self._joined(list(x)).view(self.batch, self.kv_heads, head_dim) for x in zip(*found, strict=True)]

    def attend(self, call: Any, attend: Callable[[Any], Tensor]) -> Tensor:
        """(B, T, H, DV) of a `Call`, by the backend that serves each group."""
        if self.starts is None:
            return attend(call._replace(gates=self._gates(call, self.groups[0])))
        if call.mask is not None or call.cu_seqlens is not None:
            raise ValueError(f"a cache that has forgotten keys takes left padding and no other mask: {KEEP_ALL}")
        if call.options["horizon"] != self.horizon:
            raise ValueError(
                f"this cache forgot by a horizon of {self.horizon} nats, not {call.options['horizon']}: {KEEP_ALL}"
            )
        if not _alike(call.seq_start, self.first):
            raise ValueError(f"the mask hides other tokens on the left than when this cache forgot: {KEEP_ALL}")
        batch, _, length, dim = call.query.shape
        [queries] = zip(*self._split([call.query.reshape(len(self), -1, length, dim)]), strict=True)
        outputs, expand = [], getattr(call.gates, "expand", None)
        for group, query in zip(self.groups, queries, strict=True):
            key, value = expand(group.keys, group.values) if expand else (group.keys[..., :dim], group.values)
            given = {"query": query, "key": key, "value": value, "seq_start": None}
            outputs.append(attend(call._replace(gates=self._gates(call, group), **given)))
        out = self._joined(outputs).unflatten(0, (batch, -1))  # (B, Hkv, T, G, D)
        return out.transpose(1, 2).flatten(2, 3)

    def __len__(self) -> int:
        return self.batch * self.kv_heads

    def _gates(self, call: Any, group: GrowingLayer) -> Any:
        gates = type(call.gates)(None, None, call.gates.hidden_states, call.gates.position_ids)
        gates.layer = group
        return gates

    def forget(self, call: Any) -> None:
        """Finds keys that this call hides from the newest PAGE tokens and from all later ones; `settle` frees them."""
        self.options = call.options
        self.whole = self.whole or call.mask is not None or call.cu_seqlens is not None
        if call.query.shape[2] == 1 or self.device.type not in LATER or self._bytes() >= LARGE:
            self.find(call.seq_start)

    def _bytes(self) -> int:
        held = [x for group in self._groups for x in group._buffers] if self._segments is None else self._segments[0]
        return sum(x.nbytes for x in held)

    def find(self, seq_start: Tensor | None) -> None:
        """`forget` by the latest call's options, for rows that begin at `seq_start` (B,).

        Checks every PAGE tokens; never where gradients are recorded, or where more is hidden than left padding.
        """
        horizon, window = self.options["horizon"], self.options["window"]
        if self.seen < self.next_check or self.whole or (horizon is window is None) or torch.is_grad_enabled():
            return
        begun = self.begun(seq_start)
        starts = begun if horizon is None else self._faded(self.seen - PAGE, horizon)
        waits_later = self.device.type == "cuda"
        found = [x.to("cpu", non_blocking=waits_later) for x in (begun, starts)]
        ready = torch.cuda.current_stream(self.device).record_event() if waits_later else None
        self._found = *found, seq_start, ready
        self.next_check = self.seen + PAGE

    def settle(self) -> None:
        """Frees what `forget` has found, as soon as that is known on the host."""
        if self._found is None:
            return
        (begun, starts, first, ready), self._found = self._found, None
        if ready is not None:
            ready.synchronize()
        horizon, sink, window = (self.options[x] for x in ("horizon", "sink", "window"))
        begin = self.seen - PAGE
        if int(begun.max()) >= begin:  # a row whose sinks are still to come
            return
        starts = torch.maximum(begun, starts)
        if window is not None:
            starts = starts.clamp_min(begin - window + 1)
        starts = starts.clamp_max(begin - 1)
        held = (sink + self.seen - starts).tolist()
        if sum(len(x) * held[x[0]] for x in partition(held)) > self.num_live - PAGE:
            return  # too little to move all the rest for
        self.hold(self.segments(starts, begun), starts, first, horizon, begin)

    def begun(self, seq_start: Tensor | None) -> Tensor:
        """`starts`; while nothing is forgotten what they are for rows that begin at `seq_start` (B,), on its device."""
        self.settle()
        if self.starts is not None:
            return self.starts
        if seq_start is None:
            return torch.full((len(self),), self.options["sink"])
        return (seq_start.long() + self.options["sink"]).repeat_interleave(self.kv_heads)

    def _faded(self, begin: int, horizon: float) -> Tensor:
        """(B * Hkv,) int64: the first position that some query head of a kv head sees from `begin` on."""
        found = []
        for group, base in zip(self.groups, self.bases, strict=True):
            c = group.sums[..., 0].unflatten(1, (2, group.keys.shape[1], -1))  # (n, 2, Hkv, G, S)
            at = base + begin - 1
            fall = (c[..., at : at + 1] - c).sum(1)
            gone = (fall <= -horizon * LOG2_E - MARGIN).all(2).sum(-1)  # c falls: the first keys
            found.append(gone.flatten() - base)
        return self._joined(found)

    def segments(self, starts: Tensor, begun: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """The sinks of each kv head and its keys from `starts` on, where it holds those from `begun` on.

        Returns ([keys (1, 1, slots, width), values, c (1, 2 G, slots, 1)], one head's behind another's; where each
        begins; how many they are), the latter two (B * Hkv,) int64 on the host.
        """
        sink = self.options["sink"]
        held = sink + self.seen - starts
        if self._segments is not None and torch.equal(held, self._segments[2]):
            return self._segments
        self._show()
        parts, pairs = [], [list(range(len(self)))] if self.starts is None else self.pairs
        for group, base, heads in zip(self.groups, self.bases, pairs, strict=True):
            rows, kv_heads, fits = group._buffers[0].shape[:3]
            first = begun[heads] - sink if self.starts is None else 0
            begin, gone = torch.arange(len(heads)) * fits + first, base + starts[heads] - sink - first
            slots, _ = slots_of(begin, held[heads], self.device, gone, sink)
            keys, values, c = group._buffers
            c = c.view(rows, 2, kv_heads, -1, fits).permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)[None, ..., None]
            whole = [x.reshape(1, 1, -1, x.shape[-1]) for x in (keys, values)]
            parts.append([x.index_select(2, slots) for x in (*whole, c)])
        order = torch.tensor([x for heads in pairs for x in heads])
        moved = parts[0] if len(parts) == 1 else [torch.cat(x, 2) for x in zip(*parts, strict=True)]
        ends = held[order].cumsum(0)
        return moved, (ends - held[order])[order.argsort()], held

    def hold(self, segments: Any, starts: Tensor, first: Tensor | None, horizon: float | None, begin: int) -> None:
        """Takes `segments` in place of its groups; `begin`: the shortest text that a crop may leave."""
        # all at once: Ctrl-C may come in between
        vars(self).update(first=first, horizon=horizon, begin=begin, starts=starts, _segments=segments, _groups=[])

    def _take(self, groups: list[GrowingLayer], pairs: list[list[int]], batch: int, first: Any, starts: Any) -> None:
        order = torch.tensor([x for part in pairs for x in part], device=self.device)
        bases = [group.get_seq_length() - self.seen for group in groups]
        made = {"_groups": groups, "pairs": pairs, "bases": bases, "order": order, "inverse": order.argsort()}
        vars(self).update(made, batch=batch, first=first, starts=starts, _segments=None)  # all at once, as above

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest -n tokens; n > 0: all but n. ValueError where something of these is forgotten."""
        self.seen = self.left_by(tokens_to_remove)
        if self.seen > 0:
            self._show()
        else:
            self.reset()

    def left_by(self, tokens_to_remove: int) -> int:
        """Tokens that `crop` would leave; raises as it does."""
        self.settle()
        left = self.seen + tokens_to_remove if tokens_to_remove <= 0 else min(self.seen, tokens_to_remove)
        if 0 < left < self.begin:
            raise ValueError(
                f"the cache has forgotten keys that a text of {left} tokens needs: crop it by at most "
                f"{self.seen - self.begin}, or {KEEP_ALL}"
            )
        return left

    def _take_rows(self, rows: Tensor) -> None:
        self._show()
        if self.starts is None:
            self.batch = len(rows)
            return self.groups[0].batch_select_indices(rows)
        place = {pair: (g, i) for g, pairs in enumerate(self.pairs) for i, pair in enumerate(pairs)}
        taken: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        found = rows.tolist()
        for row, source in enumerate(found):
            for head in range(self.kv_heads):
                g, i = place[source * self.kv_heads + head]
                taken[g].append((row * self.kv_heads + head, i))
        kept = [(group, x) for group, x in zip(self.groups, taken, strict=True) if x]
        for group, x in kept:
            group.batch_select_indices(torch.tensor([i for _, i in x], device=self.device))
        groups, pairs = [group for group, _ in kept], [[pair for pair, _ in x] for _, x in kept]
        first = None if self.first is None else self.first[rows]
        starts = self.starts.view(-1, self.kv_heads)[found].flatten()
        self._take(groups, pairs, len(found), first, starts)

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.is_initialized:
            self._take_rows(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device)[indices.to(self.device)])


class ForgettingCache(DynamicCache):
    """The cache of a converted model with a horizon: it holds live keys only.

    `generate` makes one where `forgets` says so; elsewhere pass one as its cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = ForgettingLayer

    def settle(self) -> None:
        """Frees what is known to be hidden for good: the last layers do so when they are next read."""
        for layer in self.layers:
            layer.settle()  # type: ignore[attr-defined]

    @property
    def num_live(self) -> int:
        """Keys held, of all layers, rows and kv heads."""
        return sum(layer.num_live for layer in self.layers)  # type: ignore[attr-defined]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that every layer holds: a call that was interrupted leaves some layers longer than others."""
        layers: list[Any] = self.layers
        return min((layer.get_seq_length() for layer in layers), default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Crops every layer, or none where one has forgotten too much: ValueError."""
        for layer in self.layers:
            layer.left_by(tokens_to_remove)  # type: ignore[attr-defined]
        super().crop(tokens_to_remove)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[override]
        layers: list[Any] = self.layers
        if layer_idx >= len(layers) or layers[layer_idx].incoming is None:
            raise ValueError("this cache holds the forget gates of a converted model: give another model a new cache")
        layer = layers[layer_idx]
        for each in (layer, *layers[max(0, layer_idx - BEHIND) : max(0, layer_idx + 1 - BEHIND)]):
            each.settle()
        held = layers[0].get_seq_length() - key_states.shape[2] if layer_idx else self.get_seq_length()
        shifts = bool(layer.incoming[1])  # from what it took for the newest token
        if not layer.begin <= held <= layer.seen or (shifts and held < layer.seen):
            raise ValueError(INTERRUPTED)
        layer.seen = held
        return layer.update(key_states, value_states, *args, **kwargs)


def _alike(first: Tensor | None, other: Tensor | None) -> bool:
    """Whether two first visible positions (B,) are the same; None: 0 in every row."""
    if first is None or other is None:
        some = other if first is None else first
        return some is None or not bool(some.any())
    return torch.equal(first, other)


def by_live_keys(call: Any, attend: Callable[[Any], Tensor]) -> Tensor:
    """(B, T, H, D): attention over live keys; keys that the horizon hides from now on are freed."""
    layer = call.gates.layer
    out = layer.attend(call, attend)
    layer.forget(call)
    return out
