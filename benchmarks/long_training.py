"""Long rows on one GPU: speed beside the same model's at the first length, and peak memory beside the plan's.

    python benchmarks/long_training.py --out benchmarks/long-training.json [--shapes ...] [--lengths ...] [--layers N]

Random weights and tokens, one document to a row, bfloat16 products, full gradient checkpointing, optimizer steps
through the Trainer: Llama-3.1-8B's shape with rank-16 adapters and gates on a frozen bfloat16 base, Llama-3.2-1B's
shape in full. Each row takes the switches that the plan says make it fit --room, the cheapest that do. Speed is model
operations (6 a parameter that trains, 4 a frozen one, and attention's) a second; its ratio is to the shape's first
length. --room also limits the allocator, so that a larger GPU stands for one of that size. A row that would take more
than is left of --budget, by the operations a second of the row before, is left out and says so. --layers cuts the
shape's depth: a layer takes as long and as much memory as in the whole, but for the weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from typing import Any

import torch
from model_shapes import LLAMA_1B, LLAMA_8B, with_adapters
from provenance import out_file, provenance
from transformers import LlamaConfig, LlamaForCausalLM

import retrofox
from retrofox.anatomy import causal_lm
from retrofox.config import Recipe, validate
from retrofox.planning.hardware import Hardware, here
from retrofox.planning.hours import flops_per_token
from retrofox.planning.memory import cpu_memory, memory
from retrofox.planning.plan import changes_that_fit, named
from retrofox.planning.shape import shape_of
from retrofox.support.memory import reset_peak
from retrofox.surgery import make_plan
from retrofox.training.measure import measure_steps
from retrofox.training.offload import CHUNK
from retrofox.training.param_groups import set_trainable

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b-lora": LLAMA_8B,
    "llama-3.2-1b": LLAMA_1B,
    "pico": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
SPEC = retrofox.FoxSpec(rope="partial", max_wavelength=2048.0, half_life=(256.0, 65536.0))
LENGTHS = {"llama-3.1-8b-lora": [65536, 262144], "llama-3.2-1b": [65536, 524288], "pico": [64, 256]}
GUESS = 0.3
"""Share of the GPU's peak with which the first row's time is guessed."""


def recipe_of(shape: str, length: int, switches: dict[str, Any]) -> Recipe:
    """One extend stage of rows of a length, one to a step."""
    stage = {
        "objective": "extend",
        "tokens": 1000 * length,
        "sequence_length": length,
        "learning_rate": 1e-5,
        "gradient_checkpointing": "full",
        **switches,
    }
    return validate(
        {
            "model": shape,
            "output": "unused",
            "data": {"train": ["unused"]},
            "stages": [stage],
            "lora": {"rank": 16} if shape.endswith("lora") else None,
        }
    )


def config_of(shape: str, layers: int | None) -> LlamaConfig:
    values = {**SHAPES[shape], "num_hidden_layers": layers or SHAPES[shape]["num_hidden_layers"]}
    values |= {"max_position_embeddings": 1 << 20, "rope_theta": 500000.0, "use_cache": False}
    return LlamaConfig(**values)


def build(shape: str, layers: int | None, device: torch.device) -> Any:
    """The converted model on its device; a base under adapters in bfloat16, what is trained in float32."""
    adapted, before = shape.endswith("lora"), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if adapted and device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config_of(shape, layers))
            model: Any = retrofox.convert(model, fox=SPEC)
    finally:
        torch.set_default_dtype(before)
    if adapted:
        model = with_adapters(model, shape)
    return model.to(device)


class Bench:
    """What every row needs: the options, the machine, and how fast the last row was."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.flops_per_second: float | None = None
        self.model: Any = None
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.room * 1e9 / total))

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.options.budget - (time.perf_counter() - self.started)

    def row(self, shape: str, length: int) -> dict[str, Any]:
        """Plans one length of a shape, then measures it, or says why not."""
        options = self.options
        given = dict(options.switches)
        recipe = recipe_of(shape, length, given)
        found: dict[str, Any] = {"shape": shape, "layers": options.layers or SHAPES[shape]["num_hidden_layers"]}
        found |= {"length": length, "trains": "rank-16 adapters and gates" if recipe.lora else "all weights"}
        try:
            found |= self.plan(recipe, make_plan(config_of(shape, options.layers), SPEC).config)
        except torch.cuda.OutOfMemoryError as error:
            return {**found, "why_not": f"out of memory while it was planned: {str(error).splitlines()[0][:160]}"}
        changes = found.pop("changes")
        if changes is None:
            return {**found, "why_not": f"the plan finds no switches with which it fits {options.room:g} GB"}
        recipe = recipe_of(shape, length, {**given, **changes})
        try:
            return found | self.measured(shape, recipe, found["planned_cpu_gb"])
        except torch.cuda.OutOfMemoryError as error:
            self.model = None
            return {**found, "why_not": f"out of memory: {str(error).splitlines()[0][:160]}"}

    def measured(self, shape: str, recipe: Recipe, cpu_gb: float) -> dict[str, Any]:
        """Speed and peak memory of a row, or why it is left out."""
        options, device, stage = self.options, self.device, recipe.stages[0]
        if self.model is None:
            self.model = build(shape, options.layers, device)
        set_trainable(self.model, stage, adapters=recipe.lora is not None)
        # a step before the timed one loads kernels and makes the optimizer's state
        steps = 1 if options.once else 2
        flops = flops_per_token(shape_of(causal_lm(self.model).config.to_dict()), recipe.lora, stage)
        speed = self.flops_per_second or (GUESS * (here().flops or 1e11))
        estimate = steps * 1.15 * flops * stage.sequence_length / speed
        if estimate > self.left():
            return {"why_not": f"would take about {estimate:.0f} s, {self.left():.0f} s are left"}
        if device.type == "cuda" and stage.offload_activations:
            pin_ahead(int(1e9 * cpu_gb))
        before = reset_peak(device)
        run = measure_steps(recipe, stage, self.model, device, steps=steps, documents=1, before=before)
        self.flops_per_second = flops * run["tokens_per_second"]
        return {
            "steps": steps,
            "warm": steps > 1,
            "seconds_per_step": round(run["seconds_per_step"], 3),
            "tokens_per_second": round(run["tokens_per_second"], 1),
            "flops_per_token": flops,
            "flops_per_second": self.flops_per_second,
            "mfu": run["mfu"] and round(run["mfu"], 4),
            "peak_memory_gb": round(run["peak_memory_gb"], 3),
        }

    def plan(self, recipe: Recipe, config: Any) -> dict[str, Any]:
        """The cheapest switches that fit, and the memory planned with them (without any where none fit)."""
        stage, started = recipe.stages[0], time.perf_counter()
        shape = shape_of(config.to_dict())
        room = Hardware("this one", 0.95 * 1e9 * self.options.room, None, gpu=self.device.type == "cuda")
        changes = changes_that_fit(shape, recipe, stage, room)
        stage = stage.model_copy(update=changes or {})
        planned = memory(shape, recipe, stage, room)
        keys = ("gradient_checkpointing", "tiled_mlp", "offload_activations")
        return {
            "switches": {key: getattr(stage, key) for key in keys},
            "added_by_the_plan": named(changes or {}),
            "changes": changes,
            "planned_gb": round(math.fsum(planned.values()) / 1e9, 3),
            "planned_components_gb": {key: round(value / 1e9, 3) for key, value in planned.items()},
            "planned_cpu_gb": round(math.fsum(cpu_memory(shape, recipe, stage, room).values()) / 1e9, 3),
            "seconds_planning": round(time.perf_counter() - started, 1),
        }


def pin_ahead(nbytes: int) -> None:
    """Pins that much CPU memory for the buffers to come, so that no step waits for it; torch keeps it once freed."""
    buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(-(-nbytes // CHUNK))]
    del buffers


def release(device: torch.device) -> None:
    """Gives memory back that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: a line each, with the ratio of its speed to the shape's first."""
    head = (
        f"{'shape':18} {'layers':>6} {'length':>8} {'s/step':>8} {'tok/s':>8} {'GFLOP/tok':>9} {'MFU':>6} {'ratio':>6}"
    )
    lines = [head + f" {'peak GB':>8} {'planned':>8} {'p/m':>6} {'CPU GB':>7}  switches"]
    for row in rows:
        start = f"{row['shape']:18} {row['layers']:6} {row['length']:8,}"
        if "why_not" in row:
            planned = f" (planned {row['planned_gb']:.2f} GB)" if "planned_gb" in row else ""
            lines.append(f"{start} {row['why_not']}{planned}")
            continue
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.3f}"
        lines.append(
            f"{start} {row['seconds_per_step']:8.2f} {row['tokens_per_second']:8,.0f} "
            f"{row['flops_per_token'] / 1e9:9.2f} {mfu:>6} {row['speed_ratio']:6.3f} {row['peak_memory_gb']:8.2f} "
            f"{row['planned_gb']:8.2f} {row.get('planned_over_measured', math.nan):6.3f} {row['planned_cpu_gb']:7.1f}  "
            f"{named(row['switches'])}"
        )
    return "\n".join(lines)


def switch(text: str) -> tuple[str, Any]:
    """KEY=VALUE of a stage, such as offload_activations=true."""
    key, separator, value = text.partition("=")
    if not separator or key not in ("tiled_mlp", "offload_activations", "gradient_checkpointing"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a switch, such as tiled_mlp=auto or offload_activations=true")
    return key, {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-3.1-8b-lora", "llama-3.2-1b"])
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a row; default: 64k, and the shape's longest")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--switches", nargs="*", type=switch, default=[], metavar="KEY=VALUE", help="on in every row")
    parser.add_argument("--once", action="store_true", help="one step in every row: nothing warms the kernels up")
    parser.add_argument("--room", type=float, default=80.0, help="10^9 bytes of the GPU that may be used")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args(given)
    for name, values in (("--lengths", options.lengths or [2]), ("--layers", [options.layers or 1])):
        if min(values) < 1:
            parser.error(f"{name} must be 1 or more, got {min(values)}")
    return options


def main(given: list[str] | None = None) -> dict[str, Any]:
    options = arguments(given)
    bench = Bench(options)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    result: dict[str, Any] = {**provenance(), "device": name, "room_gb": options.room, "rows": []}
    for shape in options.shapes:
        first = None
        for length in options.lengths or LENGTHS[shape]:
            row = bench.row(shape, length)
            if "flops_per_second" in row:
                first = first or row
                if row["peak_memory_gb"]:  # on a CPU nothing may have been added to the process's own
                    row["planned_over_measured"] = round(row["planned_gb"] / row["peak_memory_gb"], 4)
                row["speed_ratio"] = round(row["flops_per_second"] / first["flops_per_second"], 4)
            result["rows"].append(row)
            result["seconds"] = round(time.perf_counter() - bench.started, 1)
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
            release(bench.device)
        bench.model = bench.flops_per_second = None
        release(bench.device)
    print(table(result["rows"]), flush=True)
    return result


if __name__ == "__main__":
    main()
