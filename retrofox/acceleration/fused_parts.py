"""The added modules of an attention layer by one kernel each, on a GPU: gate, head norm, output gate, shift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from retrofox.acceleration import fused_projections as fused

Forward = Callable[..., torch.Tensor]


def gate(slow: Forward) -> Forward:
    def log_f(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight is None or not fused.available(hidden_states):
            return slow(self, hidden_states)
        return fused.gate(hidden_states, self.weight.float(), self.bias.float())

    return log_f


def head_norm(slow: Forward) -> Forward:
    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        if not fused.available(states):
            return slow(self, states)
        return fused.head_norm(states, self.gain.float(), None, self.eps)

    return forward


def output_gate(slow: Forward) -> Forward:
    def forward(self: Any, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if not fused.available(output):
            return slow(self, output, hidden_states)
        return fused.head_norm(output, None, gate_logit(self, hidden_states), 0.0)

    return forward


def gate_logit(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """W x of an output gate, (B, T, H * D), in the model's dtype."""
    return F.linear(hidden_states, module.weight.to(hidden_states.dtype))


def shift(slow: Forward) -> Forward:
    def forward(self: Any, states: Any, before: Any, joined: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        from_zero = getattr(self, "from_zero", False)  # the code of an older checkpoint lacks it
        if from_zero or before is not None or not (fused.available(states) and fused.available(hidden_states)):
            return slow(self, states, before, joined, hidden_states)
        weight, gain = self.weight.float(), self.gain.float()
        amount = fused.gate(hidden_states, weight, torch.zeros_like(gain)).exp() * gain
        return fused.shift(states, amount if joined is None else amount * joined[..., None])

    return forward
