"""Refusals of `train` before it writes anything; `plan --check` lists them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer
from transformers.training_args import OptimizerNames

from retrofox.anatomy import attentions, causal_lm, is_converted
from retrofox.config import AlignStage, ExtendStage, Recipe, Source, Stage, TaughtStage
from retrofox.config_values import depends_on_length
from retrofox.conversion.own_gates import came_with_gates
from retrofox.data.packed import open_tokens
from retrofox.data.shards import Manifest, check_cache
from retrofox.data.sources import resolve
from retrofox.loading.errors import first_line
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.parallel.layout import refuse_sharing, split_of
from retrofox.parallel.shards import check_length
from retrofox.planning.refusals import refuse_budget, refused_on
from retrofox.support.processes import shards_weights
from retrofox.support.report import check_folder
from retrofox.training.chunked_loss import choose_cross_entropy
from retrofox.training.model import built, set_attention, trained_config
from retrofox.training.model_tweaks import save_memory
from retrofox.training.param_groups import set_trainable
from retrofox.training.run_directory import batches_of, refuse_among, refuse_mingling
from retrofox.training.self_chat import turns_around_user
from retrofox.training.teacher import named_original, needs_teacher


def preflight(recipe: Recipe, devices: int, device: torch.device) -> list[Exception]:
    """Checks everything that the recipe, its files and this machine decide; writes nothing.

    Returns:
        Refusals, in the order they were found; an empty list where the run can start.

    Raises:
        FileNotFoundError: no such model.
    """
    deepspeed = shards_weights("DEEPSPEED")
    texts = (*_launch(deepspeed), *_packages(recipe), *refused_on(recipe, devices, deepspeed))
    refusals: list[Exception] = [ValueError(text) for text in texts]

    def collect(check: Callable[..., Any], *arguments: Any, where: str = "") -> None:
        try:
            check(*arguments)
        except (ValueError, OSError) as error:
            refusals.append(type(error)(f"{where}{error}") if where else error)

    collect(refuse_optimizer, recipe.optim)
    collect(check_folder, recipe.output, "the run (`output`)")
    collect(check_cache, recipe.data.cache_dir)
    sources = [source.path for source in (*recipe.data.train, *recipe.data.eval)]
    collect(refuse_mingling, Path(recipe.output), recipe.model, sources)
    collect(refuse_among, recipe.data.cache_dir, sources, "data.cache")
    collect(batches_of, Path(recipe.output), recipe)
    model: Any = None
    try:
        config = trained_config(recipe)
        with torch.device("meta"):
            model = built(config, recipe.lora, recipe.model)
    except ValueError as error:
        refusals.append(error)
    for source in (*recipe.data.train, *recipe.data.eval):
        if not _is_on_the_hub(source):
            collect(resolve, source)
    collect(refuse_tokenizer, recipe)
    if model is not None:
        for number, stage in enumerate(recipe.stages):
            collect(refuse_stage, recipe, stage, model, device, where=f"stages.{number}: ")
    return refusals


def _launch(deepspeed: bool) -> Iterator[str]:
    """Settings of accelerate that would round or lose the gates, or fail only after the model is loaded."""

    def told(name: str, default: str) -> str:
        return os.environ.get(name, default).lower()

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
    if deepspeed and told("ACCELERATE_MIXED_PRECISION", "no") != "no":
        yield (
            "DeepSpeed's 16-bit engines round the forget gates: set mixed_precision: 'no' in the accelerate config "
            "(recipes/accelerate/zero3.yaml); the recipe's `precision` says what products run in"
        )


def _packages(recipe: Recipe) -> Iterator[str]:
    """Packages that the recipe needs and that are not installed."""
    lora, data = recipe.lora, recipe.data
    needed = [(f"log.report_to: {name}", name, "pip install '.[track]' in a clone") for name in recipe.log.report_to]
    if lora is not None and lora.quantize:
        needed.append((f"lora.quantize: {lora.quantize}", "bitsandbytes", "pip install bitsandbytes"))
    if any(_is_on_the_hub(source) for source in (*data.train, *data.eval)):
        needed.append(("data: hf:", "datasets", "pip install '.[data]' in a clone"))
    for key, package, install in needed:
        if importlib.util.find_spec(package) is None:
            yield f"{key} needs the package {package}: {install}, or leave it out"


def refuse_optimizer(name: str) -> None:
    """Raises ValueError for an optimizer that transformers lacks, or its package, or that makes its own groups."""
    if OptimizerNames(name).startswith(("adalomo", "apollo", "galore", "lomo")):
        raise ValueError(
            f"optim: {name} makes its own parameter groups, so rates by role would be lost: choose another"
        )
    given: Any = SimpleNamespace(optim=name, optim_args=None, learning_rate=0.0, adam_epsilon=1e-8)
    given.adam_beta1 = given.adam_beta2 = 0.9
    try:
        Trainer.get_optimizer_cls_and_kwargs(given)
    except (ImportError, ValueError) as error:
        raise ValueError(f"optim: {name}: {first_line(error)}") from error


def refuse_tokenizer(recipe: Recipe) -> None:
    """Raises ValueError where there is no tokenizer, or `data.self_chat` needs a chat template that it lacks."""
    tokenizer = recipe_tokenizer(recipe.data.tokenizer, recipe.model)
    if recipe.data.self_chat:
        turns_around_user(tokenizer)


def _is_on_the_hub(source: Source) -> bool:
    """Whether "hf:org/name[:config][:split]" names a dataset of the Hub: "hf:/..." and "hf:./..." are directories."""
    scheme, _, name = source.path.partition(":")
    return scheme == "hf" and not Path(name).is_dir() and not name.startswith(("/", "~", "."))


def refuse_tokens(manifest: Manifest, tokenizer: Any, vocabulary: int) -> None:
    """Raises ValueError for prepared texts that hold a token beyond the model's embedding."""
    if max(tokenizer.get_vocab().values()) < vocabulary:
        return
    for tokens in open_tokens(manifest):
        parts = zip(tokens.firsts.tolist(), tokens.shards, strict=False)
        largest = max(int(tokens.slice(first, shard.tokens)[0].max()) for first, shard in parts)
        if largest >= vocabulary:
            raise ValueError(
                f"{tokens.source.path} holds the token {tokenizer.convert_ids_to_tokens(largest)!r}, number {largest}, "
                f"and the model embeds {vocabulary}: set data.tokenizer to the model's own, or take it out of the text"
            )


def refuse_stage(recipe: Recipe, stage: Stage, model: Any, device: torch.device) -> None:
    """Raises ValueError for a stage that this model (on the meta device), or this machine, can't run."""
    config = causal_lm(model).config
    set_attention(model, recipe)
    if isinstance(stage, ExtendStage) and stage.max_position is not None:
        refuse_positions(model)
    taught = isinstance(stage, TaughtStage)
    if isinstance(stage, AlignStage) and not is_converted(model):
        raise ValueError("align compares a retrofit's attention with its original's: give `fox:` to the recipe")
    changed = is_converted(model) or recipe.rope_scaling is not None or recipe.rope_theta is not None
    if taught and not changed and stage is recipe.stages[0]:
        raise ValueError("distill: the model would learn from itself: give `fox:`, rope_scaling or rope_theta")
    if stage.objective != "extend" and came_with_gates(config):
        raise ValueError(
            f"{stage.objective} needs an original without gates, and {recipe.model} came with them: take extend"
        )
    split = split_of(recipe.parallel, config)
    refuse_sharing(model, split)
    check_length(stage.sequence_length, split)
    set_trainable(model, stage, adapters=recipe.lora is not None)
    refuse_budget(stage, config)
    if needs_teacher(recipe, stage, Path(recipe.model)):
        named_original(Path(recipe.model))
    save_memory(model, stage)
    if not taught:
        choose_cross_entropy(stage.cross_entropy, model, device)


def refuse_positions(model: Any) -> None:
    """Raises ValueError where skipped positions would change nothing, or the RoPE of other documents too."""
    gone = is_converted(model) and all(x.rotary_fade is None or x.rotary_fade.gone for _, x in attentions(model))
    if gone and causal_lm(model).config.fox["log_n"] is None:
        raise ValueError("max_position trains RoPE at distances, and this model has no RoPE: remove it")
    if not gone and depends_on_length(causal_lm(model).config):
        raise ValueError(
            "max_position would change all documents read beside one that skips: this model's RoPE (dynamic or "
            "longrope) takes its frequencies from the largest position. Remove it, or take another type"
        )
