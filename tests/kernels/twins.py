"""What some kernels compute, in plain torch: their tests compare the two."""

import torch
from fox_kernels.chunked import document_starts
from fox_kernels.common.blocks import LOG2_E
from fox_kernels.options import LOG_F_MIN


def cumulative_torch(log_f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cumsum.cumulative`."""
    c = (log_f.transpose(1, 2).to(torch.float64).clamp_min(LOG_F_MIN) * LOG2_E).cumsum(-1)
    hi = c.to(torch.float32)
    return hi, (c - hi).to(torch.float32)


def gate_gradient_torch(dc: torch.Tensor, log_f: torch.Tensor) -> torch.Tensor:
    """`cumsum.gate_gradient`."""
    total = dc.to(torch.float64).flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    return total.masked_fill(log_f < LOG_F_MIN, 0).to(log_f.dtype)


def edges_torch(B: int, S: int, cu_seqlens, seq_start, window: int | None, device) -> torch.Tensor | None:
    """`edges.edges`, but (2, B, S)."""
    if cu_seqlens is None and seq_start is None and window is None:
        return None
    start = document_starts(B, S, cu_seqlens, seq_start, device)
    if window is not None:
        start = torch.maximum(start, torch.arange(1 - window, S + 1 - window, device=device))
    start = start.to(torch.int32).contiguous()
    keys = torch.arange(S, device=device, dtype=torch.int32).expand(B, S).contiguous()
    return torch.stack((start, torch.searchsorted(start, keys, right=True, out_int32=True)))
