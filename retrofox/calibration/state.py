"""Files of a calibration under way: one file per finished layer, and the inputs of the next one."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from retrofox.support.files import replacing, write_result

SETTINGS = "settings.json"


class State:
    """A directory in which a calibration can stop at any time and resume at the layer it had reached.

    `layer-<n>` files hold a finished layer's tensors with its measurements as metadata; `inputs-<n>` holds the hidden
    states that enter layer n, of which only the newest is kept. Every file appears whole or not at all.
    """

    def __init__(self, directory: Path, settings: dict[str, Any], resume: bool):
        """Opens the directory for a run with these settings.

        Raises:
            ValueError: it holds finished layers of a run with other settings, and resume is asked for.
        """
        self.directory = directory
        file = directory / SETTINGS
        wanted = json.loads(json.dumps(settings))
        if resume and file.exists() and self._layer(0).exists():
            there = json.loads(file.read_text(encoding="utf-8"))
            other = sorted(k for k in wanted.keys() | there.keys() if wanted.get(k) != there.get(k))
            if other:
                raise ValueError(
                    f"{directory} holds an unfinished or earlier calibration with another {', '.join(other)}: give the "
                    "same settings to go on with it, or remove that directory to start anew (from Python: resume=False)"
                )
            return
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        write_result(file, (json.dumps(wanted, indent=1) + "\n").encode())

    def finished(self) -> int:
        """Number of layers done whose follow-up inputs are there, so the number of the layer to resume at."""
        number = 0
        while self._layer(number).exists():
            number += 1
        return number if number == 0 or self._inputs(number).exists() else 0

    def write_layer(self, number: int, tensors: dict[str, torch.Tensor], measured: dict[str, Any]) -> None:
        self._write(self._layer(number), tensors, {"measured": json.dumps(measured)})

    def read_layer(self, number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        with safe_open(self._layer(number), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, json.loads(file.metadata()["measured"])

    def write_inputs(self, number: int, streams: dict[str, torch.Tensor]) -> None:
        """Keeps the hidden states that enter layer `number`; call before write_layer(number - 1)."""
        self._write(self._inputs(number), streams, {})

    def read_inputs(self, number: int) -> dict[str, torch.Tensor]:
        with safe_open(self._inputs(number), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def drop_inputs(self, number: int) -> None:
        """Removes the inputs of a layer that is done."""
        self._inputs(number).unlink(missing_ok=True)

    def _layer(self, number: int) -> Path:
        return self.directory / f"layer-{number:03d}.safetensors"

    def _inputs(self, number: int) -> Path:
        return self.directory / f"inputs-{number:03d}.safetensors"

    def _write(self, file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        with replacing(file) as partial:
            save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"format": "pt", **metadata})


def fingerprint(*tensors: torch.Tensor) -> str:
    """SHA-256 over shapes and bits of tensors: whether a run goes on with the tokens and weights it began with."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
