"""What `train` refuses before anything is written, and `plan --check` lists; what it refuses of a stage's model."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from retrofox.anatomy import attentions, causal_lm, is_converted
from retrofox.config import ExtendStage, Recipe, Source, Stage, TaughtStage
from retrofox.data.packed import open_tokens
from retrofox.data.shards import Manifest
from retrofox.data.sources import resolve
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.parallel.settings import readers_of, refuse_processes, refuse_sharing, split_of
from retrofox.parallel.shards import check_length
from retrofox.planning.hardware import Hardware
from retrofox.planning.memory import Setting, cpu_memory, memory
from retrofox.planning.plan import advice, launched_sharding
from retrofox.planning.shape import known_shape
from retrofox.planning.steps import accumulation, tokens_per_step
from retrofox.support.counts import size
from retrofox.support.launches import shards_weights
from retrofox.training.chunked_loss import choose_cross_entropy
from retrofox.training.document_attention import refuse_document_attention
from retrofox.training.model import empty, set_attention, starts_from, trained_config
from retrofox.training.model_tweaks import save_memory
from retrofox.training.optimizer_state import offloaded
from retrofox.training.param_groups import role_of, set_trainable
from retrofox.training.run_directory import batches_of, refuse_mingling
from retrofox.training.teacher import changed_since_conversion, named_original, needs_teacher


def preflight(recipe: Recipe, devices: int, device: torch.device) -> list[Exception]:
    """Checks everything that the recipe, its files and this machine decide; writes nothing.

    Returns:
        Refusals, in the order they were found; an empty list where the run can start.

    Raises:
        FileNotFoundError: no such model.
    """
    refusals: list[Exception] = [ValueError(text) for text in (*_launch(recipe), *_packages(recipe))]

    def collect(check: Callable[..., Any], *arguments: Any, where: str = "") -> None:
        try:
            check(*arguments)
        except (ValueError, OSError) as error:
            refusals.append(type(error)(f"{where}{error}") if where else error)

    if recipe.precision == "fp16" and device.type != "cuda":
        refusals.append(ValueError("precision fp16 needs a GPU: use bf16 or fp32 on a CPU"))
    collect(refuse_processes, recipe.parallel, devices)
    collect(refuse_optimizer, recipe)
    collect(refuse_mingling, recipe)
    collect(batches_of, Path(recipe.output), recipe)
    readers = readers_of(recipe.parallel, devices)
    for number, stage in enumerate(recipe.stages):
        collect(accumulation, stage, tokens_per_step(stage, readers), readers, where=f"stages.{number}: ")
    config = None
    try:
        config = trained_config(recipe)
        empty(config, recipe)
    except ValueError as error:
        refusals.append(error)
        config = None
    for source in (*recipe.data.train, *recipe.data.eval):
        collect(refuse_source, source)
    collect(lambda: refuse_tokenizer(recipe_tokenizer(recipe), getattr(config, "vocab_size", None)))
    if config is not None:
        for number, stage in enumerate(recipe.stages):
            collect(_refuse_beforehand, recipe, stage, config, devices, device, where=f"stages.{number}: ")
    return refusals


def _launch(recipe: Recipe) -> Iterator[str]:
    """What accelerate was told that would round or lose the gates, or fail only once the model is there."""

    def told(name: str, default: str) -> str:
        return os.environ.get(name, default).lower()

    deepspeed = shards_weights("DEEPSPEED")
    for kind, short in (("context", "CP"), ("sequence", "SP"), ("tensor", "TP")):
        name = f"PARALLELISM_CONFIG_{short}_SIZE"
        if int(told(name, "1")) > 1:
            yield (
                f"accelerate's {kind} parallelism ({name}={told(name, '1')}) knows no forget gates, so attention would "
                "be silently wrong: leave it out. FSDP2 splits weights, `parallel: {context: N}` of the recipe rows"
            )
    if shards_weights("FSDP") and told("FSDP_VERSION", "1") != "2":
        yield "FSDP version 1 can't keep the forget gates in float32: set fsdp_version: 2"
    elif shards_weights("FSDP") and told("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "true":
        yield "set fsdp_cpu_ram_efficient_loading: false: it would leave the forget gates uninitialised"
    if told("ACCELERATE_DYNAMO_BACKEND", "no") != "no":
        yield (
            "accelerate's dynamo_backend compiles the whole model, whose forward is the stage's objective here: set "
            "dynamo_backend: 'no'; `compile: true` in a stage compiles its MLPs and norms"
        )
    if deepspeed and (recipe.precision == "fp16" or told("ACCELERATE_MIXED_PRECISION", "no") != "no"):
        yield (
            "DeepSpeed's 16-bit engines round the forget gates: set mixed_precision: 'no' in the accelerate config "
            "(recipes/accelerate/zero3.yaml), and `precision` in the recipe to bf16 or fp32"
        )
    if deepspeed and recipe.parallel.context > 1:
        yield "parallel.context runs with DDP and FSDP2, not with DeepSpeed: take an FSDP2 config"
    if deepspeed and any(stage.tiled_mlp != "none" for stage in recipe.stages):
        yield "tiled_mlp runs with DDP and FSDP2, not with DeepSpeed: take an FSDP2 config"
    if shards_weights() and any(stage.offload_optimizer for stage in recipe.stages):
        yield (
            "offload_optimizer is for whole weights (one GPU, DDP); FSDP2 and DeepSpeed split the optimizer over the "
            "processes instead: set offload_optimizer: false"
        )


def _packages(recipe: Recipe) -> Iterator[str]:
    """Packages that the recipe needs and that are not installed."""
    needed = [(f"log.report_to: {name}", name, "pip install '.[track]' in a clone") for name in recipe.log.report_to]
    if recipe.lora is not None and recipe.lora.quantize:
        needed.append((f"lora.quantize: {recipe.lora.quantize}", "bitsandbytes", "pip install bitsandbytes"))
    if any(_is_on_the_hub(source) for source in (*recipe.data.train, *recipe.data.eval)):
        needed.append(("data: hf:", "datasets", "pip install '.[data]' in a clone"))
    for key, package, install in needed:
        if importlib.util.find_spec(package) is None:
            yield f"{key} needs the package {package}: {install}, or leave it out"


def refuse_optimizer(recipe: Recipe) -> None:
    """Raises ValueError for an optimizer that is unknown, not installed, or makes its own parameter groups.

    Also where a stage sets betas and the optimizer takes none, or offloads one whose state can't be moved.
    """
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

    # The settings' defaults without their __init__, which starts devices and processes: `plan` may have neither.
    settings: Any = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(TrainingArguments)})
    try:
        settings.optim = OptimizerNames(recipe.optim)
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    except (ImportError, ValueError) as error:
        raise ValueError(f"optim: {recipe.optim} can't be used: {error}") from None
    if options.keys() & {"params", "model", "optimizer_dict"} or not isinstance(cls, type):
        raise ValueError(
            f"optim: {recipe.optim} makes its own parameter groups, so rates by role would be lost: choose another, "
            "e.g. adamw_torch_fused"
        )
    for number, stage in enumerate(recipe.stages):
        if stage.betas != Stage.model_fields["betas"].default and "betas" not in options:
            raise ValueError(
                f"stages.{number}: betas {stage.betas} have no effect with optim {recipe.optim}: remove them, or take "
                "adamw_torch_fused"
            )
        if stage.offload_optimizer:
            offloaded(cls)


def _is_on_the_hub(source: Source) -> bool:
    """Whether "hf:org/name[:config][:split]" names a dataset of the Hub: "hf:/..." and "hf:./..." are directories."""
    scheme, _, name = source.path.partition(":")
    return scheme == "hf" and not Path(name).is_dir() and not name.startswith(("/", "~", "."))


def refuse_source(source: Source) -> None:
    """Raises ValueError or OSError for data that isn't there, or is 0 bytes; on the Hub it isn't looked for."""
    if not _is_on_the_hub(source) and not any(unit.size for unit in resolve(source)):
        raise ValueError(f"{source.path}: no text in it, it is empty: give texts")


def refuse_tokenizer(tokenizer: Any, vocabulary: int | None) -> None:
    """Raises ValueError for a tokenizer whose words, special tokens aside, are more than the model embeds.

    Special tokens beyond it are common (Gemma 3's picture token): a text must hold one to be refused.
    """
    if vocabulary is not None and tokenizer.vocab_size > vocabulary:
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


def _refuse_beforehand(recipe: Recipe, stage: Stage, config: Any, devices: int, device: torch.device) -> None:
    model = empty(config, recipe)
    if isinstance(stage, ExtendStage) and stage.max_position is not None:
        # Here only: annealing may have left no RoPE to a stage that resumes.
        refuse_positions(recipe, model, stage.max_position)
    set_attention(model, recipe)
    refuse_stage(recipe, stage, model, starts_from(recipe), device)
    _refuse_size(recipe, stage, config, devices, device)


def refuse_stage(recipe: Recipe, stage: Stage, model: Any, source: Path | None, device: torch.device) -> None:
    """Raises ValueError for a stage that this model, or this machine, can't run; leaves the model ready for it.

    Args:
        model: the one that is trained, on any device.
        source: the checkpoint the run starts from; None: a conversion of the recipe's model.
    """
    if isinstance(stage, TaughtStage) and not is_converted(model):
        raise ValueError(f"{stage.objective} compares a retrofit with its original: give `fox:` to the recipe")
    if stage.objective == "adapt":
        if not is_converted(model):
            raise ValueError("adapt trains the original of a retrofit: give `fox:`, or take objective extend")
        changed = None if source is None else changed_since_conversion(source)
        if changed is not None:
            raise ValueError(
                f"adapt trains the original, and {changed}: give its base model and `fox:`, or remove adapt"
            )
    split = split_of(recipe.parallel, causal_lm(model).config)
    refuse_sharing(model, split, "parallel.context")
    check_length(stage.sequence_length, split)
    trained = {role_of(name) for name in set_trainable(model, stage, adapters=recipe.lora is not None)}
    budget, gates = getattr(stage, "budget", None), trained & {"gate_bias", "gate_weight"}
    for key, idle in (
        ("gate_delay_tokens", stage.gate_delay_tokens and not gates),
        ("budget", budget is not None and not gates),
        ("gate_weight_decay", stage.gate_weight_decay and "gate_weight" not in gates),
    ):
        if idle:
            raise ValueError(f"{key} is for gates, and this stage trains none: remove it")
    if budget is not None and recipe.precision == "fp16":
        raise ValueError("budget adds to gradients, which fp16 scales: take precision bf16 or fp32")
    if needs_teacher(recipe, stage, model, source) and source is not None:
        named_original(source)
    save_memory(model, stage)
    if not isinstance(stage, TaughtStage):
        choose_cross_entropy(stage.cross_entropy, model, device)


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


def _refuse_size(recipe: Recipe, stage: Stage, config: Any, devices: int, device: torch.device) -> None:
    """Raises ValueError where a machine has less CPU memory than a stage's offloads, or all of it on a CPU, need.

    A GPU's allocator says so at the first step. A model whose shape isn't known in closed form is not refused.
    """
    shape, total = known_shape(config), psutil.virtual_memory().total
    if shape is None:
        return
    setting = Setting(devices, launched_sharding() or "ddp", cuda=device.type != "cpu")
    moved = devices * sum(cpu_memory(shape, recipe, stage, setting).values())
    if moved > total:
        raise ValueError(
            f"its offloads need {size(moved)} of CPU memory and this machine has {size(total)}: lower "
            f"sequence_length ({stage.sequence_length:,}), or set offload_activations: false"
        )
    needed = sum(memory(shape, recipe, stage, setting).values())
    if device.type == "cpu" and needed > total:
        change = advice(shape, recipe, stage, Hardware("CPU", total, None, gpu=False), setting)
        raise ValueError(f"it needs {size(needed)} and this machine has {size(total)}: {change}")
