"""The module names under which code saved beside checkpoints imports the fused functions: `fox_kernels.fused_gate`, ...

A checkpoint carries its model code, which was written when these were modules of their own. Each name stands for a
module that is imported when something is asked of it, so that this needs no Triton.
"""

import importlib
import sys
import types

MODULES = {
    "fused_append": "decoding.append",
    "fused_entry": "layer.entry",
    "fused_gate": "layer.gate",
    "fused_norm": "layer.norm",
    "fused_rotary": "layer.rotary",
    "fused_shift": "layer.shift",
    "fused_support": "layer.support",
}


class Renamed(types.ModuleType):
    """A module under its earlier name; raises ImportError where the module itself does."""

    def __init__(self, name: str, package: str, module: str):
        super().__init__(f"{package}.{name}", f"Earlier name of `{package}.{module}`.")
        self.__spec__ = None
        self.__dict__["_now"] = f"{package}.{module}"

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what Python itself asks about a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__dict__["_now"]), name)


def register(package: str) -> None:
    """Make `from fox_kernels.fused_gate import gate` and the like work."""
    for name, module in MODULES.items():
        sys.modules.setdefault(f"{package}.{name}", Renamed(name, package, module))
