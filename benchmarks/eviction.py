"""Training-free cache eviction: which keys of a prefilled text each kv head keeps.

    keep(head, j)  iff  score(head, j) is among the largest ratio x T,    T tokens of the prefilled text

A score is (Hkv, T), of one layer, from its queries q, keys k (both rotated) and values v of the prefill:

    streaming   the first 4 tokens, then the latest                                       arXiv 2309.17453
    window      the latest
    knorm       -||k_j||                                                                   arXiv 2406.11430
    snapkv      attention of the last 64 queries, smoothed over 5 keys                     arXiv 2404.14469
    expected    E_q exp(q.k_j / sqrt(d)) ||v_j||, q Gaussian, at the next 512 positions    arXiv 2510.00636
    duo         retrieval heads keep all keys, the others 128 first and 256 latest         arXiv 2410.10819

Query heads of a kv head are averaged. Constants are those of NVIDIA's kvpress 0.5.5, whose scores of streaming, knorm,
snapkv and expected are the same; it needs transformers below 5.3. `duo` differs from its paper, where head weights are
trained: here a head's score is its attention from an answer's tokens to the needle that holds them (Wu et al., arXiv
2404.15574).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from retrofox.anatomy import inner_model
from retrofox.model.modeling_fox import CACHE

SINKS, OBSERVED, SMOOTHED, FUTURE = 4, 64, 5, 512
DUO_SINKS, DUO_RECENT = 128, 256
NAME = "evicting"


@dataclass
class Prefilled:
    """One layer's attention over a text: query (H, T, D), key and value (Hkv, T, D) in float32, RoPE of the model."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    rotary: Callable[[int, int], tuple[Tensor, Tensor]]

    def by_kv_head(self, of_queries: Tensor) -> Tensor:
        """(H, ...) -> (Hkv, ...), the mean over the query heads of each kv head."""
        return of_queries.unflatten(0, (len(self.key), -1)).mean(1)

    def keys_by_query(self) -> Tensor:
        return self.key.repeat_interleave(len(self.query) // len(self.key), 0)


def streaming(seen: Prefilled) -> Tensor:
    score = window(seen)
    score[:, :SINKS] = math.inf
    return score


def window(seen: Prefilled) -> Tensor:
    return torch.arange(seen.key.shape[1], device=seen.key.device).float().repeat(len(seen.key), 1)


def knorm(seen: Prefilled) -> Tensor:
    return -seen.key.norm(dim=-1)


def snapkv(seen: Prefilled) -> Tensor:
    length = seen.key.shape[1]
    observed = min(OBSERVED, length - 1)
    logits = seen.query[:, -observed:] @ seen.keys_by_query().transpose(1, 2) * seen.scale
    future = torch.ones(observed, length, device=logits.device).triu(length - observed + 1).bool()
    attention = logits.masked_fill(future, -math.inf).softmax(-1)[..., :-observed].mean(1)
    score = seen.by_kv_head(F.avg_pool1d(attention, SMOOTHED, stride=1, padding=SMOOTHED // 2))
    return F.pad(score, (0, observed), value=math.inf)


def expected(seen: Prefilled) -> Tensor:
    length, width = seen.key.shape[1:]
    cos, sin = seen.rotary(0, length)
    still = (seen.query * cos - rotate_half(seen.query) * sin) / (cos**2 + sin**2)  # queries before RoPE
    still = still[:, SINKS:]
    mean = still.mean(1)
    centred = still - mean[:, None]
    cos, sin = (x.mean(0) for x in seen.rotary(length, length + FUTURE))
    turn = torch.diag(cos) + sin[:, None] * rotate_half(torch.eye(width, device=cos.device)).T
    mean, spread = mean @ turn.T, turn @ (centred.transpose(1, 2) @ centred / (length - SINKS)) @ turn.T
    key = seen.keys_by_query()[:, SINKS:]
    logits = (key @ mean[..., None])[..., 0] * seen.scale + ((key @ spread) * key).sum(-1) * seen.scale**2 / 2
    score = seen.by_kv_head(logits.softmax(-1)) * seen.value[:, SINKS:].norm(dim=-1)
    return F.pad(score, (SINKS, 0), value=math.inf)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


SCORES = {"streaming": streaming, "window": window, "knorm": knorm, "snapkv": snapkv, "expected": expected}
METHODS = (*SCORES, "duo")


def best(score: Tensor, ratio: float) -> Tensor:
    """(Hkv, T) bool: the ratio x T keys of each head with the largest score."""
    count = max(1, round(ratio * score.shape[1]))
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(count, -1).indices, True)


def duo(heads: Tensor, length: int, ratio: float) -> Tensor:
    """(layers, Hkv, T) bool: heads of the highest scores (layers, Hkv) keep all, so many that `ratio` is kept."""
    short = min(1.0, (DUO_SINKS + DUO_RECENT) / length)
    count = round(heads.numel() * min(1.0, max(0.0, (ratio - short) / (1 - short)))) if short < 1 else heads.numel()
    whole = torch.zeros(heads.numel(), dtype=torch.bool, device=heads.device)
    whole[heads.flatten().topk(count).indices] = True
    place = torch.arange(length, device=heads.device)
    return whole.view(*heads.shape, 1) | (place < DUO_SINKS) | (place >= length - DUO_RECENT)


@dataclass
class Evicting:
    """A plain model whose attention scores keys as it prefills, and afterwards sees the kept ones alone."""

    model: Any
    scores: dict[str, list[Tensor]] = field(default_factory=dict)
    keep: Sequence[Tensor] | None = None
    look: tuple[slice, slice] | None = None
    """(queries of the tail, keys) whose attention `seen` notes: (H,) for each layer."""
    seen: list[Tensor] = field(default_factory=list)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """The attention function that transformers calls: (1, H, N, D), (1, Hkv, T + N, D)."""
        new, scale = query.shape[2], options["scaling"]
        old = key.shape[2] - new
        if not old:
            seen = Prefilled(query[0].float(), key[0].float(), value[0].float(), scale, self._rotary)
            for name, own in self.scores.items():
                own.append(SCORES[name](seen))
            return self._softmax(query, key, value, scale, is_causal=True), None
        visible = torch.ones(1, new, new, dtype=torch.bool, device=key.device).tril().expand(query.shape[1], -1, -1)
        kept = torch.ones(key.shape[1], old, dtype=torch.bool, device=key.device)
        if self.keep is not None:
            kept = self.keep[module.layer_idx]
        kept = kept.repeat_interleave(query.shape[1] // key.shape[1], 0)[:, None].expand(-1, new, -1)
        allowed = torch.cat([kept, visible], -1)
        if self.look is not None:
            self.seen.append(self._attention(query[0], key[0], allowed, scale))
        return self._softmax(query, key, value, scale, attn_mask=allowed[None]), None

    @staticmethod
    def _softmax(query: Tensor, key: Tensor, value: Tensor, scale: float, **mask: Any) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, scale=scale, **mask).transpose(1, 2)

    def _attention(self, query: Tensor, key: Tensor, allowed: Tensor, scale: float) -> Tensor:
        """(H,): attention that the queries of `look` pay to its keys, the mean over queries."""
        assert self.look is not None
        rows, columns = self.look
        key = key.float().repeat_interleave(len(query) // len(key), 0)
        logits = query[:, rows].float() @ key.transpose(1, 2) * scale
        return logits.masked_fill(~allowed[:, rows], -math.inf).softmax(-1)[..., columns].sum(-1).mean(1)

    def _rotary(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin (N, D), float32, of positions start to stop - 1, with the factor that YaRN puts on them."""
        device = next(self.model.parameters()).device
        place = torch.arange(start, stop, device=device)[None]
        rotary: Any = inner_model(self.model).rotary_emb
        cos, sin = rotary(torch.zeros(1, device=device), place)
        return cos[0].float(), sin[0].float()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model's attention is this one."""
        before = self.model.config._attn_implementation
        AttentionInterface.register(NAME, self.attend)
        self.model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.no_grad()
    def prefill(self, ids: Tensor, scored: bool = True) -> DynamicCache:
        """The cache of a text (T,), dense; `scores` holds every method's scores of it, one a layer."""
        self.scores = {name: [] for name in SCORES} if scored else {}
        cache = DynamicCache(config=self.model.config)
        inner_model(self.model)(input_ids=ids[None], use_cache=True, **{CACHE: cache})
        return cache

    @torch.no_grad()
    def tail(self, ids: Tensor, cache: DynamicCache, keep: Sequence[Tensor] | None) -> Tensor:
        """Logits (N, V) float32 of a text's next tokens (N,), which see the kept keys and each other."""
        length, self.keep = cache.get_seq_length(), keep
        place = torch.arange(length, length + len(ids), device=ids.device)[None]
        logits = self.model(input_ids=ids[None], position_ids=place, use_cache=True, **{CACHE: cache}).logits
        cache.crop(-len(ids))
        return logits[0].float()

    def attention_to(self, ids: Tensor, cache: DynamicCache, rows: slice, columns: slice) -> Tensor:
        """(layers, Hkv): attention of the tail's `rows` to the keys `columns`, the most of a kv head's query heads."""
        self.look, self.seen = (rows, columns), []
        self.tail(ids, cache, None)
        self.look = None
        layer: Any = cache.layers[0]
        kv_heads = layer.keys.shape[1]
        return torch.stack(self.seen).unflatten(1, (kv_heads, -1)).amax(-1)

    def kept(self, method: str, ratio: float, heads: Tensor | None) -> list[Tensor]:
        """By layer (Hkv, T) bool, of the text prefilled last; `heads` are the retrieval scores that duo needs."""
        if method == "duo":
            assert heads is not None
            return list(duo(heads, self.scores["window"][0].shape[1], ratio))
        return [best(score, ratio) for score in self.scores[method]]


def round_to_fp8(cache: DynamicCache) -> None:
    """Keys and values as float8_e4m3 would keep them, with a scale for each kv head."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            whole = getattr(layer, name)
            scale = whole.float().abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / 448
            setattr(layer, name, ((whole / scale).to(torch.float8_e4m3fn).float() * scale).to(whole.dtype))
