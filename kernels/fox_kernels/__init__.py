"""Forgetting Attention: causal softmax attention whose logits carry a learned, data-dependent decay per head.

`forgetting_attention` is the operator, `choose` says which implementation would run and why, `reference` is the
specification; `decode_attention` serves a cache that keeps the gates' sums; `deterministic(False)` trades bit-for-bit
repeatable gradients for speed. Importing the package needs torch alone; Triton is imported when a CUDA tensor asks for
it.
"""

from . import reference
from .api import decode_attention, decodes, forgetting_attention
from .choose_backend import choose
from .determinism import deterministic, set_deterministic

__all__ = [
    "choose",
    "decode_attention",
    "decodes",
    "deterministic",
    "forgetting_attention",
    "reference",
    "set_deterministic",
]
