"""LoRA on the pretrained projections, gates and Pro parts trained in full beside them and saved in float32."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

import retrofox
from retrofox import checkpoint
from retrofox.config import LoraConfig, Recipe
from retrofox.fresh_python import fresh_python
from retrofox.interruptions import Interruptions
from retrofox.loading import load_tokenizer
from retrofox.model.gates import ForgetGate
from retrofox.model.modeling_fox import NEW_MODULES
from retrofox.shards import new_file_mode
from retrofox.surgery import is_new_tensor, lm_class, load, read_config

WEIGHTS = "adapter_model.safetensors"
PROBE_TOKENS = 64


def adapted(recipe: Recipe, source: Path, state: Any) -> Any:
    """A converted model with adapters: a fresh one, or the one in `source` if that is an adapter directory.

    Raises:
        ValueError: the base is not converted, a target names no linear layer, quantize without bitsandbytes or a GPU.
    """
    assert recipe.lora is not None
    if (source / "adapter_config.json").is_file():
        return with_adapter(_base(recipe, base_of(source), state), source, trainable=True)
    # An absolute path: the adapter must find its base from any directory.
    where = str(source.resolve()) if source.is_dir() else str(source)
    return add_adapters(_base(recipe, where, state), recipe.lora, where)


def with_adapter(base: Any, adapter: Path, trainable: bool = False) -> Any:
    """A converted model with the adapter of a directory, gates and Pro parts in float32.

    Raises:
        ValueError: the adapter's file is missing or damaged, lacks gates of the base, or is another base's.
    """
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            names = {name.removeprefix("base_model.model.") for name in file.keys()}  # noqa: SIM118, not a dict
        lacking = [name for name, _ in base.named_parameters() if is_new_tensor(name) and name not in names]
        if lacking:
            raise ValueError(f"{adapter / WEIGHTS} lacks {lacking[0]}: it was not saved by `retrofox train`")
        with _peft_is_behind():
            return _float32_parts(PeftModel.from_pretrained(base, str(adapter), is_trainable=trainable))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{adapter / WEIGHTS} can't be read: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{adapter} does not fit its base, {base.config._name_or_path}: {error}") from error


def add_adapters(base: Any, lora: LoraConfig, source: str) -> Any:
    """A converted model with fresh adapters on its projections, its gates and Pro parts trained in full."""
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=target_modules(base, lora),
        modules_to_save=new_modules(base),
    )
    with _peft_is_behind():
        model: Any = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = source
    return _float32_parts(model)


@contextlib.contextmanager
def _peft_is_behind() -> Iterator[None]:
    """peft 0.21 calls transformers 5.23 by a deprecated name, about which a user can do nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def _base(recipe: Recipe, source: str, state: Any) -> Any:
    refuse_plain_base(source)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[recipe.precision]
    assert recipe.lora is not None
    if recipe.lora.quantize is None:
        model = load(source, dtype=dtype)
    else:
        model = _quantized(source, dtype, state)
    model.config.use_cache = False
    model.config._name_or_path = source
    return model


def _quantized(source: str, dtype: torch.dtype, state: Any) -> Any:
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", *NEW_MODULES],
    )
    family = lm_class(read_config(source)["model_type"].removeprefix("fox_"))
    model = family.from_pretrained(source, dtype=dtype, quantization_config=quantization, device_map={"": state.device})
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes 0.50: evaluation on such a CPU packs weights into a form that has no backward afterwards.
            module.support_avx512bf16_for_cpu = False
    return model


def refuse_plain_base(source: str) -> None:
    """Raises ValueError for a base without gates: an adapter on it would train and then run without them."""
    model_type = read_config(source).get("model_type", "")
    if not model_type.startswith("fox_"):
        raise ValueError(
            f"{source} is a plain {model_type or 'model'}: LoRA here adapts converted models. Give the recipe a `fox:` "
            "section, or convert the model first (retrofox convert)"
        )


def target_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """Names of the linear layers that get adapters: never the head, never a gate.

    Raises:
        ValueError: a name that is no linear layer, or a gate, with the names there are.
    """
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_new_tensor(name) and module is not model.get_output_embeddings()  # type: ignore[operator]
    }
    if config.targets == "all-linear":
        return sorted(linear)
    unknown = [name for name in config.targets if name not in linear]
    if unknown:
        raise ValueError(
            f"lora.targets: {unknown} are no linear layers to adapt; there are {', '.join(sorted(linear))}"
        )
    return list(config.targets)


def new_modules(model: nn.Module) -> list[str]:
    """Names of the modules a conversion added and that hold parameters: they are trained in full and saved."""
    found = set()
    for name, _ in model.named_parameters():
        if is_new_tensor(name):
            found |= set(name.split(".")) & set(NEW_MODULES)
    return sorted(found)


def _float32_parts(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if is_new_tensor(name) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def trained_in_full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Current values, on the CPU, of the gates and Pro parts that an adapter must hold; gathered where sharded.

    Raises:
        RuntimeError: the model has gates, none of which is trained.
    """
    live = {
        name.replace(".modules_to_save.default", "").removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if ".modules_to_save." in name
    }
    gates = (module for module in model.modules() if isinstance(module, ForgetGate))
    if not live and any(True for gate in gates for _ in gate.parameters()):  # fixed gates have none
        raise RuntimeError("the adapter trains no forget gate: modules_to_save did not include them")
    with _gathered(list(live.values())):
        return {
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()
            for name, parameter in live.items()
        }


def _gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Inside, parameters that DeepSpeed ZeRO-3 has partitioned are whole."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def assert_gates_saved(directory: Path, live: dict[str, torch.Tensor]) -> None:
    """Opens the adapter file just written and asserts that every gate is in it, float32, with its present values.

    Args:
        live: what `trained_in_full` found.

    Raises:
        RuntimeError: a gate is missing, rounded, or not what was trained.
    """
    with safe_open(directory / WEIGHTS, "pt") as file:
        names = {name.removeprefix("base_model.model."): name for name in file.keys()}  # noqa: SIM118, not a dict
        for name, value in live.items():
            if name not in names:
                raise RuntimeError(f"{directory / WEIGHTS} lacks {name}: the trained gates would be lost")
            saved = file.get_tensor(names[name])
            if saved.dtype != torch.float32 or not torch.equal(saved, value):
                raise RuntimeError(f"{directory / WEIGHTS} holds {name} as {saved.dtype}, not as trained")


def base_of(adapter: Path) -> str:
    """The base checkpoint an adapter names; beside the adapter's directory where both were moved together.

    Raises:
        FileNotFoundError: a local base that is in neither place.
        ValueError: the adapter's config is damaged.
    """
    file = adapter / "adapter_config.json"
    try:
        named = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged, or names no base ({error})") from error
    moved = adapter.resolve().parent / Path(named).name
    local = Path(named).is_absolute() or named.count("/") != 1
    if not Path(named).exists() and (moved / "config.json").is_file():
        return str(moved)
    if local and not Path(named).exists():
        raise FileNotFoundError(
            f"the base of {adapter} is gone: neither {named} nor {moved} exists. Set base_model_name_or_path in "
            f"{file} to where the converted base is now (a directory or Hub id)"
        )
    return named


def say_where_the_base_is(adapter: Path) -> None:
    """Warns of a base that only this machine has: the path in adapter_config.json travels with the adapter."""
    base = base_of(adapter)
    if Path(base).exists():
        print(
            f"{adapter} names its base by a path of this machine, {base}: before sharing it, push that base and set "
            "base_model_name_or_path in adapter_config.json to its Hub id, or share what `retrofox merge` makes",
            file=sys.stderr,
        )


def merge(adapter: str | Path, out: str | Path) -> dict[str, Any]:
    """Merges an adapter into its converted base and proves the logits in a fresh process.

    W' = W + (alpha / rank) B A (DoRA: rescaled by its magnitudes) in float32, then stored in the base's dtype; gates
    and Pro parts replace the base's, float32.

    Returns:
        Paths, the relative difference |z_merged - z_unmerged| / |z_unmerged| of the logits on fixed tokens, and the
        limit it is under: 1e-4 for float32, 2e-2 for weights stored in 16 bits.

    Raises:
        FileNotFoundError: no adapter there.
        ValueError: an unconverted base, `out` exists, or logits that differ (nothing is left in `out`).
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, nothing left in `out`.
    """
    with Interruptions("nothing was written"):
        return _merge(Path(adapter), Path(out))


def _merge(adapter: Path, out: Path) -> dict[str, Any]:
    if not (adapter / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{adapter} holds no adapter_config.json: give the directory of a LoRA adapter")
    if out.exists():
        raise ValueError(f"{out} exists: choose another directory")
    base = base_of(adapter)
    refuse_plain_base(base)
    stored = getattr(torch, str(read_config(base).get("dtype") or "float32").removeprefix("torch."))
    model = with_adapter(load(base, dtype=torch.float32), adapter).eval()
    ids = torch.arange(PROBE_TOKENS)[None] * 7919 % model.get_base_model().config.vocab_size
    with torch.no_grad():
        unmerged = model(input_ids=ids).logits
    merged: Any = model.merge_and_unload(safe_merge=True)
    for name, parameter in merged.named_parameters():
        if not is_new_tensor(name):
            parameter.data = parameter.data.to(stored)
    limit = 1e-4 if stored == torch.float32 else 2e-2
    difference = math.inf
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a merge that was killed
    note = {"retrofox": retrofox.__version__, "merged": {"adapter": str(adapter), "base": base}}
    try:
        merged.save_pretrained(str(partial))
        tokenizer = load_tokenizer(base)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        checkpoint.write_json(partial / "retrofox.json", note)
        for file in partial.glob("*.safetensors"):
            file.chmod(new_file_mode())
        difference = float((_fresh_logits(partial) - unmerged).norm() / unmerged.norm())
        if difference <= limit:
            partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"could not write {out}: {error}. Nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not difference <= limit:
        raise ValueError(
            f"merged logits differ by {difference:.2e} (limit {limit:.0e}) from the adapter's: not written"
        )
    return {
        "adapter": str(adapter),
        "base": base,
        "out": str(out),
        "dtype": str(stored).removeprefix("torch."),
        "relative_difference": difference,
        "limit": limit,
    }


def _fresh_logits(directory: Path) -> torch.Tensor:
    """Logits of the probe tokens by a checkpoint loaded in a process of its own, in float32."""
    code = (
        "import sys, torch, retrofox\n"
        "model = retrofox.load(sys.argv[1], dtype=torch.float32).eval()\n"
        f"ids = torch.arange({PROBE_TOKENS})[None] * 7919 % model.config.vocab_size\n"
        "with torch.no_grad():\n"
        "    torch.save(model(input_ids=ids).logits, sys.argv[2])\n"
    )
    file = directory / ".logits.pt"
    run = subprocess.run([*fresh_python(code), str(directory), str(file)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"the merged model did not load in a fresh process:\n{run.stderr[-2000:]}")
    logits = torch.load(file, weights_only=True)
    file.unlink()
    return logits
