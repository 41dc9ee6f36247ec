"""Training speed, utilisation and peak memory of Llama-3.2-1B's and Qwen3-8B's shapes, converted beside unconverted.

    python benchmarks/shapes.py --out benchmarks/shapes.json [--shapes llama-3.2-1b qwen3-8b] [--lengths 8192 32768]

Random weights and tokens, one document per row (so that the unconverted model runs torch's SDPA without a mask, at its
best), bfloat16 over float32 master weights, optimizer steps through the Trainer after one to warm up. The 1B trains
whole; the 8B, whose optimizer alone would take 64 GB, trains rank-16 adapters on a frozen bfloat16 base (and, where
converted, its gates). A row says how it recomputed activations; where memory runs out it says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch
from model_shapes import LLAMA_1B, SMOLLM2
from provenance import out_file, provenance
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import retrofox
from retrofox.config import LoraConfig, Recipe, validate
from retrofox.support.memory import reset_peak
from retrofox.training.lora import add_adapters
from retrofox.training.measure import measure_steps
from retrofox.training.param_groups import set_trainable

SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "smollm2-135m": (LlamaForCausalLM, LlamaConfig, SMOLLM2),
    "llama-3.2-1b": (LlamaForCausalLM, LlamaConfig, LLAMA_1B),
    "qwen3-8b": (Qwen3ForCausalLM, Qwen3Config, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
}  # fmt: skip
RECOMPUTED = {"smollm2-135m": 32768, "llama-3.2-1b": 16384, "qwen3-8b": 0}
"""Rows longer than this recompute every layer."""
ADAPTED = ("qwen3-8b",)


def recipe_of(shape: str, length: int, row_tokens: int, deterministic: bool) -> Recipe:
    """One extend stage at a length, `row_tokens` to a step where the rows are shorter."""
    rows = max(1, row_tokens // length)
    stage = {
        "objective": "extend",
        "tokens": 1000 * rows * length,
        "sequence_length": length,
        "micro_batch": rows,
        "learning_rate": 1e-5,
        "gradient_checkpointing": "full" if length > RECOMPUTED[shape] else "none",
    }
    return validate(
        {
            "model": shape,
            "output": "unused",
            "data": {"train": ["unused"]},
            "stages": [stage],
            "lora": {"rank": 16} if shape in ADAPTED else None,
            "deterministic": deterministic,
        }
    )


def build(shape: str, converted: bool, device: torch.device, layers: int | None = None) -> Any:
    """The model on its device; a base under adapters in bfloat16, everything that is trained in float32."""
    family, config_class, values = SHAPES[shape]
    values = {**values, "num_hidden_layers": layers or values["num_hidden_layers"]}
    config = config_class(**values | {"max_position_embeddings": 131072, "rope_theta": 500000.0, "use_cache": False})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if shape in ADAPTED else torch.float32)
    try:
        with torch.device(device):
            model = family(config)
            if converted:
                spec = retrofox.FoxSpec(rope="partial", max_wavelength=2048.0, half_life=(256.0, 65536.0))
                model = retrofox.convert(model, fox=spec)
    finally:
        torch.set_default_dtype(before)
    if shape in ADAPTED:
        model = add_adapters(model, LoraConfig(rank=16), shape)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.2-1b", "qwen3-8b"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 65536])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, default=16384, help="tokens of a step where rows are shorter")
    parser.add_argument(
        "--once-from", type=int, default=1 << 30, help="lengths from here on run one step, not warmed up"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has: to compile its kernels only")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict = {**provenance(), "device": name, "deterministic": options.deterministic, "rows": []}
    for shape in options.shapes:
        for converted in (False, True):
            model: Any = None
            for length in options.lengths:
                started, before = time.perf_counter(), reset_peak(device)
                recipe = recipe_of(shape, length, options.step_tokens, options.deterministic)
                row = describe(shape, converted, recipe)
                try:
                    model = build(shape, converted, device, options.layers) if model is None else model
                    row["parameters"] = sum(p.numel() for p in model.parameters())
                    row |= measure(recipe, model, device, options.steps if length < options.once_from else 1, before)
                except torch.cuda.OutOfMemoryError:
                    row["out_of_memory"] = True
                    model = None
                release(device)
                found["rows"].append({**row, "seconds_in_all": round(time.perf_counter() - started, 1)})
                print(json.dumps(found["rows"][-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
            model = None
            release(device)


def describe(shape: str, converted: bool, recipe: Recipe) -> dict[str, Any]:
    """What a row of the table is about."""
    stage = recipe.stages[0]
    adapters = "rank-16 adapters" + (" and gates" if converted else "")
    return {
        "shape": shape,
        "converted": converted,
        "length": stage.sequence_length,
        "rows": stage.micro_batch,
        "trains": adapters if recipe.lora else "all weights",
        "recomputation": stage.gradient_checkpointing,
    }


def measure(recipe: Recipe, model: Any, device: torch.device, steps: int, before: float) -> dict[str, Any]:
    """Speed, utilisation and peak memory of a few steps, rounded."""
    set_trainable(model, recipe.stages[0], adapters=recipe.lora is not None)
    found = measure_steps(recipe, recipe.stages[0], model, device, steps=steps, documents=1, before=before)
    return {key: value if value is None else round(value, 4) for key, value in found.items()} | {"steps": steps}


def release(device: torch.device) -> None:
    """Gives memory back that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
