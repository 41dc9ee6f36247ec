"""Training speed of a converted model in long windows, beside its unconverted base: real steps on real packed text.

    python benchmarks/train_step.py MODEL --base BASE --text FILES [--windows 16384,32768] [--seconds 170]
        [--out benchmarks/train-windows.json]

Whole steps of `extend` through the Trainer: all weights, bfloat16 over float32, 65536 tokens a step, documents packed
into windows. In turns, in one process: `converted`; `control`, the base by one FlashAttention call a layer for all
documents of a micro-batch (at its best); `control by document`, the base by one SDPA call a document, as `retrofox
train` has it where positions skip. Speeds are medians of steps after the first of each turn. Prints tokens a second and
what they are of the control's; writes JSON after each turn. Without a GPU `control` is left out: the kernel needs one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from provenance import out_file, provenance
from transformers import AttentionInterface, AutoModelForCausalLM

import retrofox
from retrofox.config import Recipe, validate
from retrofox.data.prepare import PreparedTokens, prepare_data
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.support.memory import reset_peak
from retrofox.training.data import StageData
from retrofox.training.document_attention import NAME, attend_by_document, set_document_attention
from retrofox.training.measure import measure_steps
from retrofox.training.param_groups import set_trainable

STEP_TOKENS, MICRO_BATCH_TOKENS = 65536, 32768
CONTENDERS = ("converted", "control", "control by document")


@functools.lru_cache(maxsize=4)  # all layers of a micro-batch ask for the same
def boundaries(ends: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """(int32 ends on the device, tokens of the longest document)."""
    longest = max(stop - start for start, stop in itertools.pairwise(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device), longest


def attend_at_once(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, document_ends: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Like `attend_by_document`, all documents in one call of FlashAttention."""
    rows, _, length, _ = query.shape
    given = tuple(document_ends or range(0, rows * length + 1, length))
    ends, longest = boundaries(given, query.device)
    flat = [x.transpose(1, 2).flatten(0, 1).to(torch.bfloat16) for x in (query, key, value)]
    sizes = (ends, ends, longest, longest, 0.0, True, False)
    out = torch.ops.aten._flash_attention_forward(*flat, *sizes, scale=options.get("scaling"))[0]
    return out.unflatten(0, (rows, length)), None


def recipe_of(arguments: argparse.Namespace, window: int, cache: str) -> Recipe:
    """One extend stage in windows of a length."""
    stage = {
        "objective": "extend",
        "tokens": 1000 * STEP_TOKENS,
        "sequence_length": window,
        "micro_batch": max(1, MICRO_BATCH_TOKENS // window),
        "batch_tokens": max(STEP_TOKENS, window),
        "learning_rate": 1e-5,
    }
    data = {"train": [str(x) for x in arguments.text], "cache": cache}
    workers = 4 if torch.cuda.is_available() else 0
    return validate(
        {"model": arguments.model, "output": "unused", "data": data, "stages": [stage], "dataloader_workers": workers}
    )


def models(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Both in float32, as they are trained."""
    base: Any = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    set_document_attention(base)
    base = base.to(device)
    converted = retrofox.load(arguments.model, dtype=torch.float32, device=device)
    return {"converted": converted, "control": base, "control by document": base}


def measure(name: str, model: Any, recipe: Recipe, tokens: PreparedTokens, steps: int) -> dict[str, float]:
    """Speed and peak memory of a turn."""
    AttentionInterface.register(NAME, attend_at_once if name == "control" else attend_by_document)
    stage, device = recipe.stages[0], model.device
    before = reset_peak(device)
    set_trainable(model, stage, adapters=False)
    data = StageData(tokens, recipe, stage, SimpleNamespace(process_index=0, num_processes=1))
    return measure_steps(recipe, stage, model, device, steps=steps, data=data, before=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or Hub id of a trained converted model")
    parser.add_argument("--base", required=True)
    parser.add_argument("--text", nargs="+", required=True, help="files of documents, as data.train of a recipe")
    parser.add_argument("--windows", default="16384,32768")
    parser.add_argument("--steps", type=int, default=7, help="of a turn; the first is not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further turn after so many")
    parser.add_argument("--out", type=out_file, default=Path(__file__).parent / "train-windows.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started, built = time.perf_counter(), models(arguments, device)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    report: dict[str, Any] = {**provenance(), "gpu": gpu, "step_tokens": STEP_TOKENS, "rows": []}
    with tempfile.TemporaryDirectory() as cache:
        for window in map(int, arguments.windows.split(",")):
            recipe = recipe_of(arguments, window, cache)
            tokens = prepare_data(recipe.data, recipe_tokenizer(None, arguments.model), progress=False)
            rows = {name: {"window": window, "model": name, "speeds": []} for name in CONTENDERS}
            report["rows"] += rows.values()
            for name in list(CONTENDERS) * arguments.turns:
                if time.perf_counter() - started > arguments.seconds or (name == "control" and gpu is None):
                    continue
                row = rows[name]
                try:
                    found = measure(name, built[name], recipe, tokens, arguments.steps)
                except Exception as error:  # the others are still worth their time
                    traceback.print_exc()
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                    continue
                row["speeds"].append(found["tokens_per_second"])
                row["tokens_per_second"] = statistics.median(row["speeds"])
                row["peak_memory_gb"] = found["peak_memory_gb"]
                for each in rows.values():
                    if "tokens_per_second" in each and "tokens_per_second" in rows.get("control", {}):
                        each["of_control"] = each["tokens_per_second"] / rows["control"]["tokens_per_second"]
                print(f"{time.perf_counter() - started:5.0f} s  {json.dumps(row)}", flush=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
