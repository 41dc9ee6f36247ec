"""A budget of live keys: a pressure on the gates that lasts until few enough keys are left alive.

A head whose gate values average -m nats a token (m = mean |log f|) sees about span = horizon / m tokens; of a text of
`length` tokens that is the share

    share = 1 - exp(-span / length),    live = mean of the share over all heads,    target: 1 -> `share` over `anneal`

While live > target a penalty is added to the loss. Only its gradient is: the forward is unchanged to the bit, and each
gate's gradient gets its part as the backward passes it. Per token of a step of N tokens and H heads in all layers:

    equal   weight * mean of log2(half-life), over half-lives above 64 tokens:   weight / (H N ln 2 |log f|)
    hinge   weight * relu(live - target):            weight / (H N) * (span / length) exp(-span / length) / m

Means m are those of the micro-batch, on this process's device, so that nothing waits and a resumed run needs no state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from retrofox.config import Budget, Stage
from retrofox.model.gates import ForgetGate

HORIZON = 16.0
"""Nats by which a key of a model without a horizon has decayed when it counts as forgotten."""
SHORT = 64
"""Tokens: `equal` leaves half-lives below it alone."""
LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072}


class Pressure(torch.autograd.Function):
    """The identity on log_f (B, T, H), whose backward adds the budget's gradient."""

    @staticmethod
    def forward(ctx: Any, log_f: torch.Tensor, pressure: GatePressure) -> torch.Tensor:  # type: ignore[override]
        ctx.pressure = pressure
        ctx.save_for_backward(log_f)
        return log_f.view_as(log_f)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (log_f,) = ctx.saved_tensors
        return grad + ctx.pressure.gradient(log_f), None


class GatePressure(TrainerCallback):
    """Presses a model's gates during a stage.

    Attributes:
        tokens: of an optimizer step, over all processes.
        world: processes, over whose number gradients are averaged.
        target: of the live share, in this step.
        means: (gates, H) float32, each head's mean |log f| in the last micro-batch.
    """

    def __init__(self, model: Any, stage: Stage, tokens: int, world: int, device: torch.device | None = None):
        assert stage.budget is not None
        self.budget: Budget = stage.budget
        self.tokens, self.world, self.anneal_tokens = tokens, world, stage.budget.anneal * stage.tokens
        self.horizon = horizon_of(model)
        self.gates = pressed_gates(model)
        heads = self.gates[0].bias.shape[0]
        self.means = torch.full((len(self.gates), heads), math.log(2.0), device=device or self.gates[0].bias.device)
        self.target = 1.0
        self.hooks: list[Any] = []

    def attach(self) -> None:
        """From here on the gates' outputs are pressed."""
        self.detach()
        self.hooks = [gate.register_forward_hook(self._hook(place)) for place, gate in enumerate(self.gates)]

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

    def _hook(self, place: int) -> Any:
        def press(module: Any, arguments: Any, log_f: torch.Tensor) -> torch.Tensor:
            self.means[place] = -log_f.detach().mean((0, 1))
            return Pressure.apply(log_f, self) if log_f.requires_grad else log_f  # type: ignore[no-any-return]

        return press

    def live(self) -> torch.Tensor:
        """The live share of the last micro-batch, a scalar on the device."""
        spans = self.horizon / self.means.clamp_min(1e-12)
        return -torch.expm1(-spans / self.budget.length).mean()

    def gradient(self, log_f: torch.Tensor) -> torch.Tensor:
        """What a gate's log_f (B, T, H) gets in the backward; 0 once the live share is at most the target."""
        falling = log_f.neg().clamp_min(1e-12)
        scale = self.budget.weight * self.world / (self.means.numel() * self.tokens)
        pressed = FORMS[self.budget.form](falling, self.horizon, self.budget.length)
        return pressed * (scale * (self.live() > self.target))


def _equal(falling: torch.Tensor, horizon: float, length: int) -> torch.Tensor:
    return torch.where(falling < math.log(2.0) / SHORT, 1 / (math.log(2.0) * falling), 0.0)


def _hinge(falling: torch.Tensor, horizon: float, length: int) -> torch.Tensor:
    mean = falling.mean((0, 1))
    part = horizon / mean / length
    return (part * torch.exp(-part) / mean).expand_as(falling)


FORMS = {"equal": _equal, "hinge": _hinge}
"""Gradient by log_f, times H N / weight: form(|log f| (B, T, H), horizon, length) -> (B, T, H)."""


def pressed_gates(model: torch.nn.Module) -> list[ForgetGate]:
    """The gates of a model that are trained; of the two that PEFT keeps of each, the one in use."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, ForgetGate)
        and ".original_module" not in name
        and any(parameter.requires_grad for parameter in module.parameters())
    ]


def horizon_of(model: Any) -> float:
    """Nats by which a key has decayed when it is forgotten: the model's own, else HORIZON."""
    return (getattr(model.config, "fox", None) or {}).get("horizon") or HORIZON


def live_shares(mean_log_f: torch.Tensor, horizon: float, kv_heads: int) -> dict[str, float]:
    """Live shares in closed form, as if every token of a head decayed alike: of operations and of the cache.

    With s = min(1, horizon / mean |log f| / length) of each head, operations are 2 s - s^2 on average, and the cache
    keeps for each kv head the largest s of its query heads.

    Args:
        mean_log_f: (layers, H), each head's mean of log f.
    """
    spans = horizon / mean_log_f.double().neg().clamp_min(1e-12)
    found = {}
    for name, length in LENGTHS.items():
        seen = (spans / length).clamp_max(1.0)
        found[f"live_operations_{name}"] = float((2 * seen - seen.square()).mean())
        found[f"live_cache_{name}"] = float(seen.reshape(len(seen), min(kv_heads, seen.shape[1]), -1).amax(-1).mean())
    return found
