"""Rows shared by several GPUs beside whole rows on one: time, overlap, error; accelerate's own cp beside them.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --out benchmarks/context_parallel.json

Random weights; Llama-3.1-8B's shape is rank-16 adapters and gates on a frozen bfloat16 base. `step`: forward and
backward of the whole model (bfloat16, full gradient checkpointing, gradients summed over the GPUs), every GPU alone
with a row and then all of them with one row between them: ratio = seconds alone / (GPUs x seconds shared), 1 being
ideal; with --context N, N GPUs share a row, the others have rows of their own, and the ratio's GPUs are a row's.
`attention`: one layer's operator, forward and backward, with heads traded and with keys gathered. Cases: dense (gates
open), packed (documents of an eighth of a row on average), gates (half-lives from 16 tokens to a row over the heads, a
horizon of 16 nats). overlap: the share of the trade's own time that computing hides. error: root mean square beside
float64, over that of one GPU's kernel. Published elsewhere: ring-flash-attention has 0.902 (dense) and 0.759 (packed)
of the ideal speed on 8 x H800.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model_shapes import LLAMA_1B, LLAMA_8B, SMOLLM2, with_adapters
from provenance import out_file, provenance
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import retrofox
from retrofox.config import ExtendStage
from retrofox.data.packed import IGNORE
from retrofox.model.modeling_fox import attend_locally
from retrofox.parallel.layout import Degrees, degrees
from retrofox.parallel.mesh import Mesh, build_mesh
from retrofox.parallel.shards import Shards, WholeRows, cut
from retrofox.parallel.ulysses import heads_for_tokens, tokens_for_heads
from retrofox.training.model_tweaks import lower_precision, recompute
from retrofox.training.objectives import Extend

PICO: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": LLAMA_1B | ROPE,
    "llama-3.1-8b-lora": LLAMA_8B | ROPE,
    "smollm2": {key: value for key, value in SMOLLM2.items() if key != "max_position_embeddings"} | {"head_dim": 64},
    "pico": PICO,
    "pico-lora": PICO,
}
CASES = ("dense", "packed", "gates")
PUBLISHED = {"dense": 0.902, "packed": 0.759}
HORIZON = 16.0
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Bench:
    """What every measurement needs: the machine, the shape, the options."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.shape = options, SHAPES[options.shape]
        self.world = dist.get_world_size()
        self.context = options.context or self.world
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.meshes: dict[Degrees, Mesh] = {}

    def mesh(self, split: Degrees) -> Mesh:
        """One mesh for each split."""
        if split not in self.meshes:
            self.meshes[split] = build_mesh(split)
        return self.meshes[split]

    def wait(self) -> None:
        """Until everything is done, here and elsewhere."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def seconds(self, work: Callable[[], Any], repeat: int | None = None, warm: bool = True) -> float:
        """Median seconds of the slowest process, after one run that compiles, unless that has been."""
        if warm:
            work()
        found = []
        for _ in range(repeat or self.options.repeat):
            self.wait()
            started = time.perf_counter()
            work()
            if self.cuda:
                torch.cuda.synchronize()
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=self.device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            found.append(float(taken))
        return float(np.median(found))

    def documents(self, case: str, length: int) -> list[int] | None:
        """Where the documents of a row begin, and its length: lengths uneven, as in a corpus."""
        if case != "packed":
            return None
        cuts = np.random.default_rng(0).choice(np.arange(1, length), size=7, replace=False)
        return [0, *sorted(map(int, cuts)), length]

    def half_lives(self, case: str, length: int) -> torch.Tensor:
        """(H,) tokens: a ladder for trained gates, open ones otherwise."""
        heads = self.shape["num_attention_heads"]
        if case != "gates":
            return torch.full((heads,), 1e7)
        return torch.logspace(np.log10(16), np.log10(length), heads)

    def tell(self, row: dict[str, Any]) -> dict[str, Any]:
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        return row


def alone(cu_seqlens: torch.Tensor | None, options: dict[str, Any]) -> Attend:
    """The operator on one GPU."""
    return lambda q, k, v, log_f: attend_locally(q, k, v, log_f, cu_seqlens, options)


def together(shards: Shards, options: dict[str, Any]) -> Attend:
    """The operator over shared rows."""
    return lambda q, k, v, log_f: shards.attend(q, k, v, log_f, options, attend_locally)


# one layer's attention ---------------------------------------------------------------------------------------------


def attention_inputs(bench: Bench, case: str, length: int) -> tuple[list[torch.Tensor], torch.Tensor, Any, dict]:
    """(q, k, v (1, heads, T, D), log_f (1, T, H)), gradient of the output, cu_seqlens, options."""
    random = torch.Generator(bench.device).manual_seed(0)
    heads, kv_heads, width = (bench.shape[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    made = {"generator": random, "device": bench.device}
    q, do = (torch.randn(1, heads, length, width, **made).to(bench.dtype) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, length, width, **made).to(bench.dtype) for _ in range(2))
    fall = torch.log(torch.tensor(2.0)) / bench.half_lives(case, length).to(bench.device)
    log_f = -fall * 2 * torch.rand(1, length, heads, **made)
    documents = bench.documents(case, length)
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    horizon = HORIZON if case == "gates" else None
    options = {"scale": None, "window": None, "sink": 0, "softcap": None, "horizon": horizon}
    return [q, k, v, log_f], do.transpose(1, 2), cu_seqlens, options


def both_ways(attend: Attend, inputs: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, log_f."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, log_f = leaves
    out = attend(q, k, v, log_f)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def part_of(bench: Bench, split: Degrees, inputs: list[torch.Tensor], do: torch.Tensor) -> tuple[list, torch.Tensor]:
    """This process's tokens of everything."""
    length = do.shape[1]
    keep = torch.cat([torch.arange(*s) for s in split.segments(bench.mesh(split).rank, length)]).to(bench.device)
    return [x[:, :, keep].contiguous() for x in inputs[:3]] + [inputs[3][:, keep].contiguous()], do[
        :, keep
    ].contiguous()


def attention_row(bench: Bench, case: str, length: int, split: Degrees) -> dict[str, Any]:
    """The operator over shared rows beside one GPU's, over the same row."""
    mesh = bench.mesh(split)
    inputs, do, cu_seqlens, options = attention_inputs(bench, case, length)
    here = None if cu_seqlens is None else cu_seqlens.to(bench.device)
    one = bench.seconds(lambda: both_ways(alone(here, options), inputs, do))
    parts, do_part = part_of(bench, split, inputs, do)
    shards = Shards(mesh, WholeRows(1, length, cu_seqlens, torch.zeros(1)), bench.device)

    def shared() -> list[torch.Tensor]:
        return both_ways(together(shards, options), parts, do_part)

    seconds = bench.seconds(shared)
    share = {}
    if split.zigzag == 1:
        share = overlap_of_heads(bench, mesh, inputs, parts, do_part, here, options, seconds)
    return {
        "kind": "attention",
        "case": case,
        "length": length,
        "ulysses": split.ulysses,
        "zigzag": split.zigzag,
        "seconds_alone": one,
        "seconds": seconds,
        "ratio": one / (split.context * seconds),
        **share,
    }


def overlap_of_heads(bench, mesh, inputs, parts, do_part, here, options, seconds: float) -> dict[str, Any]:
    """What trading heads costs by itself, and how much of that the whole does not show."""
    u, kv_heads = mesh.degrees.ulysses, inputs[1].shape[1]

    def of_first(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.unflatten(dim, (kv_heads // u, u, -1)).select(dim + 1, 0).flatten(dim, dim + 1)

    own = [of_first(x, dim) for x, dim in zip(inputs, (1, 1, 1, 2), strict=True)]
    do = do_part.new_ones(1, inputs[0].shape[2], own[0].shape[1], own[0].shape[3])
    computing = bench.seconds(lambda: both_ways(alone(here, options), own, do))

    def trade() -> None:
        x = heads_for_tokens(mesh, kv_heads, *(x.transpose(1, 2) for x in parts[:3]))
        heads_for_tokens(mesh, kv_heads, parts[3][..., None])
        for _ in range(3):  # o; back: do, then dq, dk and dv with dlog_f
            tokens_for_heads(mesh, kv_heads, x[0])

    moving = bench.seconds(trade)
    hidden = max(0.0, min(1.0, 1 - (seconds - computing) / moving))
    return {"seconds_moving": moving, "overlap": hidden}


def error_row(bench: Bench, length: int, split: Degrees) -> dict[str, Any]:
    """Root mean square errors beside float64, shared and alone, of o, dq, dk, dv and dlog_f."""
    inputs, do, _, options = attention_inputs(bench, "gates", length)
    options = {**options, "horizon": None}
    exact = both_ways(alone(None, options), [x.double() for x in inputs], do.double())
    one_gpu = both_ways(alone(None, options), inputs, do)
    parts, do_part = part_of(bench, split, inputs, do)
    mesh = bench.mesh(split)
    shards = Shards(mesh, WholeRows(1, length, None, torch.zeros(1)), bench.device)
    shared = both_ways(together(shards, options), parts, do_part)
    keep = torch.cat([torch.arange(*s) for s in split.segments(mesh.rank, length)]).to(bench.device)
    found = {}
    for name, wanted, one, ours, dim in zip(
        ("o", "dq", "dk", "dv", "dlog_f"), exact, one_gpu, shared, (1, 2, 2, 2, 1), strict=True
    ):
        sums = torch.stack(
            [
                (ours.double() - wanted.index_select(dim, keep)).square().sum(),
                (one.double() - wanted).square().sum() / mesh.size,
            ]
        )
        dist.all_reduce(sums)
        found[name] = float((sums[0] / sums[1]).sqrt()) if sums[1] > 0 else None
    return {"kind": "error over one GPU's", "length": length, "ulysses": split.ulysses, "zigzag": split.zigzag, **found}


# the whole model ---------------------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """A model whose forward is the loss of a batch."""

    def __init__(self, model: Any, objective: Any, autocast: bool):
        super().__init__()
        self.model, self.objective, self.autocast = model, objective, autocast

    def forward(self, **batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else nullcontext():
            return self.objective(self.model, batch)[0]


def batch_of(bench: Bench, case: str, length: int) -> dict[str, Any]:
    """A row of random tokens with targets."""
    ids = torch.randint(bench.shape["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
    bounds = bench.documents(case, length) or [0, length]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])[None]
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1] = ids[:, 1:].masked_fill(positions[:, 1:] == 0, IGNORE)
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "targets": targets}
    if len(bounds) > 2:
        batch["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    return batch


def model_of(bench: Bench, case: str, length: int) -> Any:
    """A converted model of the shape, its gates as the case has them."""
    config = LlamaConfig(**bench.shape, max_position_embeddings=length)
    adapted = bench.options.shape.endswith("lora")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if adapted and bench.cuda else torch.float32)
    try:
        with bench.device:
            base = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    spec = retrofox.FoxSpec(rope="keep", init="open")
    if case == "gates":
        spec = retrofox.FoxSpec(rope="keep", half_life=(16.0, float(length)), horizon=HORIZON)
    model = retrofox.convert(base, fox=spec).to(bench.device).train()
    model.config.use_cache = False
    if adapted:
        model = with_adapters(model, bench.options.shape).to(bench.device)
    if bench.cuda:
        lower_precision(model, torch.bfloat16)
    recompute(model, "full")
    return model


def step_row(bench: Bench, case: str, length: int) -> dict[str, Any]:
    """Forward and backward of the model over shared rows, one a group, beside a whole row on each GPU."""
    split = degrees(bench.context, bench.shape["num_key_value_heads"])
    mesh, model = bench.mesh(split), model_of(bench, case, length)
    stage = ExtendStage.model_validate({"objective": "extend", "tokens": length, "sequence_length": length})
    step = Step(model, Extend(model, stage, bench.device), bench.cuda)
    whole = batch_of(bench, case, length)
    part = cut(whole, split, mesh.rank)
    ready: dict[str, Any] = {k: v.to(bench.device) for k, v in part.items() if isinstance(v, torch.Tensor)}
    ready["shards"] = Shards(mesh, part["rows"], bench.device)
    whole = {k: v.to(bench.device) for k, v in whole.items()}

    def run(module: torch.nn.Module, batch: dict[str, Any]) -> None:
        (module(**batch) / length).backward()
        module.zero_grad()

    seconds_alone = attempt(bench, lambda: bench.seconds(lambda: run(step, whole)))
    parallel = DistributedDataParallel(step, device_ids=[bench.device.index] if bench.cuda else None)
    run(parallel, ready)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = bench.seconds(lambda: run(parallel, ready), warm=False)
    known = isinstance(seconds_alone, float)
    return {
        "kind": "step",
        "case": case,
        "length": length,
        "ulysses": split.ulysses,
        "zigzag": split.zigzag,
        "seconds_alone": seconds_alone,
        "seconds": seconds,
        "groups": mesh.readers,
        "tokens_per_second_and_gpu": length / seconds / bench.context,
        "ratio": seconds_alone / (bench.context * seconds) if known else None,
        "published_ratio_of_ring_flash_attention": PUBLISHED.get(case),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if bench.cuda else None,
    }


def attempt(bench: Bench, work: Callable[[], Any]) -> Any:
    """What work returns, or why it can't: a row may not fit one GPU. All processes go the same way."""
    found, failed = None, torch.zeros(1, device=bench.device)
    try:
        found = work()
    except (RuntimeError, ValueError, ImportError, AssertionError, AttributeError, KeyError, TypeError) as error:
        found, failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", failed + 1
    dist.all_reduce(failed)
    return found if isinstance(found, str) or not failed.any() else "another process failed"


def accelerate_row(bench: Bench, length: int) -> dict[str, Any]:
    """The unconverted model with accelerate's cp (torch's ring over SDPA, FSDP2), where it runs.

    Its loss is the hidden states' and, of one token, the logits': a chunked loss over the vocabulary is not in it.
    """

    def forward(model: Any, **batch: Any) -> torch.Tensor:
        hidden = model.model(**batch, use_cache=False).last_hidden_state
        return hidden.float().square().mean() + model.lm_head(hidden[:, -1:]).float().square().mean()

    def measure() -> float:
        from accelerate import Accelerator
        from accelerate.parallelism_config import ParallelismConfig
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing=True,
        )
        accelerator = Accelerator(
            mixed_precision="bf16", parallelism_config=ParallelismConfig(cp_size=bench.world), fsdp_plugin=plugin
        )
        config = LlamaConfig(**bench.shape, max_position_embeddings=length)
        with bench.device:
            base = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        base.forward = MethodType(forward, base)  # called as a whole: FSDP2's root must run first
        optimizer = torch.optim.SGD(base.parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(base.train(), optimizer)

        def run() -> None:
            batch = {k: v.to(bench.device) for k, v in batch_of(bench, "dense", length).items()}
            buffers = [batch["input_ids"], batch["position_ids"]]
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
            ):
                accelerator.backward(model(input_ids=buffers[0], position_ids=buffers[1]))
                optimizer.zero_grad()

        return bench.seconds(run)

    found = attempt(bench, measure) if bench.cuda else "accelerate's cp needs CUDA: torch's ring has no CPU attention"
    seconds = found if isinstance(found, float) else None
    why = None if seconds is not None else found
    return {
        "kind": "accelerate cp, unconverted, no head",
        "case": "dense",
        "length": length,
        "seconds": seconds,
        "why_not": why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--parts", choices=("attention", "error", "step", "accelerate"), nargs="+",
                        default=["error", "attention", "step", "accelerate"])  # fmt: skip
    parser.add_argument("--context", type=int, help="GPUs that share a row in steps; default: all")
    parser.add_argument("--error-length", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--zigzag", action="store_true", help="also without trading heads, at the first length")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size()
    if options.context is not None and (options.context < 2 or world % options.context):
        parser.error(f"--context must be 2 or more and divide the {world} processes, got {options.context}")
    bench, started = Bench(options), time.perf_counter()
    device = torch.cuda.get_device_name() if bench.cuda else "cpu"
    result: dict[str, Any] = {
        **provenance(),
        "gpus": bench.world,
        "context": bench.context,
        "device": device,
        "shape": options.shape,
        "rows": [],
    }
    best = degrees(bench.world, bench.shape["num_key_value_heads"])
    zigzag = Degrees(1, bench.world)

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(bench.tell(row))
        result["seconds"] = round(time.perf_counter() - started, 1)
        if options.out and dist.get_rank() == 0:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()

    if "error" in options.parts:
        for split in dict.fromkeys((best, zigzag)):
            keep(error_row(bench, options.error_length, split))
    for length in options.lengths:
        for case in options.cases:
            if "attention" in options.parts:
                keep(attention_row(bench, case, length, best))
                if options.zigzag and zigzag != best and length == options.lengths[0]:
                    keep(attention_row(bench, case, length, zigzag))
            if "step" in options.parts:
                keep(step_row(bench, case, length))
        if "accelerate" in options.parts:
            keep(accelerate_row(bench, length))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
