"""Exports the model of a finished stage: weights, config, tokenizer, COMPLETE."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from retrofox.anatomy import is_new_tensor
from retrofox.loading.device import PRECISIONS
from retrofox.support.files import new_file_mode, write_json
from retrofox.training import checkpoint
from retrofox.training.lora import assert_gates_saved
from retrofox.training.trainer import FoxTrainer
from retrofox.version import __version__


def export(trainer: FoxTrainer, model: Any, directory: Path, tokenizer: Any, note: dict[str, Any], last: bool) -> None:
    """Writes model and tokenizer with a COMPLETE marker.

    Between stages everything stays float32; the last model gets its pretrained tensors in the recipe's precision. Gates
    and Pro parts are float32 in both.

    Raises:
        ValueError: it could not be written, with the checkpoint that stands.
    """
    with checkpoint.saving(directory, Path(str(trainer.args.output_dir))):
        weights: Any = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # type: ignore[arg-type]
        dtype = PRECISIONS[trainer.run.recipe.precision] if last and trainer.run.recipe.lora is None else None
        if trainer.args.should_save:
            if directory.exists():
                shutil.rmtree(directory)
            _tie(weights, model)
            if dtype is not None:
                weights = _cast(weights, dtype)
            model.save_pretrained(str(directory), state_dict=weights)
            if trainer.run.recipe.lora is not None:
                assert_gates_saved(directory, model)
            if (directory / "config.json").is_file():
                config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
                config["use_cache"] = True  # the Trainer turned it off for its own passes
                if dtype is not None:
                    config["dtype"] = str(dtype).removeprefix("torch.")
                write_json(directory / "config.json", config)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(directory))
            for path in directory.rglob("*.safetensors"):
                path.chmod(new_file_mode())
            of_base = {} if trainer.run.recipe.lora is None else {"fox": model.config.fox}
            note = {**note, **of_base, "step": trainer.state.global_step, "version": __version__}
            checkpoint.commit(directory, note)
    trainer.accelerator.wait_for_everyone()


def _tie(weights: dict[str, torch.Tensor], model: Any) -> None:
    """Ties tensors again, of which gathering the shards made two copies, so that they are written once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if name != other and name in weights:
            weights[name] = weights[other]


def _cast(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pretrained tensors in `dtype`; tensors that were one tensor (tied embeddings) stay one."""
    done: dict[int, torch.Tensor] = {}
    for name, value in weights.items():
        if not is_new_tensor(name) and value.is_floating_point():
            done.setdefault(value.data_ptr(), value.to(dtype))
    return {name: done.get(value.data_ptr(), value) for name, value in weights.items()}
