"""The teacher of a stage: the original that a converted model came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from retrofox.config import Recipe, Stage, TaughtStage
from retrofox.conversion.convert import convert
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.converted import load
from retrofox.loading.device import PRECISIONS
from retrofox.loading.source import holds_converted, read_config
from retrofox.planning.memory import has_teacher
from retrofox.training import checkpoint
from retrofox.training.model import set_attention


def teacher_for(recipe: Recipe, stage: Stage, source: Path, state: PartialState) -> Any:
    """The original to learn from, of an unconverted model that with its own RoPE.

    None where the trained model's own frozen weights are the original.

    Raises:
        ValueError: the original is needed and the checkpoint does not name it.
        FileNotFoundError: the original is not there.
    """
    if not needs_teacher(recipe, stage, source):
        return None
    dtype = PRECISIONS[recipe.precision]
    spec = named_original(source)
    teacher: Any
    if spec is None and holds_converted(str(source)):
        teacher = load(str(source), dtype=dtype)
    elif spec is None:  # an unconverted model, whose RoPE may be another since
        teacher, _ = load_base(str(source), dtype=dtype)
        set_attention(teacher, recipe)
    else:
        assert spec.base is not None
        if state.is_main_process:
            print(f"{changed_since_conversion(source)}: the teacher is {spec.base}", flush=True)
        base, _ = load_base(spec.base, dtype=dtype, revision=spec.base_revision)
        teacher = convert(base, fox=replace(spec, init="slopes"))  # "measured" would want texts; its gates stay out
    return teacher.to(state.device).requires_grad_(False).eval()


def needs_teacher(recipe: Recipe, stage: Stage, source: Path) -> bool:
    """Whether a stage of a run from `source` needs the original as a second model: its own weights are others now."""
    return has_teacher(recipe, stage) or (isinstance(stage, TaughtStage) and bool(changed_since_conversion(source)))


def named_original(source: Path) -> FoxSpec | None:
    """The spec, with `base`, of a checkpoint that is not its original any more; None where its own tensors still are.

    Raises:
        ValueError: the original is needed, and the checkpoint names none.
        FileNotFoundError: the one it names is not there.
    """
    changed = changed_since_conversion(source)
    if changed is None:
        return None
    spec = FoxSpec.from_dict(read_config(str(source))["fox"])
    if spec.base is None:
        raise ValueError(f"{changed}, so its base model must teach it, and {source} names none (fox.base)")
    if not spec.base.endswith(".gguf"):
        read_config(spec.base, spec.base_revision)
    return spec


def changed_since_conversion(source: Path) -> str | None:
    """Why a converted checkpoint's pretrained tensors are not its base's any more, or None where nothing says so."""
    there = (source / "config.json").is_file()
    if there and not read_config(str(source)).get("model_type", "").startswith("fox_"):
        return None  # unconverted: its weights are the original
    if (source / "retrofox.json").is_file():
        report = json.loads((source / "retrofox.json").read_text(encoding="utf-8"))
        if report.get("merged"):
            return f"an adapter was merged into {source}"
    if (source / checkpoint.MARKER).is_file():
        note = checkpoint.note_of(source)
        trained = note.get("recipe")
        if trained is not None and trained["lora"] is None:
            until = note.get("stage", len(trained["stages"])) + 1  # later stages have not run when this was written
            rates = [stage["rates"] for stage in trained["stages"][:until]]
            if any(rate["attention"] or rate["rest"] for rate in rates):
                return f"training moved the pretrained tensors of {source}"
    return None
