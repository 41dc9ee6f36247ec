"""What `retrofox plan` promises beside what a GPU measures, stage by stage of the recipes that ship.

    python benchmarks/train_memory.py --model DIRECTORY --out benchmarks/train_memory.json

Each stage runs three optimizer steps on random tokens through the Trainer; the peak is
torch.cuda.max_memory_allocated over them. --longest also runs each stage at the longest row that the plan says fits.
Weights are random, so DIRECTORY needs only a config.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from provenance import out_file, provenance

from retrofox.config import Recipe, load_recipe
from retrofox.planning.hardware import here
from retrofox.planning.plan import plan
from retrofox.training.measure import check_here, measure_here

RECIPES = ("smollm2-stretch", "smollm2-control", "smollm2-lora", "smollm2-no-rope")
ROOT = Path(__file__).parent.parent
DATA = (f"data.train=[{ROOT / 'examples/data/train'}]", "data.eval=[]")  # a plan refuses without; never read here


def compare(recipe: Recipe, name: str) -> list[dict]:
    """One row per stage: planned and measured peak in 10^9 bytes, and their ratio."""
    if refusals := check_here(recipe):
        raise SystemExit(f"{name}: {refusals}")
    report = plan(recipe, here())
    measure_here(recipe, report)
    rows = []
    for number, stage in enumerate(report["stages"]):
        planned, measured = math.fsum(stage["memory_gb"].values()), stage["measured"]["peak_memory_gb"]
        rows.append(
            {
                "recipe": name,
                "stage": f"{number} {stage['objective']}",
                "planned_gb": round(planned, 3),
                "measured_gb": round(measured, 3),
                "ratio": round(planned / measured, 4),
                "longest_sequence": stage["longest_sequence"],
                "tokens_per_second": round(stage["measured"]["tokens_per_second"]),
                "mfu": stage["measured"]["mfu"] and round(stage["measured"]["mfu"], 4),
                "components_gb": {key: round(value, 3) for key, value in stage["memory_gb"].items()},
            }
        )
    return rows


def at_longest(recipe: Recipe, number: int, length: int) -> Recipe:
    """The recipe with one stage, its rows as long as the plan says will fit."""
    changes = {"sequence_length": length, "micro_batch": 1, "batch_tokens": length, "tokens": 100 * length}
    return recipe.model_copy(update={"stages": [recipe.stages[number].model_copy(update=changes)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model whose config is used; default: the recipe's")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--longest", action="store_true", help="also run the longest rows said to fit")
    parser.add_argument("--out", type=out_file)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found: dict = {**provenance(), "device": device, "stages": []}
    for name in arguments.recipes:
        model = [f"model={arguments.model}"] if arguments.model else []
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [*model, *DATA])
        started = time.perf_counter()
        rows = compare(recipe, name)
        if arguments.longest:
            rows += [
                {**row, "stage": f"{rows[number]['stage']} at {rows[number]['longest_sequence']} tokens"}
                for number in range(len(recipe.stages))
                for row in compare(at_longest(recipe, number, rows[number]["longest_sequence"]), name)
            ]
        found["stages"] += rows
        for row in rows:
            print(
                f"{row['recipe']:22} {row['stage']:28} planned {row['planned_gb']:6.2f} GB  measured "
                f"{row['measured_gb']:6.2f} GB  ratio {row['ratio']:.3f}  longest {row['longest_sequence']:,}  "
                f"{row['tokens_per_second']:,} tok/s",
                flush=True,
            )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
