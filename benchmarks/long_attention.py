"""One layer's attention over ever longer rows on one GPU: operations a second, forward and backward, by itself.

    python benchmarks/long_attention.py --out benchmarks/long-attention.json [--lengths ...] [--heads 32,8,64 4,1,64]

Random queries, keys, values and open gates, bfloat16, one document; --heads are query heads, key/value heads and
channels. TFLOP/s count 4 D for each pair of the causal triangle in the forward, 2.5 times that in the backward. Each
length is run once after a row of --warm tokens has loaded the kernels; rows under --repeat-below seconds three times,
and the fastest counts. A row that would take more than is left of --budget is left out and says so.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from fox_kernels import forgetting_attention
from provenance import provenance


def heads_of(text: str) -> tuple[int, int, int]:
    """Query heads, key/value heads, channels."""
    try:
        queries, keys, width = (int(part) for part in text.split(","))
    except ValueError:
        queries, keys, width = 0, 1, 0
    if min(queries, keys, width) < 1 or queries % keys:
        raise argparse.ArgumentTypeError(f"{text!r}: give query heads, key/value heads that divide them, channels")
    return queries, keys, width


def timed(work: Any, device: torch.device) -> tuple[float, Any]:
    """(seconds, what it returned)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def once(heads: tuple[int, int, int], length: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    queries, keys, width = heads
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    q = torch.randn(1, length, queries, width, **made, requires_grad=True)
    k, v = (torch.randn(1, length, keys, width, **made, requires_grad=True) for _ in range(2))
    log_f = torch.full((1, length, queries), -1e-7, device=device, requires_grad=True)
    forward, o = timed(lambda: forgetting_attention(q, k, v, log_f), device)
    do = torch.randn_like(o)
    backward, _ = timed(lambda: o.backward(do), device)
    return forward, backward


def row(heads: tuple[int, int, int], length: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The fastest of one or three runs."""
    runs = [once(heads, length, device)]
    while len(runs) < 3 and sum(runs[0]) < options.repeat_below:
        runs.append(once(heads, length, device))
    forward, backward = (min(times) for times in zip(*runs, strict=True))
    flops = 2.0 * heads[0] * heads[2] * length**2
    return {
        "heads": list(heads),
        "length": length,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
        "runs": len(runs),
    }


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=heads_of, nargs="+", default=[(32, 8, 64), (4, 1, 64), (32, 8, 128)])
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072, 262144, 524288])
    parser.add_argument("--warm", type=int, default=8192)
    parser.add_argument("--repeat-below", type=float, default=2.0)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    result: dict[str, Any] = {**provenance(), "rows": []}
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for heads in options.heads:
        once(heads, options.warm, device)
        per_square = None  # seconds for a token squared
        for length in options.lengths:
            left = options.budget - (time.perf_counter() - started)
            if per_square is not None and (wanted := per_square * length**2) > left:
                why = f"would take about {wanted:.0f} s, {left:.0f} s are left"
                found: dict[str, Any] = {"heads": list(heads), "length": length, "why_not": why}
            else:
                found = row(heads, length, options, device)
                per_square = 1.3 * (found["forward_seconds"] + found["backward_seconds"]) / length**2
            result["rows"].append(found)
            print(json.dumps(found), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
