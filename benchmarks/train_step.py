"""Profiles one training step of a converted model beside the unconverted one, and trains both through `retrofox train`.

    python benchmarks/train_step.py --tokenizer DIR [--tokens 2M] [--seconds 140] [--out benchmarks/train-step.json]

SmolLM2-135M's shapes with random weights, bf16, 4096 tokens a row, 8 rows a micro-batch, 2 micro-batches a step; text
of examples/data. A step's costs are GPU time by kind of kernel, from torch.profiler; `host` is the time in which Python
and PyTorch issued the step, `wall` the time it took: a step whose wall is its GPU time does not wait for the host.
Prints tables; writes JSON after each part, trainings first. Needs one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from model_shapes import SMOLLM2
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import retrofox
import retrofox.training.train
from retrofox.config import Stage, load_recipe
from retrofox.training.model_tweaks import fuse_norms, lower_precision_stream, repeatable
from retrofox.training.objectives import Extend

ROOT = Path(__file__).resolve().parent.parent
FOX = {"rope": "partial", "max_wavelength": 1400, "half_life": [256, 65536], "sink_tokens": 1}
ROWS, LENGTH, MICRO_BATCHES = 8, 4096, 2
STEPS = 6
PARTS = (
    ("train", "unconverted"),
    ("train", "converted"),
    ("profile", "unconverted"),
    ("profile", "converted"),
    ("train", "converted, deterministic"),
    ("profile", "converted, deterministic"),
)
"""In this order: what is asked first is there first, if time runs out."""
# first match wins
KINDS = {
    "attention backward": r"fox_backward|dkdv|dq_kernel|finish_kernel|prepare_kernel|bwd|bprop|dot_do_o",
    "attention forward": r"fox_forward|forward_kernel|fprop|fmha|flash_fwd|sdpa",
    "gates": r"gate_kernel|gate_backward|cumulative_kernel|suffix_kernel|relative_kernel|log_sigmoid",
    "rotary and packing": r"rotary_kernel|turn_kernel|pack_kernel|weights_kernel|rotate",
    "matrix products": r"gemm|nvjet|cutlass|wgmma|xmma|splitK|cublas",
    "norms": r"rms_norm|RMSNorm|layer_norm|LayerNorm|GammaBeta",
    "softmax of the loss": r"softmax|LogSoftMax",
    "optimizer and clipping": r"multi_tensor|adam|lpnorm|foreach",
    "copies and casts": r"copy|Memcpy|Memset|CatArray|direct_copy|fill",
    "additions": r"CUDAFunctor_add|AddFunctor",
    "products": r"MulFunctor|mul",
    "SiLU": r"silu",
    "reductions": r"reduce",
}


def build(converted: bool) -> Any:
    """The model as the trainer has it: float32 weights, bfloat16 stream, fused norms."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
    if converted:
        model = retrofox.convert(model, fox=retrofox.FoxSpec(**FOX))
    model = model.to("cuda").train()
    model.config.use_cache = False
    lower_precision_stream(model, torch.bfloat16)
    fuse_norms(model)
    return model


def measure(converted: bool, deterministic: bool) -> dict[str, Any]:
    """Wall, host and GPU milliseconds of a step, tokens a second, peak memory and the costs by kind of kernel."""
    model = build(converted)
    objective = Extend(model, Stage.model_construct(cross_entropy="chunked"), torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = []
    for seed in range(MICRO_BATCHES):
        ids = torch.randint(SMOLLM2["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        batches.append({"input_ids": ids.cuda(), "targets": ids.roll(-1, 1).cuda()})

    def step() -> None:
        for batch in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss, _ = objective(model, batch)
            (loss / (MICRO_BATCHES * ROWS * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with repeatable(deterministic):
        for _ in range(3):
            step()
        walls, hosts = [], []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            hosts.append(time.perf_counter() - started)
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - started)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
    kernels = {e.key: (e.self_device_time_total / 1e3, e.count) for e in recorded.key_averages()}
    costs: dict[str, float] = {}
    for name, (milliseconds, _) in kernels.items():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        costs[kind] = costs.get(kind, 0.0) + milliseconds
    wall = statistics.median(walls)
    largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:25]
    return {
        "converted": converted,
        "deterministic": deterministic,
        "tokens_per_second": MICRO_BATCHES * ROWS * LENGTH / wall,
        "wall_ms": wall * 1e3,
        "host_ms": statistics.median(hosts) * 1e3,
        "gpu_ms": sum(costs.values()),
        "kernels_launched": sum(count for _, count in kernels.values()),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "costs_ms": dict(sorted(costs.items(), key=lambda item: -item[1])),
        "kernels": [{"name": k[:140], "ms": ms, "count": count} for k, (ms, count) in largest],
    }


def train(name: str, recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`retrofox train` of one recipe; what its result and its log say."""
    file, out = folder / f"{name}.yaml", folder / name
    file.write_text(yaml.safe_dump({**recipe, "output": str(out)}), encoding="utf-8")
    result = retrofox.training.train.train(load_recipe(file))["stages"][0]
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "tokens_per_second" in line][-1]
    return {**result, **{k: last[k] for k in ("mfu", "memory_gb") if k in last}}


def recipes(tokens: str, model: Path, cache: Path) -> dict[str, dict[str, Any]]:
    """The converted model's recipe, fast and repeatable, and the unconverted one's."""
    stage = {
        "objective": "extend",
        "tokens": tokens,
        "sequence_length": LENGTH,
        "batch_tokens": ROWS * LENGTH * MICRO_BATCHES,
        "micro_batch": ROWS,
        "learning_rate": 6e-4,
        "schedule": "linear",
        "warmup_tokens": 655360,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "clip": 1.0,
    }
    data = {"train": [str(ROOT / "examples" / "data" / "train")], "cache": str(cache)}
    plain = {
        "model": str(model),
        "data": data,
        "stages": [stage],
        "dataloader_workers": 4,
        "checkpoint": {"every_steps": 1_000_000},  # the last step's only: saving is no part of what is timed
        "log": {"every": 2},
    }
    fox_stage = {**stage, "rates": {"gate_bias": 3e-3, "gate_weight": 3e-3}}
    converted = {**plain, "fox": FOX, "stages": [fox_stage]}
    return {
        "unconverted": plain,
        "converted": converted,
        "converted, deterministic": {**converted, "deterministic": True},
    }


def table(title: str, rows: dict[str, dict[str, Any]], columns: dict[str, str]) -> Table:
    found = Table(title=title)
    found.add_column("")
    for column in columns:
        found.add_column(column, justify="right")
    for name, row in rows.items():
        found.add_row(name, *(format(row[c], f) if row.get(c) is not None else "" for c, f in columns.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="Hub id or directory of the tokenizer to train with")
    parser.add_argument("--tokens", default="2M", help="training tokens of each run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "train-step.json")
    parser.add_argument("--no-train", action="store_true", help="profile only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further part after so many")
    arguments = parser.parse_args()
    if not arguments.no_train and arguments.tokenizer is None:
        parser.error("training needs --tokenizer, or choose --no-train")
    console, started = Console(width=160), time.perf_counter()
    report: dict[str, Any] = {
        **provenance(),
        "gpu": torch.cuda.get_device_name(),
        "shapes": SMOLLM2,
        "fox": FOX,
        "step": {"rows": ROWS, "length": LENGTH, "micro_batches": MICRO_BATCHES},
        "profile": {},
        "train": {},
    }

    def save() -> None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def late() -> bool:
        return time.perf_counter() - started > arguments.seconds

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        to_train: dict[str, dict[str, Any]] = {}
        if not arguments.no_train:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(folder / "base")
            AutoTokenizer.from_pretrained(arguments.tokenizer).save_pretrained(folder / "base")
            to_train = recipes(arguments.tokens, folder / "base", folder / "cache")
        for part, variant in PARTS:
            if late() or (part == "train" and arguments.no_train):
                continue
            if part == "train":
                found = train(variant.replace(", ", "-"), to_train[variant], folder)
                unconverted = report["train"].get("unconverted", found)
                found["ratio"] = found["tokens_per_second"] / unconverted["tokens_per_second"]
                print(variant, json.dumps(found), f"{time.perf_counter() - started:.0f} s", flush=True)
            else:
                found = measure(variant != "unconverted", variant.endswith("deterministic"))
            report[part][variant] = found
            save()
    if report["train"]:
        columns = {
            "tokens_per_second": ",.0f", "ratio": ".3f", "mfu": ".3f", "memory_gb": ".1f", "loss_last": ".3f",
            "seconds": ".1f",
        }  # fmt: skip
        console.print(table(f"retrofox train, {arguments.tokens} tokens each", report["train"], columns))
    columns = {
        "tokens_per_second": ",.0f", "wall_ms": ".1f", "host_ms": ".1f", "gpu_ms": ".1f", "kernels_launched": ",",
        "peak_memory_gb": ".1f",
    }  # fmt: skip
    console.print(table("one step, head and optimizer included", report["profile"], columns))
    kinds = list(dict.fromkeys(kind for row in report["profile"].values() for kind in row["costs_ms"]))
    by_kind = {kind: {n: row["costs_ms"].get(kind) for n, row in report["profile"].items()} for kind in kinds}
    console.print(table("GPU milliseconds by kind of kernel", by_kind, dict.fromkeys(report["profile"], ".1f")))
    save()


if __name__ == "__main__":
    main()
