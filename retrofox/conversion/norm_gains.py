"""The gains that added norms start with: each head's RMS on a text, so that a conversion's first logits stay close."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from retrofox.model.modeling_fox import HeadNorm


@torch.no_grad()
def calibrate_norms(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, list[float]]:
    """Sets the gain of every added norm to the RMS its heads have on a text, so that normed states keep their size.

    All norms stand aside meanwhile.

    Args:
        model: a converted model; a few thousand tokens are enough.
        batches: input_ids (B, T), without padding.

    Returns:
        Name of each norm -> the RMS of each head.

    Raises:
        ValueError: there are no batches.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, HeadNorm)}
    squares: dict[nn.Module, torch.Tensor] = {}

    def aside(norm: nn.Module, given: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        square = given[0].float().square().mean(-1)
        sums = F.pad(square.double().flatten(0, 1).sum(0), (0, 1), value=square[..., 0].numel())
        squares[norm] = squares.get(norm, 0) + sums
        return given[0]

    hooks, training = [norm.register_forward_hook(aside) for norm in norms.values()], model.training
    try:
        for input_ids in batches:
            model.eval()(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    result = {}
    for name, norm in norms.items():
        if norm not in squares:
            raise ValueError("calibrate_norms needs at least one batch of input_ids")
        rms = (squares[norm][:-1] / squares[norm][-1]).sqrt()
        norm.gain.copy_(rms[:, None].to(norm.gain).expand_as(norm.gain))
        result[name] = rms.tolist()
    return result
