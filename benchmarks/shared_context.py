"""Generating and measuring losses over a context that several GPUs share: seconds, memory, and one GPU's numbers.

    torchrun --nproc-per-node 2 benchmarks/shared_context.py --out benchmarks/shared_context.json

Random weights of Llama-3.2-1B's shape, half-lives from 16 tokens to the length over the heads, pruning at ln eps = -10
in the prompt (a decoding step reads all keys). `tokens`: greedy tokens and logits in float32 beside one GPU's.
`generate`: seconds until the first token and of each later one, the most memory; beside one GPU where the length is at
most --alone. `eval`: the losses of one document, as `retrofox eval --context N` runs it without its controls.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from context_parallel import SHAPES
from provenance import provenance
from transformers import LlamaConfig, LlamaForCausalLM

import retrofox
from retrofox.anatomy import token_losses
from retrofox.evaluation.shared_context import shared_losses
from retrofox.generation.generate import complete
from retrofox.generation.shared import complete_shared
from retrofox.generation.streaming import Meter
from retrofox.loading.opened import Opened
from retrofox.parallel.layout import degrees
from retrofox.parallel.mesh import Mesh, build_mesh

PARTS = ("tokens", "generate", "eval")


class Bench:
    """The model, the mesh, the clock."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.shape, self.world = options, SHAPES[options.shape], dist.get_world_size()
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.mesh: Mesh = build_mesh(degrees(self.world, self.shape["num_key_value_heads"]))

    def model(self, length: int, dtype: torch.dtype) -> Any:
        """A converted model whose gates have half-lives up to a length."""
        config = LlamaConfig(**self.shape, max_position_embeddings=length)
        torch.manual_seed(0)
        with self.device:
            base: Any = LlamaForCausalLM(config)
            base = base.to(dtype)
        spec = retrofox.FoxSpec(rope="keep", half_life=(16.0, float(length)), prune=-10.0)
        return retrofox.convert(base, fox=spec).to(self.device).eval()

    def tokens(self, length: int) -> list[int]:
        """Random token ids, the same on every process."""
        random = torch.Generator().manual_seed(length)
        return torch.randint(self.shape["vocab_size"], (length,), generator=random).tolist()

    def started(self) -> float:
        """The time, once everything is done; memory is counted from here on."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        return time.perf_counter()

    def peak(self) -> float | None:
        """Most memory in GB of any process since `started`."""
        found = torch.tensor(torch.cuda.max_memory_allocated() if self.cuda else 0.0, dtype=torch.float64)
        found = found.to(self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found) / 1e9 if self.cuda else None


def opened(model: Any) -> Opened:
    """A model without a tokenizer."""
    return Opened(model, SimpleNamespace(pad_token_id=0, eos_token_id=None, bos_token_id=None), "", "")


def tokens_row(bench: Bench) -> dict[str, Any]:
    """Greedy tokens and logits of the processes together beside those of one, in float32."""
    length, new = bench.options.tokens_length, bench.options.new
    model, given = bench.model(length, torch.float32), [bench.tokens(length)]
    wanted = complete(opened(model), given, new, ignore_eos=True)
    kept: list[torch.Tensor] = []
    found = complete_shared(model, given, new, mesh=bench.mesh, logits=kept)
    whole = torch.tensor([given[0] + found[0]], device=bench.device)
    with torch.no_grad():
        logits = model(input_ids=whole, use_cache=False, logits_to_keep=new + 1).logits[:, :-1].float().cpu()
    error = (torch.stack(kept, 1) - logits).abs().max() / logits.abs().max()
    same = sum(a == b for a, b in zip(found[0], wanted[0], strict=True))
    return {"kind": "tokens", "length": length, "new": new, "same_tokens": same, "logit_error": float(error)}


def generate_row(bench: Bench, length: int, together: bool) -> dict[str, Any]:
    """Seconds until the first token, and of each later one."""
    model, given, new = bench.model(length, dtype_of(bench)), [bench.tokens(length)], bench.options.new
    warm = [bench.tokens(2048)]

    def run(prompt: list[list[int]]) -> Meter:
        meter = Meter([], None)
        if together:
            complete_shared(model, prompt, new, mesh=bench.mesh, streamer=meter)
        else:
            complete(opened(model), prompt, new, ignore_eos=True, streamer=meter)
        return meter

    run(warm)
    started = bench.started()
    meter = run(given)
    first = meter.first_token_seconds(started)
    assert first is not None, "a token came"
    return {
        "kind": "generate",
        "length": length,
        "gpus": bench.world if together else 1,
        "first_token_seconds": first,
        "seconds_per_token": (time.perf_counter() - started - first) / (new - 1),
        "peak_memory_gb": bench.peak(),
    }


def eval_row(bench: Bench, length: int) -> dict[str, Any]:
    """The losses of one document."""
    model = bench.model(length, dtype_of(bench))
    losses = shared_losses(bench.world, model)
    ids = torch.tensor([bench.tokens(length)], device=bench.device)
    short = losses(model, ids[:, :4096])
    alone = token_losses(model, ids[:, :4096])
    started = bench.started()
    found = losses(model, ids)
    if bench.cuda:
        torch.cuda.synchronize()
    return {
        "kind": "eval",
        "length": length,
        "gpus": bench.world,
        "seconds": time.perf_counter() - started,
        "mean": float(found.double().mean()),
        "largest_difference_at_4096": float((short - alone).abs().max()),
        "peak_memory_gb": bench.peak(),
    }


def dtype_of(bench: Bench) -> torch.dtype:
    return torch.bfloat16 if bench.cuda else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[131072, 1048576])
    parser.add_argument("--alone", type=int, default=131072, help="longest prompt that one GPU reads by itself too")
    parser.add_argument("--tokens-length", type=int, default=8192)
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    bench, begun = Bench(options), time.perf_counter()
    device = torch.cuda.get_device_name() if bench.cuda else "cpu"
    result: dict[str, Any] = {**provenance(), "gpus": bench.world, "device": device, "shape": options.shape, "rows": []}

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        result["seconds"] = round(time.perf_counter() - begun, 1)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
        bench.started()  # frees the row's memory

    if "tokens" in options.parts:
        keep(tokens_row(bench))
    for length in options.lengths:
        if "generate" in options.parts:
            if length <= options.alone:
                keep(generate_row(bench, length, together=False))
            keep(generate_row(bench, length, together=True))
        if "eval" in options.parts:
            keep(eval_row(bench, length))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
