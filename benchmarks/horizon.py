"""What a horizon saves on one GPU: time of attention and of decoding by the share of keys that are left.

    python benchmarks/horizon.py --out benchmarks/horizon.json [--budget 50]

Random queries, keys and values in bfloat16. share: pairs of query and key within the horizon (8 nats), of all causal
ones. "equal": every head forgets at one rate; "unequal": some heads keep everything, the others 64 tokens. dense: the
same gates without a horizon; flash: torch's FlashAttention without gates. Milliseconds are medians of CUDA events, the
L2 flushed before each call; search: what finds the keys that are left, alone. Decoding: one new token for each of
`batch` caches, kernels alone (a graph of ten calls); mb: keys, values and gates' sums that are read, of all of them.
Rows beyond --budget seconds are left out and say so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fox_kernels import choose, decode_attention, forgetting_attention
from fox_kernels.common.cumsum import cumulative
from fox_kernels.common.horizon import edges_within, first_seen
from fox_kernels.options import Options
from provenance import out_file, provenance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HORIZON = 8.0
SHORTEST = 64  # tokens that a short head of "unequal" sees
SHARES = (1.0, 0.5, 0.25, 0.1)
HEADS = {64: (12, 4), 128: (16, 4)}  # channels -> query heads, key/value heads
DECODING = (32, 8, 128)
ROWS = ((1, 32768, 64, 1), (2, 16384, 64, 1), (1, 32768, 64, 8), (1, 131072, 64, 1), (1, 32768, 128, 1))
"""Batch, tokens, channels, documents: what is measured, first things first."""


def reaches(share: float, kind: str, heads: int, length: int) -> torch.Tensor:
    """Tokens that each head sees, so that about `share` of a row's causal pairs are left over all heads.

    A head that sees R of L tokens has the share 2 R/L - (R/L)^2.
    """
    if kind == "equal":
        return torch.full((heads,), length * (1 - math.sqrt(1 - share)) if share < 1 else 2.0 * length)
    whole = max(1, round(share * heads))
    seen = torch.full((heads,), float(SHORTEST))
    seen[torch.arange(whole) * heads // whole] = 2.0 * length
    return seen


def gates(batch: int, length: int, seen: torch.Tensor, device: str) -> torch.Tensor:
    """log f (batch, length, heads) float32 under which head h sees about seen[h] tokens; noisy, as learned ones are."""
    noise = 2 * torch.rand(batch, length, len(seen), device=device)
    return -noise * (HORIZON / seen.to(device))


def starts(length: int, documents: int, device: str) -> torch.Tensor | None:
    """Boundaries of documents of unequal lengths, or None for one document."""
    if documents == 1:
        return None
    sizes = torch.linspace(0.5, 1.5, documents).cumsum(0)
    ends = (sizes / sizes[-1] * length).round().int()
    return torch.cat((torch.zeros(1, dtype=torch.int32), ends)).to(device)


def live_share(log_f: torch.Tensor, cu_seqlens: torch.Tensor | None) -> float:
    """Pairs of query and key within the horizon, of all causal pairs within documents."""
    B, S, H = log_f.shape
    first = first_seen(*cumulative(log_f), S, Options(1.0, horizon=HORIZON))
    assert first is not None
    at = torch.arange(S, device=log_f.device)
    begin = torch.zeros_like(at)
    if cu_seqlens is not None:
        begin = cu_seqlens.long()[torch.searchsorted(cu_seqlens[1:].long(), at, right=True)]
    left = (at + 1 - torch.maximum(first, begin)).sum(dtype=torch.float64)
    return (left / ((at + 1 - begin).sum(dtype=torch.float64) * B * H)).item()


class Clock:
    """Milliseconds of a call on the GPU, the L2 cache flushed before each."""

    def __init__(self) -> None:
        self.flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def __call__(self, work: Callable[[], Any], seconds: float = 0.12) -> float:
        work()
        torch.cuda.synchronize()
        begun, times = time.perf_counter(), []
        while len(times) < 2 or (time.perf_counter() - begun < seconds and len(times) < 20):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            before.record()
            work()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after))
        return sorted(times)[len(times) // 2]


def passes(clock: Clock, attend: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Milliseconds of a forward and of its backward."""
    forward = clock(attend)
    o = attend()
    do = torch.randn_like(o)
    return forward, clock(lambda: torch.autograd.grad(o, inputs, do, retain_graph=True))


def attention_rows(clock: Clock, B: int, T: int, D: int, documents: int) -> Iterator[dict[str, Any]]:
    """A row for FlashAttention, one for gates without a horizon, and one for each share and kind of heads."""
    H, Hkv = HEADS[D]
    named = {"rows": f"{B} x {T}", "heads": [H, Hkv, D], "documents": documents}
    q, k, v = (torch.randn(B, T, h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (H, Hkv, Hkv))
    cu_seqlens = starts(T, documents, "cuda")
    if documents == 1:
        attend: Any = scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
            times = passes(clock, lambda: attend(*turned, is_causal=True, enable_gqa=True), turned)
        yield named | {"what": "flash", "forward_ms": times[0], "backward_ms": times[1]}
    problems: list[tuple[str, float | None, float]] = [("dense", None, 1.0)]
    problems += [(kind, HORIZON, share) for kind in ("equal", "unequal") for share in SHARES]
    for what, horizon, share in problems:
        if (what, share) == ("unequal", 1.0):
            continue  # the same as equal
        log_f = gates(B, T, reaches(share, what if horizon else "equal", H, T // documents), "cuda").requires_grad_()
        given: dict[str, Any] = {"cu_seqlens": cu_seqlens, "horizon": horizon}
        times = passes(clock, lambda log_f=log_f, given=given: attention(q, k, v, log_f, given), [q, k, v, log_f])
        row = named | {"what": what, "forward_ms": times[0], "backward_ms": times[1]}
        row["backend"], _ = choose(q, k, v, log_f, **given)
        if horizon is not None:
            c = cumulative(log_f.detach())
            row["share"] = live_share(log_f.detach(), cu_seqlens)
            row["search_ms"] = clock(lambda c=c: edges_within(*c, None, HORIZON), 0.02)
        yield row


def attention(q, k, v, log_f, given: dict[str, Any]) -> torch.Tensor:
    o = forgetting_attention(q, k, v, log_f, **given)
    assert isinstance(o, torch.Tensor)
    return o


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """Replay of a graph of ten calls: kernels without the host's time."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    return graph.replay


def decoding_rows(clock: Clock, B: int, S: int) -> Iterator[dict[str, Any]]:
    """A row for FlashAttention, one for gates without a horizon, and one for each share and kind of heads."""
    H, Hkv, D = DECODING
    named = {"cache": S, "batch": B, "heads": [H, Hkv, D]}
    q, k, v = (torch.randn(B, n, h, D, device="cuda", dtype=torch.bfloat16) for n, h in ((1, H), (S, Hkv), (S, Hkv)))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    attend: Any = scaled_dot_product_attention
    whole = B * S * (2 * Hkv * D * 2 + H * 8) / 1e6
    with torch.no_grad():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            replay = captured(lambda: attend(*turned, enable_gqa=True))
        yield named | {"what": "flash", "ms": clock(replay) / 10, "mb": B * S * 2 * Hkv * D * 2 / 1e6}
        for what, horizon, share in [("dense", None, 1.0)] + [
            (kind, HORIZON, share) for kind in ("equal", "unequal") for share in SHARES[1:]
        ]:
            # shares of a cache, not of pairs: a head that sees R of S tokens reads R / S
            seen = reaches(share, "unequal", H, S) if what == "unequal" else torch.full((H,), share * S)
            c = cumulative(gates(B, S, seen, "cuda"))
            replay = captured(lambda c=c, horizon=horizon: decode_attention(q, k, v, *c, horizon=horizon))
            row = named | {"what": what, "ms": clock(replay) / 10, "mb": whole}
            if horizon is not None:
                first = first_seen(*c, 1, Options(1.0, horizon=horizon))
                assert first is not None
                read = S - first.view(B, Hkv, H // Hkv).amin(-1)  # of a kv head, what any of its query heads sees
                row["share"] = read.double().mean().item() / S
                row["mb"] = whole * row["share"]
            yield row


def shown(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=50.0, help="seconds for everything")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    begun = time.perf_counter()
    torch.manual_seed(0)
    result: dict[str, Any] = {**provenance(), "device": torch.cuda.get_device_name(), "rows": []}
    clock = Clock()
    parts: list[tuple[Any, tuple[int, ...]]] = [(attention_rows, row) for row in ROWS]
    parts[2:2] = [(decoding_rows, (B, S)) for S in (32768, 131072) for B in (1, 16)]
    for part, given in parts:
        try:
            for row in part(clock, *given):
                result["rows"].append(row)
                print(shown(row), flush=True)
                if time.perf_counter() - begun > options.budget:
                    raise TimeoutError(f"the budget of {options.budget:g} s is spent")
        except (TimeoutError, torch.OutOfMemoryError) as error:
            result["rows"].append({"given": list(given), "why_not": str(error)})
            print(result["rows"][-1], flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
