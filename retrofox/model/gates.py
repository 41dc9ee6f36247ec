"""The forget gate: one scalar per token and query head, computed in float32 whatever the model runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import fused
from .configuration_fox import FoxFields

DEAD_DECAY = 1e-4
"""Nats: a gate that decays less over a whole row changes no attention weight by more than 0.01 %: it is dead."""


class AddedModule(nn.Module):
    """Base of the modules that a conversion adds to an attention layer: float32 under casts, known first values."""

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Name of each of this module's tensors -> its value right after a conversion."""
        raise NotImplementedError

    @torch.no_grad()
    def reset(self) -> None:
        """Puts every tensor where a conversion starts it."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AddedModule:
        # model.to(bfloat16) and model.half() move these tensors but leave their dtype alone
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class ForgetGate(AddedModule):
    """log f_t = logsigmoid(W x_t + b), x_t the hidden state that enters the attention block.

    A module of its own, not an nn.Linear: the base model's initialisation, bitsandbytes and peft's "all-linear" would
    take an nn.Linear for one of theirs.

    Shapes: x (B, T, hidden) any float dtype -> log_f (B, T, H) float32, natural log, <= 0.
    Parameters (float32): weight (H, hidden) for gate="data"; bias (H,), a frozen buffer for gate="fixed".
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), eq. 1; the bias parametrises a half-life,
    b = -ln(expm1(ln 2 / half_life)).
    """

    weight: torch.Tensor | None
    bias: torch.Tensor

    def __init__(self, hidden_size: int, num_heads: int, spec: FoxFields):
        super().__init__()
        self.kind = spec.gate
        self.initial_bias = spec.initial_bias(num_heads)
        if spec.gate == "data":
            self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, dtype=torch.float32))
        else:
            self.weight = None
        bias = torch.tensor(self.initial_bias, dtype=torch.float32)
        if spec.gate == "fixed":
            self.register_buffer("bias", bias)
        else:
            self.bias = nn.Parameter(bias)
        self.record = False
        self.last_log_f: torch.Tensor | None = None

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Weight 0, bias at the open or ladder value."""
        values = {"bias": torch.tensor(self.initial_bias)}
        if self.weight is not None:
            values["weight"] = torch.zeros(self.weight.shape)
        return values

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            log_f = F.logsigmoid(self.bias.float()).expand(*hidden_states.shape[:-1], -1)
        elif fused.available(hidden_states):
            log_f = fused.gate(hidden_states, self.weight.float(), self.bias.float())
        else:
            device = hidden_states.device.type
            cast = torch.is_autocast_enabled(device)
            with torch.autocast(device, enabled=False) if cast else contextlib.nullcontext():  # 10 us of a CPU's step
                log_f = F.logsigmoid(F.linear(hidden_states.float(), self.weight.float(), self.bias.float()))
        if self.record:
            self.last_log_f = log_f.detach()
        return log_f

    def extra_repr(self) -> str:
        return f"kind={self.kind}, heads={self.bias.shape[0]}"


def half_life_tokens(mean_log_f: Any) -> Any:
    """Half-life in tokens of a head: ln 2 / mean(-log f); tensor or float in, the same out."""
    return 0.6931471805599453 / (-mean_log_f)
