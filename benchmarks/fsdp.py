"""FSDP2's speed beside one GPU alone and DDP.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py --out benchmarks/fsdp.json

A step: forward and backward of one micro-batch (bfloat16), clipped gradients, fused AdamW; random
weights and tokens. ratio = seconds of every GPU alone / seconds of all together with as much work each: 1 is ideal.
host: seconds in which Python issues a step; where they are the whole of it, the GPU waits for the host. Variants:

    alone, ddp
    step     FSDP2 as `retrofox train` runs it: layers in units of 24M parameters, gradients and loss in float32,
             AdamW on each GPU's part of the tensors, without DTensor between
    kept     weights stay gathered between forward and backward (fsdp_reshard_after_forward: false)

loss: after the last step, the mean over all GPUs' tokens; all but "alone" saw the same ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from context_parallel import SHAPES as LONG
from model_shapes import SMOLLM2
from provenance import out_file, provenance
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import retrofox
from retrofox.config import ExtendStage
from retrofox.data.packed import IGNORE
from retrofox.training.model_tweaks import lower_precision, recompute
from retrofox.training.objectives import Extend
from retrofox.training.param_groups import parameter_groups, set_trainable
from retrofox.training.sharding import UNIT, shard, step_locally

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": SMOLLM2,
    "llama-3.2-1b": LONG["llama-3.2-1b"],
    "pico": LONG["pico"],
}
VARIANTS = ("alone", "ddp", "step", "kept")
TARGETS = {"smollm2": 0.80, "llama-3.2-1b": 0.90}


class Cell:
    """One variant of one shape and window: the model, what steps it, and its batch."""

    def __init__(self, options: argparse.Namespace, shape: str, window: int, variant: str):
        self.options, self.variant, self.world = options, variant, dist.get_world_size()
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        values: dict[str, Any] = SHAPES[shape] | {"max_position_embeddings": window}
        config = LlamaConfig(**values)
        torch.manual_seed(0)
        with self.device:
            base = LlamaForCausalLM(config)
        spec = retrofox.FoxSpec(rope="keep", half_life=(16.0, float(window)))
        model: Any = retrofox.convert(base, fox=spec).to(self.device).train()
        model.config.use_cache = False
        tokens = max(options.tokens, window)
        stage = ExtendStage.model_validate(
            {"objective": "extend", "tokens": tokens, "sequence_length": window, "cross_entropy": "chunked"}
        )
        set_trainable(model, stage)
        if self.cuda:
            lower_precision(model, torch.bfloat16)
        recompute(model, options.recompute)
        objective, sharded = Extend(model, stage, self.device), variant not in ("alone", "ddp")
        own = torch.autocast("cuda", torch.bfloat16) if self.cuda and not sharded else nullcontext()

        def forward(module: Any, **batch: Any) -> torch.Tensor:
            with own:
                return objective(module, batch)[0]

        model.forward = MethodType(forward, model)
        self.model, self.parallel = model, model
        if variant == "ddp":
            self.parallel = DistributedDataParallel(model, device_ids=[self.device.index] if self.cuda else None)
        elif sharded:
            self.shard()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, stage), betas=(stage.betas[0], stage.betas[1]), fused=True
        )
        if sharded:
            step_locally(self.optimizer)
        ids = torch.randint(config.vocab_size, (max(1, tokens // window), window),
                            generator=torch.Generator().manual_seed(dist.get_rank()))  # fmt: skip
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE)], 1)
        positions = torch.arange(window).expand_as(ids)
        batch = {"input_ids": ids, "position_ids": positions, "targets": targets}
        self.batch = {key: value.to(self.device) for key, value in batch.items()}
        self.targets = int((targets >= 0).sum())

    def shard(self) -> None:
        """Cuts the model as the variant says."""
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=self.variant != "kept"
        )
        if self.cuda:
            plugin.set_mixed_precision("bf16")
        shard(self.model, plugin, least=self.options.unit)

    def step(self) -> torch.Tensor:
        """One optimizer step; the sum of this process's losses."""
        loss = self.parallel(**self.batch)
        (loss / self.targets).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self) -> dict[str, Any]:
        """Seconds of a step, of which on the host; the loss after the last one; memory."""
        for _ in range(self.options.warm):
            self.step()
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(self.options.steps):
            loss = self.step()
        issued = time.perf_counter() - started
        if self.cuda:
            torch.cuda.synchronize()
        found = torch.tensor([time.perf_counter() - started, issued], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        mean = (loss.double() / self.targets).to(self.device)
        dist.all_reduce(mean)
        seconds, host = (found / self.options.steps).tolist()
        return {
            "seconds": seconds,
            "host_seconds": host,
            "tokens_per_second_and_gpu": self.batch["input_ids"].numel() / seconds,
            "loss": float(mean) / self.world,
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self.cuda else None,
        }

    def wait(self) -> None:
        """Until everything is done, here and elsewhere."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()


def attempt(work: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What work returns, or why it can't, as far as all processes fail alike."""
    failed = torch.zeros(1, device=device)
    try:
        found = work()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        found, failed = {"why_not": str(error).splitlines()[0][:200]}, failed + 1
    dist.all_reduce(failed)
    return found if "why_not" in found or not failed.any() else {"why_not": "another process ran out of memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["smollm2", "llama-3.2-1b"])
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch and GPU, at least one window")
    parser.add_argument("--unit", type=int, default=UNIT, help="parameters of a unit of layers at least")
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="activations of the layers")
    parser.add_argument("--warm", type=int, default=4, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {**provenance(), "gpus": dist.get_world_size(), "device": name, "targets": TARGETS}
    result |= {"tokens": options.tokens, "unit": options.unit, "recompute": options.recompute, "rows": []}
    started = time.perf_counter()
    for shape in options.shapes:
        for window in options.windows:
            alone: float | None = None
            for variant in options.variants:
                found = attempt(lambda s=shape, w=window, v=variant: Cell(options, s, w, v).measure(), device)
                if variant == "alone":
                    alone = found.get("seconds")
                ratio = alone / found["seconds"] if alone and "seconds" in found else None
                row = {"shape": shape, "window": window, "variant": variant, "ratio": ratio, **found}
                result["rows"].append(row)
                result["seconds"] = round(time.perf_counter() - started, 1)
                if dist.get_rank() == 0:
                    print(line(row), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(result, indent=1) + "\n")
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    start = f"{row['shape']:>12} {row['window']:>6} {row['variant']:>7}"
    if "why_not" in row:
        return f"{start}  {row['why_not']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    memory = "" if row["peak_memory_gb"] is None else f"{row['peak_memory_gb']:6.1f} GB"
    return (
        f"{start} {ratio:>6} {1e3 * row['seconds']:9.1f} ms, host {1e3 * row['host_seconds']:9.1f} ms, "
        f"{row['tokens_per_second_and_gpu']:>9,.0f} tokens/s/GPU, loss {row['loss']:.5f} {memory}"
    )


if __name__ == "__main__":
    main()
