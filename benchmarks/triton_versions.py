"""fox_kernels under one version of Triton: milliseconds of forward, of forward and backward, and of decoding.

    PYTHONPATH=[TRITON:]kernels python benchmarks/triton_versions.py --out triton-3.9.json

Run it under each version in turns, some of them twice, on one GPU. Times are medians of CUDA events behind a queue of
work, so that they are the kernels' alone. Each case names its backend, so that none falls back unseen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from provenance import out_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
from bench_contenders import decoding, ours, tensors
from bench_measure import Clock, machine
from bench_problems import Decode, Problem

PROBLEMS = {
    "2x8192 D64 short": (Problem(2, 8192, 16, 16, 64, "short"), {}),
    "2x8192 D128 short": (Problem(2, 8192, 16, 16, 128, "short"), {}),
    "1x16384 D64 open": (Problem(1, 16384, 16, 16, 64, "open"), {}),
    "1x16384 32/8 D128 open": (Problem(1, 16384, 32, 8, 128, "open"), {}),
    "docs 2048 of 16384 D64": (Problem(1, 16384, 16, 16, 64, "short", 2048), {}),
    "horizon 2x8192 D64": (Problem(2, 8192, 16, 16, 64, "short"), {"horizon": 16.0}),
    "horizon 2x8192 D128": (Problem(2, 8192, 16, 16, 128, "mixed"), {"horizon": 16.0}),
}
DECODES = (Decode(1, 32768, "open"), Decode(16, 32768, "open"), Decode(16, 32768, "mixed"))
ROUNDS, AHEAD = 8, 24


def timed(clock: Clock, call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    repeats = max(1, clock.repeats(call) // 4)
    return statistics.median(time for _ in range(ROUNDS) for time in clock.sample(call, repeats, flushes=AHEAD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_file, required=True)
    out = parser.parse_args().out
    found: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__, "machine": machine(), "rows": {}}
    clock = Clock(8.0)
    for name, (problem, options) in PROBLEMS.items():
        for backend in ("gluon", "triton"):
            inputs, do, run = ours(tensors(problem), backend=backend, **options)
            both = timed(clock, lambda inputs=inputs, do=do, run=run: torch.autograd.grad(run(), inputs, do))
            found["rows"][f"{backend} {name}"] = {"forward_ms": timed(clock, run), "total_ms": both}
    for decode in DECODES:
        found["rows"][decode.name] = {"forward_ms": timed(clock, decoding(decode)[0])}
    for name, row in found["rows"].items():
        print(f"{name:40} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
