"""Optimizers whose state stays in CPU memory and visits the GPU a few parameters at a time.

AdamW keeps 8 bytes for each trained parameter, which only the step itself needs. Here each parameter's moments lie in
pinned CPU memory; a step copies those of some parameters to the GPU, runs the optimizer's own kernels on them, and
copies them back: the same bits as with the state on the GPU, for 16 bytes of traffic a parameter and step. Weights and
gradients stay where they are. accelerate offloads only with the weights (FSDP2, DeepSpeed), and torchao's
CPUOffloadOptimizer copies gradients before they are clipped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

VISITING = 256 << 20
"""Bytes of parameters whose state is on the GPU at a time (a larger parameter is alone)."""


@functools.cache
def offloaded(optimizer: type[torch.optim.Optimizer]) -> Any:
    """The optimizer class with its state in CPU memory.

    Raises:
        ValueError: it is not one of torch's own, whose state is tensors beside their parameters.
    """
    if not optimizer.__module__.startswith("torch.optim"):
        raise ValueError(
            f"offload_optimizer moves the state of torch's own optimizers, and {optimizer.__name__} is from "
            f"{optimizer.__module__.split('.')[0]}: set optim: adamw_torch_fused, or offload_optimizer: false"
        )
    return type(f"{optimizer.__name__}StateOnCpu", (_StateOnCpu, optimizer), {})


class _StateOnCpu(torch.optim.Optimizer):
    """The step over a few parameters at a time, and their state in CPU memory between steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of the optimizer for every parameter that has a gradient."""
        assert closure is None, "the Trainer gives none"
        groups = self.param_groups
        try:
            for group in groups:
                for some in _together(group["params"]):
                    self.param_groups = [{**group, "params": some}]
                    homes = [self._bring(parameter) for parameter in some]
                    super().step()
                    for parameter, home in zip(some, homes, strict=True):
                        self._put_away(parameter, home)
        finally:
            self.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # whoever reads the state next reads CPU memory

    def _bring(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies a parameter's moments to its device; returns the tensors in CPU memory that hold them."""
        state = self.state.get(parameter, {})
        home = {key: value for key, value in state.items() if _is_moment(value)}
        for key, value in home.items():
            state[key] = torch.empty_like(value, device=parameter.device).copy_(value, non_blocking=True)
        return home

    def _put_away(self, parameter: torch.Tensor, home: dict[str, torch.Tensor]) -> None:
        state = self.state.get(parameter, {})
        for key, value in state.items():
            if _is_moment(value):
                kept = home[key] if key in home else _in_cpu_memory(value, parameter)
                state[key] = kept.copy_(value, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, without a moment at which the whole state is on the GPU."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            counts_there = group.get("fused") or group.get("capturable")
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(number, {}).items():
                    if _is_moment(value):
                        value = _in_cpu_memory(value.to(parameter.dtype), parameter).copy_(value)
                    elif isinstance(value, torch.Tensor):
                        value = value.to(parameter.device if counts_there else "cpu", copy=True)
                    self.state[parameter][key] = value


def _in_cpu_memory(like: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Memory for a moment of a parameter, pinned where that is on a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=parameter.device.type == "cuda")


def _is_moment(value: Any) -> bool:
    """Whether a value of an optimizer's state is a tensor beside its parameter, not a count of steps."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _together(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters in their order, in parts of at most VISITING bytes."""
    parts: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if size > room:
            parts.append([])
            room = VISITING
        parts[-1].append(parameter)
        room -= size
    return parts
