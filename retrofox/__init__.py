"""retrofox: retrofit forget gates (Forgetting Attention, FoX) into pretrained LLaMA-family language models.

`convert` adds a forget gate per head and stretches, keeps or removes RoPE, as a `FoxSpec` says; `load` opens what it
made. Importing this package imports neither torch nor transformers: the names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from retrofox.registration import register_when_imported
from retrofox.version import __version__

if TYPE_CHECKING:
    from retrofox.conversion.convert import convert
    from retrofox.fox_spec import FoxSpec
    from retrofox.loading.converted import load

_HOMES = {
    "FoxSpec": "retrofox.fox_spec",
    "convert": "retrofox.conversion.convert",
    "load": "retrofox.loading.converted",
}
__all__ = ["FoxSpec", "__version__", "convert", "load"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'retrofox' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_imported()
