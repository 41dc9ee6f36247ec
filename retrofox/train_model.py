"""The model a stage trains: converted first where the recipe says so, float32 master weights, adapters, teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from retrofox import checkpoint
from retrofox.config import Recipe, Stage
from retrofox.families import causal_lm
from retrofox.loading import load_base
from retrofox.model.configuration_fox import FoxSpec
from retrofox.source import refuse_adapter
from retrofox.surgery import convert, is_new_tensor, load, read_config

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What a teacher's config shares with its pupil's."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_source(recipe: Recipe, out: Path, state: PartialState) -> Path:
    """The checkpoint training starts from: the recipe's model, or OUTPUT/converted, made now if it is not there.

    Raises:
        ValueError: `fox:` with a model that is already converted; an adapter.
        FileNotFoundError: no such model.
    """
    refuse_adapter(recipe.model)
    is_gguf = recipe.model.endswith(".gguf")
    model_type = "" if is_gguf else read_config(recipe.model).get("model_type", "")
    if recipe.fox is None:
        return Path(recipe.model)
    if model_type.startswith("fox_"):
        raise ValueError(
            f"{recipe.model} is already converted ({model_type}): remove `fox:` from the recipe, or give its base model"
        )
    converted = out / "converted"
    if state.is_main_process and not (converted / "config.json").is_file():
        print(f"converting {recipe.model} into {converted}", flush=True)
        # The texts that will be trained on are the ones to look at where the base's heads are measured.
        texts = [source.path for source in recipe.data.train] if recipe.fox.init == "calibrated" else []
        convert(recipe.model, converted, fox=recipe.fox, calibrate=texts)
    state.wait_for_everyone()
    return converted


def build_model(recipe: Recipe, source: Path, state: PartialState) -> Any:
    """The model to train, on the CPU in float32 (frozen bases of LoRA in the recipe's precision), adapters added."""
    if recipe.lora is not None:
        from retrofox.lora import adapted

        torch.manual_seed(recipe.seed)  # adapters start at random: alike in every run, whatever its processes
        return adapted(recipe, source, state)
    model = load_any(recipe, source, torch.float32)
    model.config.use_cache = False
    return model


def load_any(recipe: Recipe, source: Path, dtype: torch.dtype) -> Any:
    """A converted model through `retrofox.load`, a plain one with the recipe's `attention`."""
    if not str(source).endswith(".gguf") and read_config(str(source)).get("model_type", "").startswith("fox_"):
        if recipe.attention is not None:
            raise ValueError(f"{source} is converted and always runs Forgetting Attention: remove `attention`")
        return load(str(source), dtype=dtype)
    model, _ = load_base(str(source), dtype=dtype)
    set_attention(model, recipe)
    return model


def set_attention(model: Any, recipe: Recipe) -> None:
    """Runs an unconverted model with the recipe's `attention`.

    Raises:
        ValueError: no such attention, or it is not installed.
    """
    if recipe.attention is not None:
        if recipe.attention == "flex_attention" and not torch.cuda.is_available():
            raise ValueError("attention: flex_attention can't run here: it has no backward on a CPU")
        try:
            model.set_attn_implementation(recipe.attention)
        except (ImportError, ValueError) as error:
            raise ValueError(f"attention: {recipe.attention} can't run here: {error}") from None


def teacher_for(recipe: Recipe, stage: Stage, model: Any, source: Path, state: PartialState) -> Any:
    """The original to learn from: None where the trained model's own frozen weights are the original.

    Raises:
        ValueError: teacher shared while pretrained tensors are trained, or no longer the original's; the original
            is needed and is not named, not there or another model by now.
    """
    if not needs_teacher(recipe, stage, model, source):
        return None
    dtype = DTYPES[recipe.precision]
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


def lower_frozen(model: Any, recipe: Recipe) -> None:
    """The frozen base under adapters in the recipe's precision, as `adapted` loads it; gates and Pro parts float32."""
    if recipe.lora is None:
        return
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_new_tensor(name):
            parameter.data = parameter.data.to(DTYPES[recipe.precision])


def needs_teacher(recipe: Recipe, stage: Stage, model: Any, source: Path | None = None) -> bool:
    """Whether a stage needs the original as a second model, beside the one it trains.

    Args:
        model: with requires_grad set as the stage trains it.
        source: the checkpoint the run starts from; None: a conversion of the recipe's model.

    Raises:
        ValueError: teacher shared, but the original is not among the trained model's weights.
    """
    if stage.objective == "extend":
        return False
    moved = [n for n, p in model.named_parameters() if p.requires_grad and not is_new_tensor(n) and "lora_" not in n]
    reasons = [f"this stage trains {moved[0]}: set rates.attention and rates.rest to 0"] if moved else []
    earlier = recipe.stages[: next(i for i, other in enumerate(recipe.stages) if other is stage)]
    if recipe.lora is None and any(s.rate("attention") > 0 or s.rate("rest") > 0 for s in earlier):
        reasons.append("an earlier stage trains pretrained tensors: set its rates.attention and rates.rest to 0")
    if source is not None:
        changed = changed_since_conversion(source)
    else:
        calibrated = recipe.fox is not None and recipe.fox.init == "calibrated"
        changed = "calibration rewrites the query projections (fox.init: calibrated)" if calibrated else None
    if changed is not None:
        reasons.append(changed)
    if stage.teacher == "shared" and reasons:
        raise ValueError(f"teacher: shared needs the original's weights untouched, but {reasons[0]}, or teacher: copy")
    return bool(reasons) or stage.teacher == "copy"


def require_own_original(model: Any) -> None:
    """Refuses a converted model that can't be its own original in attention mode "original", adapters off.

    Raises:
        ValueError: it is not converted; a refit, a merge or training changed its pretrained tensors; or they are
            about to be trained.
    """
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    moved = next(
        (n for n, p in model.named_parameters() if p.requires_grad and not is_new_tensor(n) and "lora_" not in n), None
    )
    if not lm.config.model_type.startswith("fox_"):
        reason = f"a {lm.config.model_type} model has no gates: convert it first"
    elif getattr(lm.config, "queries_refitted", False):
        reason = "calibration rewrote its query projections"
    elif moved is not None:
        reason = f"{moved} is trained (requires_grad)"
    else:
        reason = changed_since_conversion(Path(lm.config._name_or_path)) if lm.config._name_or_path else None
    if reason is not None:
        raise ValueError(f"the model can't be its own teacher: {reason}. Give the original as `teacher`")


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
            return None  # a plain model is what a conversion of it starts from, whatever it went through before
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
            rates = [stage["rates"] for stage in trained["stages"][:until]]
            if any(rate["attention"] or rate["rest"] for rate in rates):
                return f"training moved the pretrained tensors of {directory}"
    return None
