"""Adapters: which base one needs, and opening it on that base."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrofox.anatomy import is_new_tensor
from retrofox.loading.errors import opening
from retrofox.loading.shards import header
from retrofox.loading.source import read_config
from retrofox.model.configuration_fox import FoxFields

WEIGHTS = "adapter_model.safetensors"


def with_adapter(base: Any, adapter: Path, trainable: bool = False) -> Any:
    """A converted model with the adapter of a directory, gates and Pro parts in float32.

    Raises:
        ValueError: the adapter's file is missing or damaged, lacks gates of the base, or is another base's; or the base
            was converted otherwise than when the adapter was trained.
    """
    from peft import PeftModel  # seconds to import, and most commands open no adapter

    names = {name.removeprefix("base_model.model.") for name in header(adapter / WEIGHTS)}
    lacking = [name for name, _ in base.named_parameters() if is_new_tensor(name) and name not in names]
    if lacking:
        raise ValueError(
            f"{adapter / WEIGHTS} lacks {lacking[0]}: it was not saved by `retrofox train`; peft's own adapters are "
            "opened by peft.PeftModel.from_pretrained(retrofox.load(BASE), ADAPTER)"
        )
    note = adapter / "COMPLETE"  # as training leaves it
    trained = json.loads(note.read_text(encoding="utf-8")).get("fox") if note.is_file() else None
    now = vars(FoxFields.read(json.loads(json.dumps(base.config.fox))))  # also of fields that one of them lacks
    then = now if trained is None else vars(FoxFields.read(trained))
    for name in sorted(then.keys() - {"base", "base_revision", "version"}):
        if then[name] != now[name]:
            raise ValueError(
                f"{adapter} was trained on a base with fox.{name} = {then[name]}, and {base.config._name_or_path} "
                f"has {now[name]}: convert the base as it was, or train again"
            )
    with peft_is_behind(), opening(f"{adapter}, on {base.config._name_or_path},"):
        return float32_parts(PeftModel.from_pretrained(base, str(adapter), is_trainable=trainable))


@contextlib.contextmanager
def peft_is_behind() -> Iterator[None]:
    """peft 0.21 calls transformers 5.23 by a deprecated name, about which a user can do nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def base_of(adapter: Path) -> str:
    """The base checkpoint an adapter names; beside the adapter's directory where both were moved together.

    Raises:
        FileNotFoundError: no adapter, or a local base that is in neither place.
        ValueError: the adapter's config is damaged.
    """
    file = adapter / "adapter_config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{adapter} is no adapter: it has no {file.name}. A whole model needs no merge")
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


def converted_base(adapter: Path) -> str:
    """`base_of` an adapter; ValueError where that is no converted model."""
    base = base_of(adapter)
    if not read_config(base).get("model_type", "").startswith("fox_"):
        raise ValueError(
            f"{adapter} is an adapter of {base}, which is no converted model: open it by "
            "peft.PeftModel.from_pretrained(MODEL, ADAPTER), or merge it (merge_and_unload) and convert the result"
        )
    return base


def float32_parts(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if is_new_tensor(name) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model
