"""What a horizon saves in decoding, a layer at a time: microseconds of a CUDA graph on one GPU, in about a minute.

    python benchmarks/decode_layers.py --out benchmarks/decode-layers.json

Shapes are SmolLM2-135M's: 9 query heads on 3 of keys and values, D = 64, bfloat16; queries, keys and values are random.
A step decodes one token at a length that only the device knows, as the captured step of `generate` does. "near" layers
have half-lives of 16, 128 and 512 tokens, one for each kv head; in "open" ones the third forgets nothing. us: of a
graph of up to ten layers, each with a cache of its own, less the graph's first node, which reads 128 MB to empty the
L2; gaps between kernels count. error: of o against float64, relative; rounding o to bfloat16 makes 1.7e-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from fox_kernels.common.blocks import LOG2_E
from fox_kernels.decoding.fixed import decode_at
from fox_kernels.reference import forgetting_attention
from provenance import out_file, provenance

H, KV, D, HORIZON = 9, 3, 64, 8.0
HALF_LIVES = {"near": (16.0, 128.0, 512.0), "open": (16.0, 128.0, math.inf)}
LENGTHS = (2048, 8192, 32768, 131072, 1048576)
ROUNDS, REPLAYS, MOST_LAYERS, MOST_BYTES = 3, 12, 10, 24 << 30


class Layer:
    """A query of the newest token, and a cache of `length` tokens with it, in rooms for more."""

    def __init__(self, batch: int, length: int, kind: str, device: str) -> None:
        room = 64 * math.ceil(min(max(256, 1 << length.bit_length()), length + 512) / 64)
        given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.k, self.v = (torch.randn(batch, KV, room, D, **given).transpose(1, 2) for _ in range(2))
        self.q = torch.randn(batch, 1, H, D, **given)
        rates = torch.tensor([-math.log(2) / h for h in HALF_LIVES[kind]], device=device, dtype=torch.float64)
        self.log_f = rates.repeat_interleave(H // KV).expand(1, length, H)
        c = LOG2_E * self.log_f[0, 0, :, None] * torch.arange(1, room + 1, device=device)
        self.c_hi, self.c_lo = (x.expand(batch, -1, -1).contiguous() for x in (c.float(), (c - c.float()).float()))
        self.length = torch.full((1,), length - 1, dtype=torch.int32, device=device)  # before the new token
        self.first = torch.zeros(batch * KV, dtype=torch.int32, device=device)

    def step(self, horizon: float | None) -> torch.Tensor:
        """o (batch, 1, H, D); with a horizon the search for live keys goes on from the step before."""
        first = None if horizon is None else self.first
        return decode_at(self.q, self.k, self.v, self.c_hi, self.c_lo, self.length, first=first, horizon=horizon)

    def error(self, horizon: float | None) -> float:
        """Of the last sequence."""
        q, k, v = (x[-1:, : self.log_f.shape[1]].double() for x in (self.q, self.k, self.v))
        wanted = forgetting_attention(q, k, v, self.log_f, horizon=horizon)
        assert isinstance(wanted, torch.Tensor)
        return ((self.step(horizon)[-1:].double() - wanted).norm() / wanted.norm()).item()


def graph_us(work: Callable[[], Any]) -> float:
    """Microseconds of a graph of `work`: the median of some rounds of replays."""
    work()  # compiles
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        work()
    for _ in range(ROUNDS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        before.record()
        for _ in range(REPLAYS):
            graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / REPLAYS)
    return statistics.median(times)


def measured(layers: list[Layer], flush: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of a layer without and with a horizon, and the greater error."""
    dense, horizon = (graph_us(lambda h=h: (flush(), [x.step(h) for x in layers])) for h in (None, HORIZON))
    error, empty = max(layers[0].error(h) for h in (None, HORIZON)), graph_us(flush)
    return {"dense_us": (dense - empty) / len(layers), "horizon_us": (horizon - empty) / len(layers), "error": error}


@torch.no_grad()
def main(arguments: list[str] | None = None, device: str = "cuda") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_file, required=True)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    flushed = torch.zeros(32 << 20, device=device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    result: dict[str, Any] = {**provenance(), "device": name, "horizon": HORIZON, "rows": []}
    for batch, length, kind in itertools.product((1, 16), LENGTHS, HALF_LIVES):
        count = max(1, min(MOST_LAYERS, MOST_BYTES // (batch * length * (KV * D * 4 + H * 8))))
        layers = [Layer(batch, length, kind, device) for _ in range(count)]
        row = {"batch": batch, "cache": length, "layers": kind, **measured(layers, flushed.sum)}
        result["rows"].append(row)
        print(row, flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
