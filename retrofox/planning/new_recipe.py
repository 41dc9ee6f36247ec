"""A recipe for a model, a length and a machine: whole weights where they fit, else adapters, else a 4-bit base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from retrofox.config import Recipe, validate
from retrofox.config.yaml_text import write_yaml
from retrofox.config_values import depends_on_length, trained_length
from retrofox.loading.source import check_source
from retrofox.planning.hardware import Hardware
from retrofox.planning.hours import hours_of
from retrofox.planning.known import config_of
from retrofox.planning.memory import cpu_memory, memory
from retrofox.planning.plan import SWITCHES, changes_that_fit, longest_row
from retrofox.planning.shape import Shape, shape_of
from retrofox.planning.steps import count_steps
from retrofox.support.counts import size

STEP_TOKENS = 1 << 16
"""Tokens of an optimizer step, or a row on each GPU where that is more."""
STEPS = 306
"""20M tokens in steps of 64Ki."""
ROWS = 1 << 15
"""Tokens of a micro-batch: shorter rows go together."""
FULL_RATES = ((0.3e9, 3e-4), (2e9, 5e-5), (float("inf"), 2e-5))
LORA_RATES = ((0.3e9, 1e-3), (float("inf"), 2e-4))
"""(parameters up to which, learning rate): those of the shipped recipes; beyond SmolLM2-135M not tried."""
MARGIN = 0.92
"""Share of a device's memory that a new recipe may take: plans differ from measured peaks by a few percent."""
GATES = {"init": "measured", "half_life": [16, 384], "max_half_life": 512, "gate_heads": "kv", "horizon": 8}
OPEN_SHARE = 0.1
"""Share of the kv heads that start open. Both as in smollm2-stretch."""
BOOKS, HELD_OUT = "hf:emozilla/pg19:train[:400]", "hf:emozilla/pg19:validation[:20]"


class FittingRecipe(NamedTuple):
    """A recipe that fits, as plain values and read, how its weights are split, and why it was chosen."""

    values: dict[str, Any]
    recipe: Recipe
    sharding: str
    why: str


def new_recipe(model: str, length: int, on: Hardware, gpus: int = 1, *, adapters: bool = False) -> str:
    """The text of a recipe that fits the machine, with the choice in comments.

    Args:
        adapters: also where whole weights would fit.

    Raises:
        FileNotFoundError: no such model.
        ValueError: no recipe fits; the text says which length would. A converted or quantised model.
    """
    config = config_of(model)
    check_source(model, config)
    trained = trained_length(config)
    plain = shape_of(config, None)
    heads = plain.layers * plain.kv_heads
    open_heads = max(1, round(OPEN_SHARE * heads))
    reach = length if depends_on_length(config) else max(8 * trained, length)
    values = _values(model, length, reach, trained, open_heads, gpus)
    share = min(0.95, max(0.2, round(2 * open_heads / heads, 2)))  # of two kv heads the open one alone is half
    values["stages"][0]["budget"] = {"share": share, "length": 32768}
    shape = shape_of(config, validate(values).fox)
    on = on._replace(gpus=gpus)
    room = on._replace(memory=MARGIN * on.memory)
    fitting = next(_fitting_recipes(values, shape, room, adapters), None)
    if fitting is None:
        smallest = validate({**values, "lora": {"rank": 16, "quantize": "nf4"}})
        stage = smallest.stages[0].model_copy(update=SWITCHES)
        longest = longest_row(shape, smallest, stage, room)
        way = f"give --length {longest} or less" if longest else "take a larger GPU"
        raise ValueError(
            f"rows of {length:,} tokens of {model} fit {gpus} x {on.name} ({size(on.memory)}) in no way, not with a "
            f"4-bit base and every switch: {way}"
        )
    return _text(fitting, shape, on._replace(sharding=fitting.sharding))


def _values(model: str, length: int, reach: int, trained: int, open_heads: int, gpus: int) -> dict[str, Any]:
    batch = max(STEP_TOKENS, length * gpus) // (length * gpus) * length * gpus
    skips = {"max_position": reach} if reach > length else {}
    stage = {
        "objective": "extend",
        "tokens": STEPS * batch,
        "sequence_length": length,
        **skips,
        "batch_tokens": batch,
        "micro_batch": max(1, min(batch // (length * gpus), ROWS // length)),
        "schedule": "linear",
        "warmup_tokens": 10 * batch,
    }
    return {
        "model": model,
        "output": f"runs/{model.rstrip('/').rsplit('/', 1)[-1].lower()}",
        "fox": {"rope": "interpolate", "rope_factor": -(-reach // trained), **GATES, "open_heads": open_heads},
        "data": {"fact_share": 0.7, "questions": 0.5, "train": [BOOKS], "eval": [HELD_OUT]},
        "stages": [stage],
        "dataloader_workers": 4,
        "checkpoint": {"every_tokens": STEPS * batch // 2},
    }


def _fitting_recipes(values: dict[str, Any], shape: Shape, on: Hardware, adapters: bool) -> Iterator[FittingRecipe]:
    """Recipes that fit, the best first."""
    ways: list[tuple[dict[str, Any] | None, str, str]] = []
    if not adapters:
        ways.append((None, "ddp", "whole weights fit"))
    if not adapters and on.gpus > 1:
        ways.append((None, "fsdp2", "whole weights fit, split over the GPUs by FSDP2"))
    first = "adapters on a bfloat16 base fit" + ("" if adapters else ", whole weights don't")
    ways.append(({"rank": 16}, "ddp", first))
    ways.append(({"rank": 16, "quantize": "nf4"}, "ddp", "adapters on a 4-bit base fit, on a bfloat16 one they don't"))
    for lora, sharding, why in ways:
        rates = FULL_RATES if lora is None else LORA_RATES
        rate = next(rate for most, rate in rates if shape.parameters <= most)
        stage = {**values["stages"][0], "learning_rate": rate, "rates": {"gate_bias": 1e-3, "gate_weight": 1e-3}}
        adapted = values if lora is None else {**values, "lora": lora}
        recipe = validate({**adapted, "stages": [stage]})
        changes = changes_that_fit(shape, recipe, recipe.stages[0], on._replace(sharding=sharding))
        if changes is None:
            continue
        chosen = {**adapted, "stages": [{**stage, **changes}]}
        yield FittingRecipe(chosen, validate(chosen), sharding, why)


def _text(fitting: FittingRecipe, shape: Shape, on: Hardware) -> str:
    recipe, stage = fitting.recipe, fitting.recipe.stages[0]
    needed = sum(memory(shape, recipe, stage, on).values())
    moved = sum(cpu_memory(shape, recipe, stage, on).values())
    beside = f" and {moved / 1e9:.1f} GB of CPU memory" if moved else ""
    hours, file = "unknown", "for this device"
    if found := hours_of(shape, recipe.lora, stage, stage.tokens, on):
        hours = f"{found.low:.1f} to {found.high:.1f} hours"
        file = f"by the shares of the peak in benchmarks/{found.file}"
    launch = f"accelerate launch --config_file recipes/accelerate/{on.sharding}.yaml --num_processes {on.gpus}"
    several = f"; {launch} -m retrofox train RECIPE" if on.gpus > 1 else ""
    length, kind = stage.sequence_length, "whole weights" if recipe.lora is None else "LoRA"
    comment = f"""\
# {recipe.model} with stretched rotary pairs, forget gates and a horizon, rows of {length:,} tokens, {kind}.
# Put your own texts in place of the books, such as train: [books/], and your own output.
#
# short:    gates, horizon, stretched RoPE to {length // 1024}k, {kind} | \
{on.gpus} x {on.memory / 1e9:.0f} GB | {hours} (computed)
# hardware: {on.gpus} x {on.name}{several}
# tokens:   {stage.tokens:,} in {count_steps(stage, stage.batch_tokens or 1)} steps
# time:     not run here: {hours} {file}
# result:   not run here. {fitting.why}: {needed / 1e9:.1f} GB of {on.memory / 1e9:.0f}{beside} by `retrofox plan`
"""
    return comment + write_yaml(fitting.values)
