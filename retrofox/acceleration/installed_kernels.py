"""The fused kernels of fox_kernels, which need Triton; without it they are None and serve nothing."""

from __future__ import annotations

from typing import Any

__all__ = [
    "add_norm", "append", "append_step", "appends", "appends_step", "available", "cumulative", "decode_at",
    "decodes_at", "entry", "gate", "gate_rows", "head_norm", "rotary", "shift", "silu_mul", "takes", "takes_few",
]  # fmt: skip

try:
    from fox_kernels.common.cumsum import cumulative
    from fox_kernels.decoding.append import append, append_step, appends, appends_step
    from fox_kernels.decoding.elementwise import add_norm, gate_rows, silu_mul, takes, takes_few
    from fox_kernels.decoding.fixed import decode_at, decodes_at
    from fox_kernels.host.device import available
    from fox_kernels.layer.entry import entry
    from fox_kernels.layer.gate import gate
    from fox_kernels.layer.norm import head_norm
    from fox_kernels.layer.rotary import rotary
    from fox_kernels.layer.shift import shift
except ImportError:

    def _never(*tensors: Any) -> bool:
        return False

    nothing: Any = None
    add_norm = append = append_step = cumulative = decode_at = entry = gate = gate_rows = head_norm = nothing
    rotary = shift = silu_mul = nothing
    appends = appends_step = available = decodes_at = takes = takes_few = _never
