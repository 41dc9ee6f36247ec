"""What some kernels compute, in plain torch: their tests compare the two."""

import torch
from fox_kernels.chunked import document_starts
from fox_kernels.common.blocks import LOG2_E
from fox_kernels.options import LOG_F_MIN
from torch import Tensor


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


def wide(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gate_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`layer.gate.gate`."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.logsigmoid(torch.nn.functional.linear(wide(x), weight, bias))


def head_norm_torch(x: Tensor, gain: Tensor | None, logit: Tensor | None, eps: float) -> Tensor:
    """`layer.norm.head_norm`."""
    y = wide(x)
    if gain is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gain
    if logit is not None:
        y = y * (2 * torch.sigmoid(wide(logit))).view(x.shape)
    return y.to(x.dtype)


def rotary_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`layer.rotary.rotary`."""
    turning, half = cos.shape[-1], q.shape[-1] // 2
    cos, sin = wide(cos)[:, None], wide(sin)[:, None]

    def turn(x: Tensor) -> Tensor:
        a, b = wide(x[..., :turning]), wide(x[..., half : half + turning])
        first, second = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
        return torch.cat((first, x[..., turning:half], second, x[..., half + turning :]), -1)

    return turn(q), turn(k)


def shift_torch(x: Tensor, amount: Tensor) -> Tensor:
    """`layer.shift.shift`."""
    before = wide(torch.cat((x[:, :1], x[:, :-1]), 1))
    return torch.lerp(wide(x), before, amount[..., None]).to(x.dtype)


def entry_torch(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor | None, wf: Tensor, bf: Tensor, cos: Tensor,
    sin: Tensor, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`layer.entry.entry`."""
    flat = torch.nn.functional.linear(
        x, torch.cat((wq, wk, wv)).to(x.dtype), None if bias is None else bias.to(x.dtype)
    )
    q, k, v = flat.split((wq.shape[0], wk.shape[0], wv.shape[0]), -1)
    q, k = (h.unflatten(-1, (-1, head_dim)).transpose(1, 2) for h in (q, k))
    q, k = (h.transpose(1, 2).flatten(2) for h in rotary_torch(q, k, cos, sin))
    return q, k, v, gate_torch(x, wf, bf)


def add_norm_torch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`elementwise.add_norm`, as transformers writes it."""
    x = x if residual is None else residual + x
    wide = x.float()
    return x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    """`elementwise.silu_mul`."""
    return torch.nn.functional.silu(gate) * up
