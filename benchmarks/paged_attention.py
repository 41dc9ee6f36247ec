"""Attention of a decode step over vLLM's pages: our kernels with c in the rows, beside FlashAttention 3 without gates.

    python benchmarks/paged_attention.py [--shapes 9,3,64] [--lengths 2112,32832] [--requests 64] [--tune]
        [--out benchmarks/paged-attention.json]

Needs a Hopper GPU and vLLM. Each way is one captured CUDA graph of a layer's attention, timed in turns; the median of
its replays counts. Beside the base's heads there is FlashAttention 3 over heads with 16 or 32 more channels, which is
what lanes cost. --tune times other tiles of ours, too. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table

from retrofox.serving import paged_kernels
from retrofox.support.files import write_json

PAGE = 16
REPLAYS = 20


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The graph of ten calls."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step()
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median time of one call of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 100)
    return {name: statistics.median(found) for name, found in times.items()}


def step_of(requests: int, length: int, heads: int, kv_heads: int, dim: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: ways to attend, and ours to write a token."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    room = paged_kernels.Paged(heads // kv_heads, dim)
    pages = -(-length // PAGE)
    table = torch.randperm(requests * pages, device="cuda", dtype=torch.int32).view(requests, pages)
    start = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((requests,), length, device="cuda", dtype=torch.int32)
    last = table[:, -1].long() * PAGE + (length - 1) % PAGE
    batch = SimpleNamespace(
        query_start_loc=start, seq_lens=lengths, block_table=table, slot_mapping=last, max_query_len=1
    )

    def cache(width: int) -> torch.Tensor:
        rows = torch.randn(requests * pages, PAGE, kv_heads, 2 * width, device="cuda", dtype=torch.bfloat16)
        return rows.transpose(1, 2)

    def flash(width: int) -> Callable[[], Any]:
        keys, values = cache(width).transpose(1, 2).chunk(2, -1)
        query = torch.randn(requests, heads, width, device="cuda", dtype=torch.bfloat16)
        output = torch.empty_like(query)

        def call() -> Any:
            return flash_attn_varlen_func(
                q=query, k=keys, v=values, out=output, cu_seqlens_q=start, max_seqlen_q=1, seqused_k=lengths,
                max_seqlen_k=length, causal=True, block_table=table, fa_version=3, num_splits=32,
            )  # fmt: skip

        return call

    own = cache(dim + room.extra)
    own.view(torch.float32)[..., dim : dim + 2 * room.groups] = 0.0
    key, value = (torch.randn(requests, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    log_f = torch.zeros(requests, heads, device="cuda")
    query = torch.randn(requests, heads, dim, device="cuda", dtype=torch.bfloat16)
    output = torch.empty_like(query)
    options = {"scale": dim**-0.5, "window": None, "sink": 1, "softcap": None}
    lanes = 16 if 3 * (room.groups + 1) <= 16 else 32
    return {
        "FlashAttention 3": flash(dim),
        f"the same, {lanes} lanes": flash(dim + lanes),
        "ours": lambda: paged_kernels.attend(room, query, own, batch, output, options),
        "ours, writing": lambda: paged_kernels.write(room, key, value, log_f, own, batch, None),
    }


def tuned(ours: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of our attention with other tiles."""
    kept = paged_kernels.KEYS, paged_kernels.WARPS, paged_kernels.STAGES, paged_kernels.PROGRAMS
    graphs = {}
    tiles = [
        *itertools.product((32, 64, 128), (2, 4), (2, 3), (1056,)),
        *((64, 4, 3, programs) for programs in (528, 2112)),
    ]
    for keys, warps, stages, programs in tiles:
        paged_kernels.KEYS, paged_kernels.WARPS, paged_kernels.STAGES = keys, warps, stages
        paged_kernels.PROGRAMS = programs
        graphs[f"{keys} keys, {warps} warps, {stages} stages, {programs} programs"] = captured(ours)
    paged_kernels.KEYS, paged_kernels.WARPS, paged_kernels.STAGES, paged_kernels.PROGRAMS = kept
    return microseconds(graphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="9,3,64", help="query heads, kv heads, channels; more after a semicolon")
    parser.add_argument("--lengths", default="2112,32832", help="tokens of each request")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tune", action="store_true", help="time other tiles of ours, too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/paged-attention.json"))
    options = parser.parse_args()
    rows = []
    table = Table("heads", "tokens", "way", "microseconds", "of FlashAttention 3's")
    for shape in options.shapes.split(";"):
        for length in map(int, options.lengths.split(",")):
            ways = step_of(options.requests, length, *map(int, shape.split(",")))
            found = microseconds({name: captured(way) for name, way in ways.items()})
            row: dict[str, Any] = {"shape": shape, "length": length, "microseconds": found}
            for name, took in found.items():
                table.add_row(shape, str(length), name, f"{took:.1f}", f"{took / found['FlashAttention 3']:.2f}")
            if options.tune:
                row["tiles"] = tuned(ways["ours"])
                for name, took in sorted(row["tiles"].items(), key=lambda item: item[1])[:6]:
                    table.add_row(shape, str(length), name, f"{took:.1f}", f"{took / found['FlashAttention 3']:.2f}")
            rows.append(row)
            write_json(options.out, {**provenance(), "requests": options.requests, "rows": rows})
            torch.cuda.empty_cache()
    Console().print(table)


if __name__ == "__main__":
    main()
