"""A cache that forgets: keys that no later query can give weight to are dropped, page by page and head by head.

A forget gate never opens again: c_i - c_j, the decay between a query and a key, only falls as i grows. With bounds that
hold for every query and key the weights can make, what a key can still be worth is known now, for all time:

    p_ij <= exp(s_ij - s_ii + c_i - c_j) <= exp(s_max(|k_j|) - s_own + c_now - c_j)         for every later query i

    s_max(|k|) = scale Q |k|,   Q >= |q_i|           s_own <= s_ii, the score of a query with its own key

Both are bounds of one query head; with a softcap both pass through it. Dropped is the longest prefix (sink tokens,
which do not decay, stay) whose bounds, added to those of all that was dropped before, sum to at most eps for each
query head of the kv head and each row. So at every later token at most eps of a head's weight is missing, and its
output is within 2 eps max|v| of the full cache's.

Q, and K >= |k_i|, from the weights. What enters the projections is RMS-normed: x = g * u with |u| <= sqrt(hidden), so
|W x + b| <= sqrt(hidden) sigma_max(W diag(g)) + |b|; with QK-norm |q| <= sqrt(head_dim) max|gain|. RoPE turns and
keeps norms; its attention scaling and the logit scaling by position multiply them. s_own = -scale Q K; without
biases, norms and shift it is also scale hidden lambda_min(sym(G W_q^T W_k G)), since RoPE turns a query and its own
key alike: the larger holds.
"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .cache import LOG2_E, GrowingLayer
from .fused import untouched

PAGE = 64  # keys are dropped in such lots
LOOK = 32768  # keys looked at together, from the oldest on
EVERY = 256  # decoded tokens between two looks
LEAST_SHARE = 8  # a head drops an eighth of what is kept of it (or of LOOK), or more: dropping copies and may split
SLACK = 1.02  # for the rounding of 16-bit projections and rotations
LAST_POSITION = 2.0**31  # for the scaling of logits by position


class Bounds(NamedTuple):
    """What holds for all queries and keys of an attention layer.

    Attributes:
        query: (H,) float64, at least |q| of each query head, scaling by position included.
        own: (H,) float64, at most the score of a query with its own key, softcap not yet applied.
        scale: of the products.
        softcap: of the scores, or None.
    """

    query: torch.Tensor
    own: torch.Tensor
    scale: float
    softcap: float | None = None

    def worth(self, key_norms: torch.Tensor, group: int) -> torch.Tensor:
        """(B, Hkv, S) norms -> (B, H, S) float64: the most that s_ij - s_ii can be, for any query i."""
        norms = key_norms.double().repeat_interleave(group, 1) * 1.0001
        most, own = self.scale * self.query[:, None] * norms, self.own[:, None].expand_as(norms)
        if self.softcap is not None:
            most, own = (self.softcap * torch.tanh(x / self.softcap) for x in (most, own))
        return most - own


@torch.no_grad()
def weight_bounds(attention: Any, norm: Any) -> Bounds:
    """The bounds of a converted attention layer from its weights; `norm` makes what enters it.

    Raises:
        ValueError: an attention, a norm or projections whose bounds are not known.
    """
    q_proj, k_proj = (getattr(attention, name, None) for name in ("q_proj", "k_proj"))
    normed = hasattr(attention, "q_norm")
    known = attention.plain_forward or (
        normed
        and getattr(type(attention).native_forward, "__code__", None) is inspect.unwrap(Qwen3Attention.forward).__code__
    )
    if not known:
        raise ValueError(
            f"no bound on the scores of {type(attention).__name__} is known, so nothing can be dropped from its cache: "
            "evict works with the Llama, Mistral, Qwen2 and Qwen3 families; leave it out"
        )
    for linear in (q_proj, k_proj):
        if type(linear) is not nn.Linear or not untouched(linear):
            raise ValueError(
                f"evict reads its bounds from plain weights, got a {type(linear).__name__}: merge the adapter "
                "(retrofox merge), and load the model without quantisation"
            )
    gain = _gain(norm, attention.config.hidden_size)
    heads, kv_heads = attention.num_fox_heads, attention.config.num_key_value_heads
    group, width = heads // kv_heads, attention.head_dim
    turn = 1.0 if attention.rotary_fade is None else max(1.0, abs(attention.rotary_fade.attention_scaling))
    query, q_plain = _norms(q_proj, gain, attention.q_norm if normed else attention.q_norm_fox, heads, width)
    key, k_plain = _norms(k_proj, gain, attention.k_norm if normed else attention.k_norm_fox, kv_heads, width)
    if attention.k_shift is not None and k_plain is not None:  # norms, where there are any, come after the shift
        key = key * (1 + 2 * attention.k_shift.gain.double().abs().to(key.device))
        k_plain = None
    scale = float(getattr(attention, "scaling", width**-0.5))
    query, key = query * turn * SLACK, key * turn * SLACK
    own = -scale * query * key.repeat_interleave(group)
    if q_plain is not None and k_plain is not None:
        least = torch.stack([_least(q_plain[h], k_plain[h // group]) for h in range(heads)])
        own = torch.maximum(own, scale * least * len(gain) * (turn * SLACK) ** 2)
    if attention.log_n is not None:
        longest = max(1.0, math.log(LAST_POSITION) / math.log(attention.log_n))
        query, own = query * longest, own * longest
    return Bounds(query, own, scale, getattr(attention, "attn_logit_softcapping", None))


def _gain(norm: Any, width: int) -> torch.Tensor:
    """g of an RMS norm y = g * x / rms(x), found by trying it on vectors of +1 and -1, whose rms is 1."""
    parameter = next(norm.parameters(), None) if isinstance(norm, nn.Module) else None
    if parameter is None:
        raise ValueError(f"evict needs an RMS norm before attention, got {type(norm).__name__}: leave evict out")
    signs = torch.randint(0, 2, (4, width), generator=torch.Generator().manual_seed(0)) * 2 - 1
    signs[0] = 1
    found = norm(signs.to(parameter)).double()
    found = found * signs.to(found.device)
    if not torch.allclose(found, found[:1].expand_as(found), rtol=0.02, atol=1e-6):
        raise ValueError(f"evict needs an RMS norm before attention, got a {type(norm).__name__}: leave evict out")
    return found.abs().amax(0)


def _norms(
    linear: Any, gain: torch.Tensor, norm: Any, heads: int, width: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """((heads,) bound on the norms of a projection's heads, their (heads, D, hidden) weights if nothing else acts)."""
    if norm is not None:
        own = norm.gain.double().abs() if hasattr(norm, "gain") else _gain(norm, width).expand(heads, -1)
        return own.amax(-1) * width**0.5, None
    weight = linear.weight.double().view(heads, width, -1) * gain.to(linear.weight.device)
    bound = torch.linalg.matrix_norm(weight, 2) * gain.numel() ** 0.5
    if linear.bias is None:
        return bound, weight
    return bound + linear.bias.double().view(heads, width).norm(dim=-1), None


def _least(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The least eigenvalue of (P^T Q + Q^T P) / 2 for P, Q (D, hidden), at most 0: from a matrix of 2 D columns."""
    both, turned = torch.cat([query, key]), torch.cat([key, query])
    basis = torch.linalg.qr(both.t())[0]
    middle = (both @ basis).t() @ (turned @ basis) / 2
    return torch.linalg.eigvalsh((middle + middle.t()) / 2)[0].clamp_max(0.0)


def split(parts: Any, keys: torch.Tensor, values: torch.Tensor, log_f: torch.Tensor) -> Any:
    """Keys, values (B, Hkv, T, D) and log f (B, T, H), each as a tuple with what belongs to each part."""
    sizes = [part.keys.shape[1] if part.keys is not None else keys.shape[1] for part in parts]
    group = log_f.shape[-1] // keys.shape[1]
    return keys.split(sizes, 1), values.split(sizes, 1), log_f.split([n * group for n in sizes], -1)


def together(pages: list[int]) -> list[tuple[int, int, int]]:
    """Runs (first, end, the least of them) of neighbours of which none is above a third more than the least."""
    runs: list[tuple[int, int, int]] = []
    for head, n in enumerate(pages):
        if runs:
            first, _, least = runs[-1]
            least, most = min(least, n), max(pages[first : head + 1])
            if 4 * least >= 3 * most:
                runs[-1] = (first, head + 1, least)
                continue
        runs.append((head, head + 1, n))
    return runs


class ForgettingLayer(GrowingLayer):
    """A cache layer whose kv heads are kept in parts, from the front of each of which pages are dropped.

    It starts as one part with all heads, as fast as a full cache: each part is a call of the attention. Where
    neighbouring heads can drop about as much, they drop the same and stay together; where not, their part is split.
    `get_seq_length` counts the tokens seen, dropped ones too: positions go on. Every row must be whole (no padding).

    Attributes:
        parts: GrowingLayers (B, some kv heads, kept tokens, width), in the heads' order: sink tokens, then the newest.
        dropped: tokens dropped from each kv head.

    Raises:
        ValueError: attention with padding.
        RuntimeError: `crop` to before the last time that something was dropped.
    """

    takes_back = False  # whether tokens of the newest call may be taken back

    def __init__(self, bounds: Bounds, log_eps: float, sink: int):
        super().__init__()
        self.bounds, self.log_eps, self.sink = bounds, log_eps, sink
        self.parts: list[GrowingLayer] = []

    def activate_past_recording(self) -> None:
        """Assisted decoding calls it, for it takes back wrong guesses: from now on the newest tokens drop nothing."""
        self.takes_back = True

    def _forget(self) -> None:
        super()._forget()
        self.parts, self.dropped, self.seen, self.looked_at, self.dropped_at = [], [], 0, 0, 0
        self._lost = torch.empty(0)  # (B, H) float64: log of the sum of exp(worth_j - c_j)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f, head_dim = kwargs["log_f"], kwargs["head_dim"]
        if torch.is_grad_enabled() and (key_states.requires_grad or log_f.requires_grad):
            raise ValueError("a cache that forgets is for inference: use torch.no_grad()")
        if not self.parts:
            self.is_initialized, self.device, self.dtype = True, key_states.device, key_states.dtype
            self.parts, self.dropped = [GrowingLayer()], [0] * key_states.shape[1]
            lost = (key_states.shape[0], log_f.shape[-1])
            self._lost = torch.full(lost, -math.inf, dtype=torch.float64, device=key_states.device)
        if self.takes_back:
            self._drop()
        for part, k, v, f in zip(self.parts, *split(self.parts, key_states, value_states, log_f), strict=True):
            part.update(k, v, log_f=f, head_dim=head_dim)
        self.head_dim = head_dim
        self.seen += key_states.shape[2]
        self.keys, self.values = key_states, value_states  # not what is kept: `parts` have that
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.seen

    @property
    def every(self) -> int:
        return EVERY

    def newest(self, width: int) -> torch.Tensor:
        """(B, Hkv, width): the last `width` channels of the newest token."""
        return torch.cat([part.keys[:, :, -1, -width:] for part in self.parts], 1)

    def forget(self) -> None:
        """After a call; where its tokens may be taken back, the next call drops what has become irrelevant."""
        if not self.takes_back:
            self._drop()

    @torch.no_grad()
    def _drop(self) -> None:
        """Drops what has become irrelevant, where enough tokens have come since the last look."""
        if self.seen - self.looked_at < EVERY:
            return
        self.looked_at = self.seen
        again = True
        while again:  # until a look finds some key in what it looks at that has to stay
            found, again = self.look()
            if any(pages for _, runs in found for *_, pages in runs):
                self.dropped_at = self.seen
            self.parts = [
                piece
                for part, runs in found
                for piece in ([part] if runs[0][2] == 0 and len(runs) == 1 else self.pieces(part, runs))
            ]

    def look(self) -> tuple[list[tuple[GrowingLayer, Any]], bool]:
        """What can go of each part: runs (first head, end, tokens) of its heads, now counted as lost; and whether
        there may be more.

        The host waits for the device once.
        """
        totals = [self._totals(*place) for place in self._places()]
        goes = [
            ((total + now <= self.log_eps).all(2).all(0).long().cumprod(-1).sum(-1)) for total, now in totals
        ]  # pages of each kv head
        pages = torch.cat(goes).tolist()
        found, again, first = [], False, 0
        for part, (total, _) in zip(self.parts, totals, strict=True):
            heads = total.shape[1]
            least = min(part._length, LOOK) / (PAGE * LEAST_SHARE)
            own = [n if n >= least else 0 for n in pages[first : first + heads]]
            again |= max(own) == total.shape[3] == LOOK // PAGE
            runs = [(a, b, n * PAGE) for a, b, n in together(own)]
            for a, b, count in runs:
                if count:
                    group, self._lost = total.shape[2], self._lost.clone()  # it may have been made in inference mode
                    lost = total[:, a:b, :, count // PAGE - 1].flatten(1)
                    self._lost[:, (first + a) * group : (first + b) * group] = lost
                for head in range(first + a, first + b):
                    self.dropped[head] += count
            found.append((part, runs))
            first += heads
        return found, again

    def _places(self) -> list[tuple[GrowingLayer, int, int]]:
        """(part, its first kv head, the end of its kv heads)"""
        ends = list(itertools.accumulate(part.keys.shape[1] for part in self.parts))
        return list(zip(self.parts, [0, *ends], ends, strict=False))

    def _totals(self, part: GrowingLayer, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """log of what the keys up to each page's end and all that was dropped are worth, less c: (B, heads, G, pages)
        float64; and c of the newest token (B, heads, G, 1)."""
        group = self.bounds.query.shape[0] // len(self.dropped)
        one = slice(first * group, end * group)
        bounds = self.bounds._replace(query=self.bounds.query[one], own=self.bounds.own[one])
        tokens = max(0, min(LOOK, part._length - 1 - self.sink)) // PAGE * PAGE
        at = slice(self.sink, self.sink + tokens)
        high, low = (x.unflatten(1, (-1, group)) for x in part.cumulative())
        now, c = ((high[..., x].double() + low[..., x].double()) / LOG2_E for x in (slice(-1, None), at))
        keys = part.keys[:, :, at, : self.head_dim]
        norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
        worth = bounds.worth(norms, group).unflatten(1, (-1, group)) - c
        worth = torch.nan_to_num(worth, nan=math.inf, posinf=math.inf)
        # By page: a scan along all keys would be a GPU's slowest operation here.
        pages = torch.logsumexp(worth.unflatten(-1, (tokens // PAGE, PAGE)), -1)
        return torch.logaddexp(pages.logcumsumexp(-1), self._lost[:, one].unflatten(1, (-1, group))[..., None]), now

    def pieces(self, part: GrowingLayer, runs: Any) -> list[GrowingLayer]:
        """A part for each run (first head, end, tokens to drop) of a part's heads."""
        made, group = [], self.bounds.query.shape[0] // len(self.dropped)
        for first, end, count in runs:
            sums = part.sums.unflatten(1, (2, -1))[:, :, first * group : end * group].flatten(1, 2)
            held = (part.keys[:, first:end], part.values[:, first:end], sums)
            kept = [torch.cat([x[:, :, : self.sink], x[:, :, self.sink + count :]], 2) for x in held]
            fresh = GrowingLayer()
            fresh.lazy_initialization(kept[0], kept[1])
            fresh._append(kept, kept[0].shape[2])
            if part._bound is not None and part._bounded == part._length:
                fresh._bound, fresh._bounded = part._bound[:, first:end].contiguous(), fresh._length
            made.append(fresh)
        return made

    def crop(self, *args: Any, **kwargs: Any) -> None:
        count = -int(args[0] if args else kwargs["tokens_to_remove"])
        if count <= 0:
            return
        if self.seen - count < self.dropped_at:
            raise RuntimeError("this cache has dropped keys that the text, cut back so far, may need again")
        for part in self.parts:
            part.crop(-count)
        self.seen -= count
        self.looked_at = min(self.looked_at, self.seen)

    def _each(self, change: Any) -> None:
        for part in self.parts:
            part._each(change)
        self._lost = change(self._lost)

    def kept(self) -> list[int]:
        """Tokens kept of each kv head."""
        return [part._length for part in self.parts for _ in range(part.keys.shape[1])]


def check_log_eps(log_eps: float) -> None:
    """Raises ValueError for what is no ln of a weight below 1."""
    if not isinstance(log_eps, (int, float)) or not -math.inf < log_eps < 0:
        raise ValueError(f"evict is ln of the weight that may be missing, a number below 0 such as -10; got {log_eps}")


class ForgettingCache(DynamicCache):
    """A DynamicCache of a converted model that drops keys no later query can give more than eps of its weight to.

    Layers with a sliding window keep their windows. For generate: `past_key_values=ForgettingCache(model, -10.0)`, from
    transformers 5.24 on `cache=`.

    Args:
        model: a converted causal model.
        log_eps: ln of the weight that may be missing, below 0; -10 is 4.5e-5.

    Raises:
        ValueError: log_eps is not below 0, the model is not converted or has no gates, or its bounds are not known.
    """

    def __init__(self, model: Any, log_eps: float):
        check_log_eps(log_eps)
        super().__init__(config=model.config)
        layers = model.get_decoder().layers
        if not all(hasattr(layer.self_attn, "num_fox_heads") for layer in layers):
            raise ValueError("only a converted model has gates to forget by: convert it first, or leave evict out")
        if all(layer.self_attn.forget_gate is None for layer in layers):
            raise ValueError(
                "this model was converted without gates (gate none), so nothing is forgotten: leave evict out"
            )
        for number, layer in enumerate(layers):
            attention = layer.self_attn
            if getattr(self.layers[number], "is_sliding", False):
                continue
            bounds = weight_bounds(attention, getattr(layer, "input_layernorm", None))
            self.layers[number] = ForgettingLayer(bounds, float(log_eps), attention.exempt_tokens)

    def report(self) -> dict[str, Any]:
        """{"seen", "kept_share", "kept" (tokens of each layer's kv heads), "bytes" of keys, values and sums}.

        Layers with a sliding window don't count; where there are no others the share is 1.
        """
        own = [layer for layer in self.layers if isinstance(layer, ForgettingLayer)]
        kept = [layer.kept() for layer in own]
        parts = [part for layer in own for part in layer.parts]
        seen = self.get_seq_length()
        most = seen * sum(map(len, kept))
        return {
            "seen": seen,
            "kept_share": sum(map(sum, kept)) / most if most else 1.0,
            "kept": kept,
            "bytes": sum(x.numel() * x.element_size() for part in parts for x in part._rooms),
        }
