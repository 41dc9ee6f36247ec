"""The teacher of a stage: the original that a converted model came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import PartialState

from retrofox.anatomy import causal_lm, is_new_tensor
from retrofox.config import Recipe, Stage, TaughtStage
from retrofox.conversion.convert import convert
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.device import PRECISIONS
from retrofox.loading.source import read_config
from retrofox.training import checkpoint
from retrofox.training.model import load_any

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Config fields in which a teacher and its pupil must agree."""


def teacher_for(recipe: Recipe, stage: Stage, model: Any, source: Path, state: PartialState) -> Any:
    """The original to learn from: None where the trained model's own frozen weights are the original.

    Raises:
        ValueError: teacher shared while pretrained tensors are trained, or no longer the original's; the original
            is needed and is not named, not there or another model by now.
    """
    if not needs_teacher(recipe, stage, model, source):
        return None
    dtype = PRECISIONS[recipe.precision]
    spec = named_original(source)
    if spec is None:
        teacher = load_any(recipe, source, dtype)
    else:
        assert spec.base is not None
        if state.is_main_process:
            print(f"{changed_since_conversion(source)}: the teacher is {spec.base}", flush=True)
        base, _ = load_base(spec.base, dtype=dtype, revision=spec.base_revision)
        now, then = causal_lm(base).config, causal_lm(model).config
        for key in SHAPE:
            if getattr(now, key, None) != getattr(then, key, None):
                raise ValueError(
                    f"{spec.base} is not the original of {source}: its {key} is {getattr(now, key, None)}, not "
                    f"{getattr(then, key, None)}. Set fox.base in {source}/config.json to where the original is now"
                )
        teacher = convert(base, fox=spec)
    return teacher.to(state.device).requires_grad_(False).eval()


def needs_teacher(recipe: Recipe, stage: Stage, model: Any, source: Path | None = None) -> bool:
    """Whether a stage needs the original as a second model, beside the one it trains.

    Args:
        model: with requires_grad set as the stage trains it.
        source: the checkpoint the run starts from; None: a conversion of the recipe's model.

    Raises:
        ValueError: teacher shared, but the original is not among the trained model's weights.
    """
    if not isinstance(stage, TaughtStage):
        return False
    moved = [n for n, p in model.named_parameters() if p.requires_grad and not is_new_tensor(n) and "lora_" not in n]
    reasons = [f"this stage trains {moved[0]}: set rates.attention and rates.rest to 0"] if moved else []
    earlier = recipe.stages[: next(i for i, other in enumerate(recipe.stages) if other is stage)]
    moving = [s for s in earlier if s.objective != "adapt" and (s.rate("attention") > 0 or s.rate("rest") > 0)]
    if recipe.lora is None and moving:
        reasons.append("an earlier stage trains pretrained tensors: set its rates.attention and rates.rest to 0")
    changed = None if source is None else changed_since_conversion(source)
    if changed is not None:
        reasons.append(changed)
    if stage.teacher == "shared" and reasons:
        raise ValueError(f"teacher: shared needs the original's weights untouched, but {reasons[0]}, or teacher: copy")
    return bool(reasons) or stage.teacher == "copy"


def named_original(source: Path) -> FoxSpec | None:
    """The spec, with `base`, of a checkpoint that is not its original any more; None where its own tensors still are.

    Raises:
        ValueError: the original is needed, and the checkpoint names none or one that is not there.
    """
    changed = changed_since_conversion(source)
    if changed is None:
        return None
    spec = FoxSpec.from_dict(read_config(str(source))["fox"])
    if spec.base is None:
        raise ValueError(f"{changed}, so its base model must teach it, and {source} names none (fox.base)")
    try:
        if not spec.base.endswith(".gguf"):
            read_config(spec.base, spec.base_revision)
    except OSError as error:
        raise ValueError(f"{changed}, so its base model must teach it: {error}") from error
    return spec


def changed_since_conversion(source: Path) -> str | None:
    """Why a converted checkpoint's pretrained tensors are not its base's any more, or None where nothing says so."""
    directory = Path(source)
    if not (directory / "config.json").is_file() and not (directory / checkpoint.MARKER).is_file():
        return None
    if (directory / "config.json").is_file():
        config = read_config(str(directory))
        if not config.get("model_type", "").startswith("fox_"):
            return None  # unconverted: its weights are the original
        if config.get("queries_refitted"):
            return f"calibration rewrote the query projections of {directory}"
    if (directory / "retrofox.json").is_file():
        report = json.loads((directory / "retrofox.json").read_text(encoding="utf-8"))
        if report.get("merged"):
            return f"an adapter was merged into {directory}"
        rewritten = (report.get("calibration") or {}).get("rewritten")
        if rewritten:
            return f"calibration rewrote {len(rewritten)} query projections of {directory}"
    if (directory / checkpoint.MARKER).is_file():
        note = checkpoint.note_of(directory)
        trained = note.get("recipe")
        if trained is not None and trained["lora"] is None:
            until = note.get("stage", len(trained["stages"])) + 1  # later stages have not run when this was written
            rates = [stage["rates"] for stage in trained["stages"][:until] if stage["objective"] != "adapt"]
            if any(rate["attention"] or rate["rest"] for rate in rates):
                return f"training moved the pretrained tensors of {directory}"
    return None
