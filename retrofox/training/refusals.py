"""What `train` refuses before anything runs, and `plan` names: parallelism, precision, trackers, data, OUTPUT."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from retrofox.anatomy import attentions, causal_lm, is_converted
from retrofox.config import BudgetedStage, Recipe, Source, Stage, TaughtStage
from retrofox.data.packed import open_tokens
from retrofox.data.shards import Manifest
from retrofox.data.sources import resolve
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.parallel.settings import context_of, refuse_dimensions, refuse_processes, refuse_sharing, split_of
from retrofox.planning.plan import launched_sharding
from retrofox.support.files import nearest_existing, why_unwritable
from retrofox.training.document_attention import refuse_document_attention
from retrofox.training.groups import role_of, set_trainable
from retrofox.training.objectives import choose_cross_entropy
from retrofox.training.optimizer_state import offloaded
from retrofox.training.output import batches_of, refuse_mingling
from retrofox.training.speed import save_memory
from retrofox.training.teacher import changed_since_conversion, named_original, needs_teacher


def refuse_parallelism() -> None:
    """Raises ValueError for options of an accelerate config that would lose the gates, or fail later."""
    variable = "PARALLELISM_CONFIG_SP_SIZE"
    if int(os.environ.get(variable, "1")) > 1:
        raise ValueError(
            f"sequence parallelism ({variable}={os.environ[variable]}) moves queries, keys and values but not the "
            "forget gates, so attention would be silently wrong: use cp_size, or `parallel: {context: N}` in the recipe"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if int(os.environ.get("FSDP_VERSION", "1")) != 2:
            raise ValueError("FSDP version 1 can't keep the forget gates in float32: set fsdp_version: 2")
        if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true":
            raise ValueError("set fsdp_cpu_ram_efficient_loading: false: it would leave the forget gates uninitialised")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise ValueError(
            "accelerate's dynamo_backend compiles the whole model, whose forward is the stage's objective here: set "
            "dynamo_backend: 'no'; `compile: true` in a stage compiles its MLPs and norms"
        )


def refuse_context(recipe: Recipe, processes: int) -> None:
    """Raises ValueError where these processes can't share rows as the recipe asks, whatever the model."""
    refuse_processes(recipe, processes)
    refuse_dimensions(processes)
    if deepspeed() and context_of(recipe) > 1:
        raise ValueError("parallel.context runs with DDP and FSDP2, not with DeepSpeed: take an FSDP2 config")


def refuse_precision(recipe: Recipe) -> None:
    """Raises ValueError for a precision the device can't run."""
    if deepspeed() and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        raise ValueError(
            "DeepSpeed's 16-bit engines round the forget gates: set mixed_precision: 'no' in the accelerate config "
            "(recipes/accelerate/zero3.yaml); the recipe's `precision` says what products run in"
        )
    if recipe.precision == "fp16" and deepspeed():
        raise ValueError("precision fp16 under DeepSpeed would round the forget gates to 16 bits: use bf16 or fp32")
    if recipe.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("precision fp16 needs a GPU: use bf16 or fp32 on a CPU")
    if recipe.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16: use precision fp16 or fp32")


def deepspeed() -> bool:
    """Whether accelerate launched this process for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def own_autocast(recipe: Recipe) -> bool:
    """Whether bfloat16 products are ours to ask for: DeepSpeed's bfloat16 engine would round the forget gates, too."""
    return recipe.precision == "bf16" and deepspeed()


def refuse_quantization(recipe: Recipe) -> None:
    """Raises ValueError for a 4-bit base without the package that makes it."""
    if recipe.lora is not None and recipe.lora.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"lora.quantize: {recipe.lora.quantize} needs bitsandbytes: pip install bitsandbytes, or quantize: null"
        )


def refuse_log(recipe: Recipe) -> None:
    """Raises ValueError for a tracker that is not installed, and for heads whose weights no process holds whole."""
    if recipe.log.heads_every is not None and (deepspeed() or launched_sharding()):
        raise ValueError("log.heads_every reads whole weights, which FSDP and DeepSpeed split: leave it out")
    for name in recipe.log.report_to:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.report_to: {name} needs {name} installed: pip install '.[track]' in a clone, or remove it"
            )


def refuse_optimizer(recipe: Recipe) -> None:
    """Raises ValueError for an optimizer that is unknown, not installed, or makes its own parameter groups.

    Also where a stage sets betas and the optimizer takes none.
    """
    _, options = _optimizer(recipe.optim)
    usual = Stage.model_fields["betas"].default
    for number, stage in enumerate(recipe.stages):
        if stage.betas != usual and "betas" not in options:
            raise ValueError(
                f"stages.{number}: betas {stage.betas} have no effect with optim {recipe.optim}: remove them, or take "
                "adamw_torch_fused"
            )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of an optimizer of transformers' TrainingArguments; refuses one that can't be used."""
    return _optimizer(name)[0]


def _optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of an optimizer and the options that it is given."""
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

    # The settings' defaults without their __init__, which starts devices and processes: `plan` may have neither.
    settings: Any = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(TrainingArguments)})
    try:
        settings.optim = OptimizerNames(name)
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    except (ImportError, ValueError) as error:
        raise ValueError(f"optim: {name} can't be used: {error}") from None
    own = [key for key in ("params", "model", "optimizer_dict") if key in options]
    if own or not isinstance(cls, type):
        raise ValueError(
            f"optim: {name} makes its own parameter groups, so rates by role would be lost: choose another, "
            "e.g. adamw_torch_fused"
        )
    return cls, options


def refuse_saving(recipe: Recipe, stage: Stage) -> None:
    """Raises ValueError for switches that save memory and that this launch, or the optimizer, has no place for."""
    if stage.tiled_mlp != "none" and deepspeed():
        raise ValueError("tiled_mlp runs with DDP and FSDP2, not with DeepSpeed: take an FSDP2 config")
    if not stage.offload_optimizer:
        return
    if deepspeed() or launched_sharding():
        raise ValueError(
            "offload_optimizer is for whole weights (one GPU, DDP); FSDP2 and DeepSpeed split the optimizer over the "
            "processes instead: set offload_optimizer: false"
        )
    offloaded(optimizer_class(recipe.optim))


def refuse_stage(recipe: Recipe, stage: Stage, model: Any, source: Path | None, device: torch.device) -> None:
    """Raises ValueError for a stage that this model, or this machine, can't run; leaves the model ready for it.

    Args:
        model: the one that is trained, on any device.
        source: the checkpoint the run starts from; None: a conversion of the recipe's model.
    """
    if isinstance(stage, TaughtStage) and not is_converted(model):
        raise ValueError(f"{stage.objective} compares a retrofit with its original: give `fox:` to the recipe")
    if stage.objective == "adapt":
        refuse_adapt(model, source)
    refuse_sharing(model, stage.sequence_length, split_of(recipe, causal_lm(model).config), "parallel.context")
    trained = set_trainable(model, stage, adapters=recipe.lora is not None)
    if stage.gate_delay_tokens and not any(role_of(name).startswith("gate") for name in trained):
        raise ValueError("gate_delay_tokens holds gates back, and this stage trains none: remove it")
    budget = stage.budget if isinstance(stage, BudgetedStage) else None
    if budget is not None and not any(role_of(name).startswith("gate") for name in trained):
        raise ValueError("budget presses on the gates, and this stage trains none: remove it")
    if budget is not None and recipe.precision == "fp16":
        raise ValueError("budget adds to gradients, which fp16 scales: take precision bf16 or fp32")
    if stage.gate_weight_decay and not any(role_of(name) == "gate_weight" for name in trained):
        raise ValueError("gate_weight_decay decays the gates' weights, and this stage trains none: remove it")
    if needs_teacher(recipe, stage, model, source) and source is not None:
        named_original(source)
    save_memory(model, stage)
    refuse_saving(recipe, stage)
    if not isinstance(stage, TaughtStage):
        choose_cross_entropy(stage.cross_entropy, model, device)


def refuse_adapt(model: Any, source: Path | None) -> None:
    """Raises ValueError where adapt would train anything but a retrofit's untouched original."""
    if not is_converted(model):
        raise ValueError("adapt trains the original of a retrofit: give `fox:` to the recipe, or take objective extend")
    changed = None if source is None else changed_since_conversion(source)
    if changed is not None:
        raise ValueError(f"adapt trains the original, and {changed}: give its base model and `fox:`, or remove adapt")


def refuse_positions(recipe: Recipe, model: Any, max_position: int) -> None:
    """Raises ValueError where skipped positions would split documents, change others' RoPE, or change nothing."""
    config, turns = causal_lm(model).config, True
    if is_converted(model):
        rotary = [attention.rotary_fade for _, attention in attentions(model) if attention.rotary_fade is not None]
        turns = not all(fade.gone for fade in rotary)
    else:
        refuse_document_attention(model, recipe.attention)
    if not turns and config.fox["log_n"] is None:
        raise ValueError(f"max_position: {max_position} changes nothing in a model without RoPE: remove it")
    if turns and depends_on_length(config):
        raise ValueError(
            f"max_position: {max_position} would change all documents read beside one that skips: this model's RoPE "
            "(dynamic or longrope) takes its frequencies from the largest position. Remove it, or take another type"
        )


def refuse_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """Raises ValueError for a tokenizer whose words, special tokens aside, are more than the model embeds.

    Special tokens beyond it are common (Gemma 3's picture token): a text must hold one to be refused.
    """
    if tokenizer.vocab_size > vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model embeds {vocabulary}: "
            "set data.tokenizer to the model's own"
        )


def refuse_tokens(manifest: Manifest, tokenizer: Any, vocabulary: int) -> None:
    """Raises ValueError for prepared texts that hold a token beyond the model's embedding."""
    if max(tokenizer.get_vocab().values()) < vocabulary:
        return
    for tokens in open_tokens(manifest):
        largest = max(int(shard.map(tokens.folder).max()) for shard in tokens.shards)
        if largest >= vocabulary:
            raise ValueError(
                f"{tokens.source.path} holds the token {tokenizer.convert_ids_to_tokens(largest)!r}, number {largest}, "
                f"and the model embeds {vocabulary}: set data.tokenizer to the model's own, or take it out of the text"
            )


def refuse_output(recipe: Recipe) -> None:
    """Raises ValueError for an OUTPUT that holds another run or can't be written to; writes nothing itself."""
    out = Path(recipe.output)
    refuse_mingling(recipe)
    batches_of(out, recipe)
    place = nearest_existing(out)
    if not place.is_dir():
        raise ValueError(f"can't write to {out}: {place} is a file; choose another `output`")
    reason = why_unwritable(place)
    if reason is not None:
        raise ValueError(f"can't write to {place} ({reason}); choose another `output`")


def _on_the_hub(reference: str) -> bool:
    """Whether "org/name[:config][:split]" names a dataset of the Hub: "/..." and "./..." are directories."""
    return not Path(reference).is_dir() and not reference.startswith(("/", "~", "."))


def _refuse_source(source: Source) -> None:
    """Raises ValueError or OSError for data that isn't there, or is 0 bytes; on the Hub it isn't looked for."""
    if not source.path.startswith("hf:") or not _on_the_hub(source.path[3:]):
        if not any(unit.size for unit in resolve(source)):
            raise ValueError(f"{source.path}: no text in it, it is empty: give texts")
    elif importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{source.path} needs the package datasets: pip install '.[data]' in a clone")


def refused_data(recipe: Recipe, vocabulary: int | None) -> list[Exception]:
    """Refusals before tokenising: sources that are not there, no tokenizer, one too large."""
    found: list[Exception] = []
    for source in (*recipe.data.train, *recipe.data.eval):
        try:
            _refuse_source(source)
        except (ValueError, OSError) as error:
            found.append(error)
    try:
        tokenizer = recipe_tokenizer(recipe)
        if vocabulary is not None:
            refuse_tokenizer(tokenizer, vocabulary)
    except (ValueError, OSError) as error:
        found.append(error)
    return found
