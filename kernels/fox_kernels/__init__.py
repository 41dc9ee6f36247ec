"""Forgetting Attention: causal softmax attention whose logits carry a learned, data-dependent decay per head.

`forgetting_attention` is the operator, `choose` says which implementation would run and why, `reference` is the
specification; `deterministic(False)` trades bit-for-bit repeatable gradients for speed. Importing the package needs
torch alone; Triton is imported when a CUDA tensor first asks for it.
"""

from . import chunked, reference
from .api import choose, forgetting_attention
from .determinism import deterministic, set_deterministic

__all__ = ["choose", "chunked", "deterministic", "forgetting_attention", "reference", "set_deterministic"]
