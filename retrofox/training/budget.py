"""A budget of live keys: a pressure on the gates that lasts until few enough keys are left alive.

A head whose gate values average -m nats a token (m = mean |log f|) sees about span = horizon / m tokens. Of a text of
`length` tokens a kv head must keep the share that the farthest of its query heads sees:

    live = mean over kv heads of min(1, largest span / length),    target: 1 -> `share` over the stage's part `anneal`

While live > target a penalty is added to the loss. Only its gradient is: the forward is unchanged to the bit, and each
gate's gradient gets its part as the backward passes it. Per token of a step of N tokens and H heads in all layers, for
every head that is none of the model's `open_heads`:

    weight * mean of log2(half-life), over half-lives above 64 tokens;    its gradient: weight / (H N ln 2 |log f|)

Means m are those of the micro-batch, on this process's device, so that nothing waits and a resumed run needs no state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from retrofox.config import Budget, BudgetedStage
from retrofox.config_values import horizon_of, kv_heads_of
from retrofox.model.modeling_fox import ForgetGate
from retrofox.planning.live_share import HORIZON

SHORT = 64
"""Tokens: half-lives below it are left alone."""
NEVER = -1e-12
"""log f of a gate that is open to the last bit: the pressure divides by it."""


class Pressure(torch.autograd.Function):
    """The identity on log_f (B, T, H), whose backward adds the budget's gradient."""

    @staticmethod
    def forward(ctx: Any, log_f: torch.Tensor, hook: PressureHook) -> torch.Tensor:  # type: ignore[override]
        ctx.hook = hook
        ctx.save_for_backward(log_f)
        return log_f.view_as(log_f)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (log_f,) = ctx.saved_tensors
        return grad + ctx.hook.gradient(log_f), None


class PressureHook:
    """The forward hook of one gate. Fused projections, which don't call the gate, call its hooks (`output_hook`)."""

    output_hook = True

    def __init__(self, pressure: GatePressure, place: int):
        self.pressure, self.place = pressure, place

    def __call__(self, module: Any, arguments: Any, log_f: torch.Tensor) -> torch.Tensor:
        self.pressure.record(self.place, log_f.detach())
        return Pressure.apply(log_f, self) if log_f.requires_grad else log_f  # type: ignore[no-any-return]

    def gradient(self, log_f: torch.Tensor) -> torch.Tensor:
        """Gradient (B, T, H) added to the gate's log_f in the backward; 0 once the live share is at most the target."""
        log_f, factor = log_f.clamp_max(NEVER), self.pressure.factors[self.place]
        return (log_f > -math.log(2.0) / SHORT) * (factor / -math.log(2.0)) / log_f


class GatePressure(TrainerCallback):
    """Presses a model's gates during a stage.

    Args:
        tokens: of an optimizer step, over all processes.
        world: processes, over whose number gradients are averaged.

    Attributes:
        target: of the live share, in this step.
        means: (gates, H) float32, each head's mean log f in the last micro-batch.
        weights: (gates, H) float32, by which the pressure on a head is multiplied: 0 where it is spared.
        factors: the weights, or 0 once the micro-batch has reached the target.
    """

    def __init__(self, model: Any, stage: BudgetedStage, tokens: int, world: int, device: torch.device | None = None):
        assert stage.budget is not None
        self.budget: Budget = stage.budget
        self.tokens, self.anneal_tokens = tokens, stage.budget.anneal * stage.tokens
        self.horizon = horizon_of(model.config) or HORIZON
        pressed = pressed_gates(model)
        self.gates = list(pressed.values())
        where = device or self.gates[0].bias.device
        spared = open_heads(model.config, 1 + max(pressed), len(self.gates[0].bias))[list(pressed)]
        self.group = max(1, len(self.gates[0].bias) // kv_heads_of(model.config))
        self.weights = (~spared).float().to(where) * (stage.budget.weight * world / (spared.numel() * tokens))
        self.means = torch.full(spared.shape, -math.log(2.0), device=where)
        self.factors = self.weights
        self.target = 1.0
        self.hooks: list[Any] = []

    def attach(self) -> None:
        """From here on the gates' outputs are pressed."""
        self.detach()
        self.hooks = [gate.register_forward_hook(PressureHook(self, place)) for place, gate in enumerate(self.gates)]

    def detach(self) -> None:
        """Takes every hook off."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def move(self, step: int) -> None:
        """Sets the target of the step after `step` steps of this stage."""
        done = min(1.0, (step + 1) * self.tokens / self.anneal_tokens) if self.anneal_tokens else 1.0
        self.target = 1.0 - (1.0 - self.budget.share) * done

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attach()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.move(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()

    def record(self, place: int, log_f: torch.Tensor) -> None:
        """Notes a gate's log_f (B, T, H); after the last gate's, sets `factors` for this micro-batch."""
        self.means[place] = log_f.mean((0, 1))
        if place == len(self.gates) - 1:
            self.factors = self.weights * (self.live() > self.target)

    def live(self) -> torch.Tensor:
        """The live share of the last micro-batch, a scalar on the device: the log's live cache at that length."""
        seen = (self.horizon / -self.means.clamp_max(NEVER) / self.budget.length).clamp_max(1.0)
        return seen.unflatten(1, (-1, self.group)).amax(-1).mean()


def open_heads(config: Any, layers: int, heads: int) -> torch.Tensor:
    """(layers, heads) bool: the gates' heads that read the kv heads of the model's `open_heads`, [layer, kv head]."""
    kv_heads = kv_heads_of(config)
    found = torch.zeros(layers, min(kv_heads, heads), max(1, heads // kv_heads), dtype=torch.bool)
    for layer, kv_head in (getattr(config, "fox", None) or {}).get("open_heads") or ():
        found[layer, kv_head] = True
    return found.flatten(1)


def pressed_gates(model: torch.nn.Module) -> dict[int, ForgetGate]:
    """The gates of a model that are trained, by layer; of the two that PEFT keeps of each, the one in use."""
    used = [
        module
        for name, module in model.named_modules()
        if isinstance(module, ForgetGate) and ".original_module" not in name
    ]
    return {layer: gate for layer, gate in enumerate(used) if any(p.requires_grad for p in gate.parameters())}
