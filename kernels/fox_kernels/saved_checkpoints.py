"""Names and options that code saved beside checkpoints asks of this package, and it no longer has.

Modules had other names: `fox_kernels.fused_gate`, `fox_kernels.decoding.lean`, ... Each stands for a module that is
imported when something is asked of it, so that this needs no Triton. Operators were told what to prune.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import TypeVar

import torch

Operator = TypeVar("Operator", bound=Callable)

NOTE = ["fox_kernels: prune is gone: all keys are computed; a horizon leaves keys out"]  # printed once
MODULES = {
    "fused_append": "decoding.append",
    "fused_entry": "layer.entry",
    "fused_gate": "layer.gate",
    "fused_norm": "layer.norm",
    "fused_rotary": "layer.rotary",
    "fused_shift": "layer.shift",
    "fused_support": "layer.support",
    "decoding.lean": "decoding.elementwise",
}
NAMES = {"leans": "takes_rows"}


def register(package: str) -> None:
    """Make `from fox_kernels.fused_gate import gate` and the like work, or raise the module's ImportError."""
    for earlier, module in MODULES.items():
        stand_in = types.ModuleType(f"{package}.{earlier}", f"Earlier name of `{package}.{module}`.")
        stand_in.__dict__["__getattr__"] = functools.partial(_found, f"{package}.{module}")
        sys.modules.setdefault(stand_in.__name__, stand_in)


def _found(module: str, name: str):
    if name.startswith("__"):  # what Python itself asks about a module
        raise AttributeError(name)
    return getattr(importlib.import_module(module), NAMES.get(name, name))


def without_pruning(operator: Operator) -> Operator:
    """`operator` for callers that pass prune and k_bound: pruning approximated attention to all keys, which this is."""

    @functools.wraps(operator)
    def call(*arguments, prune=None, k_bound=None, **options):
        if prune is not None and NOTE and not torch.compiler.is_compiling():
            print(NOTE.pop(), file=sys.stderr)
        return operator(*arguments, **options)

    return call  # pyright: ignore[reportReturnType]
