"""Results of lm-eval tasks kept on disk, under a key of the model's weights, the prompts and the versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.files import write_result

NOT_COUNTED = ("_name_or_path", "transformers_version", "auto_map")
"""Keys of a config that change no result."""


def default_folder() -> Path:
    """$XDG_CACHE_HOME/retrofox/tasks, or the same in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "retrofox" / "tasks"


def model_fingerprint(opened: LoadedModel) -> str:
    """A hash of all that decides a model's logits: every weight, the config, the attention function, the tokenizer.

    It is taken from the model in memory, so that a directory, an adapter on its base, a .gguf file, a live model and a
    baseline are all told apart by what they are, wherever they lie.
    """
    model = opened.model
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_COUNTED}
    digest = hashlib.sha256(_json([type(model).__name__, config, model.config._attn_implementation]))
    digest.update(opened.device.type.encode())
    backend = getattr(opened.tokenizer, "backend_tokenizer", None)
    digest.update(_json(opened.tokenizer.get_vocab()) if backend is None else backend.to_str().encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def digest(value: Any) -> str:
    """A hash of what JSON can hold."""
    return hashlib.sha256(_json(value)).hexdigest()


def prompts_digest(task: Any) -> str:
    """A hash of a task's requests as built (few-shot examples and templates in them), its documents and its config."""
    digest = hashlib.sha256(_json(task.dump_config()))
    for instance in task.instances:
        digest.update(_json([instance.request_type, instance.args, instance.doc]))
    return digest.hexdigest()


def read(folder: Path | None, task: str, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of a task, or None where there is none of this identity that can be read."""
    if folder is None:
        return None
    try:
        entry = json.loads(_file(folder, task, identity).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) and entry.get("identity") == identity else None


def write(folder: Path | None, task: str, identity: dict[str, Any], entry: dict[str, Any]) -> None:
    """Keeps the entry of a task, whole or not at all."""
    if folder is not None:
        content = json.dumps({"identity": identity, **entry}, indent=1)
        write_result(str(_file(folder, task, identity)), (content + "\n").encode())


def _file(folder: Path, task: str, identity: dict[str, Any]) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in task)
    return folder / f"{name}-{hashlib.sha256(_json(identity)).hexdigest()[:20]}.json"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_named).encode()


def _named(value: Any) -> Any:
    """What JSON has no form for, without addresses in memory."""
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    if isinstance(value, Iterable):
        return list(value)
    return getattr(value, "__qualname__", type(value).__name__)
