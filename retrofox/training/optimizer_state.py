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
    return _with_state_on_cpu(optimizer)


@functools.cache
def _with_state_on_cpu(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
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
                    for parameter in some:
                        self._bring(parameter)
                    super().step()
                    for parameter in some:
                        self._put_away(parameter)
        finally:
            self.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # whoever reads the state next reads CPU memory

    def _bring(self, parameter: torch.Tensor) -> None:
        for key, home in self._homes().get(parameter, {}).items():
            visiting = torch.empty_like(home, device=parameter.device)
            self.state[parameter][key] = visiting.copy_(home, non_blocking=True)

    def _put_away(self, parameter: torch.Tensor) -> None:
        state = self.state.get(parameter, {})
        for key, value in state.items():
            if _is_moment(value):
                state[key] = self._home(parameter, key, value).copy_(value, non_blocking=True)

    def _homes(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The tensors in CPU memory that hold each parameter's state, by its keys."""
        return self.__dict__.setdefault("_kept_in", {})

    def _home(self, parameter: torch.Tensor, key: str, like: torch.Tensor) -> torch.Tensor:
        homes = self._homes().setdefault(parameter, {})
        if key not in homes:
            homes[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=parameter.device.type == "cuda")
        return homes[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, without a moment at which the whole state is on the GPU."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._homes().clear()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            counts_there = group.get("fused") or group.get("capturable")
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(number, {}).items():
                    if _is_moment(value):
                        value = self._home(parameter, key, value.to(parameter.dtype)).copy_(value)
                    elif isinstance(value, torch.Tensor):
                        value = value.to(parameter.device if counts_there else "cpu", copy=True)
                    self.state[parameter][key] = value


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
