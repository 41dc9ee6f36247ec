"""Parameters by role, their optimizer groups, and the learning-rate schedule in tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from retrofox.anatomy import is_new_tensor
from retrofox.config import ROLES, Stage


def role_of(name: str) -> str:
    """The role of a parameter by its name: gate_bias, gate_weight, pro, attention or rest."""
    parts = name.split(".")
    if "forget_gate" in parts:
        return "gate_bias" if parts[-1] == "bias" else "gate_weight"
    if is_new_tensor(name):
        return "pro"
    return "attention" if any(part.endswith("attn") or part == "attention" for part in parts) else "rest"


def set_trainable(model: torch.nn.Module, stage: Stage, adapters: bool = False) -> list[str]:
    """Sets requires_grad from the stage's rates; returns the names that will be trained.

    Args:
        adapters: the model has LoRA adapters: pretrained tensors stay frozen, adapters take their layer's role.
    """
    chosen = []
    for name, parameter in model.named_parameters():
        frozen = adapters and "lora_" not in name and ".modules_to_save." not in name
        frozen = frozen or ".original_module." in name or not parameter.is_floating_point()
        wanted = stage.rate(role_of(name)) > 0 and not frozen
        parameter.requires_grad_(wanted)
        if wanted:
            chosen.append(name)
    if not chosen:
        rates = ", ".join(f"{role} {stage.rate(role):g}" for role in ROLES)
        raise ValueError(f"nothing to train: the stage's rates are {rates}")
    return chosen


def parameter_groups(model: torch.nn.Module, stage: Stage) -> list[dict[str, Any]]:
    """Optimizer groups, one per role and decay: role, lr, weight_decay, params, in the order of ROLES.

    Vectors (norms, biases) are not decayed: a gate's bias would go to 0, a half-life of one token. Its weights have the
    stage's `gate_weight_decay`.
    """
    groups: dict[tuple[str, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = role_of(name)
        matrix = stage.gate_weight_decay if role.startswith("gate") else stage.weight_decay
        decay = 0.0 if parameter.ndim < 2 else matrix
        groups.setdefault((role, decay), []).append(parameter)
    return [
        {"role": role, "params": params, "lr": stage.rate(role), "weight_decay": decay}
        for (role, decay), params in sorted(groups.items(), key=lambda item: (ROLES.index(item[0][0]), item[0][1]))
    ]


def schedule(stage: Stage, batch_tokens: int) -> Callable[[int], float]:
    """Factor on the peak rate at optimizer step s, as a function of tokens seen.

    Warm-up is linear over `warmup_tokens`, counted at the step's end so that the first step is not idle; then with
    p = progress through the rest: cosine (1 + cos pi p) / 2, linear 1 - p, constant 1, wsd 1 until the last
    fifth (at most all after the warm-up) and linear from there; all from 1 down to min_lr_ratio.
    """
    floor, warmup = stage.min_lr_ratio, stage.warmup_tokens
    decay_tokens = max(1, min(stage.tokens // 5, stage.tokens - stage.warmup_tokens))

    def factor(step: int) -> float:
        seen = step * batch_tokens
        if seen + batch_tokens <= warmup:
            return (seen + batch_tokens) / warmup
        progress = min(1.0, max(0.0, (seen - warmup) / (stage.tokens - warmup)))
        if stage.schedule == "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        elif stage.schedule == "linear":
            shape = 1 - progress
        elif stage.schedule == "wsd":
            shape = min(1.0, max(0.0, (stage.tokens - seen) / decay_tokens))
        else:
            shape = 1.0
        return floor + (1 - floor) * shape

    return factor


def set_rates(optimizer: Any, scheduler: Any, rates: list[float]) -> None:
    """Gives a restored optimizer and its LambdaLR the recipe's present peak rates, one per group, at their step."""
    scheduler.base_lrs = rates
    scheduler._last_lr = [
        rate * factor(scheduler.last_epoch) for rate, factor in zip(rates, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate, now in zip(optimizer.param_groups, rates, scheduler._last_lr, strict=True):
        group["initial_lr"], group["lr"] = rate, now
