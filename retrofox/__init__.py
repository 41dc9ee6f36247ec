"""retrofox: retrofit forget gates (Forgetting Attention, FoX) into pretrained LLaMA-family language models.

`convert` swaps (part of) RoPE for per-head forget gates, `load` opens a converted checkpoint, `FoxSpec` says what is
converted to what, `calibrate` fits gates to the original's attention. Importing this package imports neither torch nor
transformers: the names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from retrofox.version import __version__

if TYPE_CHECKING:
    from retrofox.calibration.calibrate import calibrate
    from retrofox.conversion.convert import convert
    from retrofox.fox_spec import FoxSpec
    from retrofox.loading.converted import load

_HOMES = {
    "FoxSpec": "retrofox.fox_spec",
    "calibrate": "retrofox.calibration.calibrate",
    "convert": "retrofox.conversion.convert",
    "load": "retrofox.loading.converted",
}
__all__ = ["FoxSpec", "__version__", "calibrate", "convert", "load"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'retrofox' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
