"""MLPs over a few tokens at a time, so that their widest tensors never exist for a whole row.

An MLP of a LLaMA makes five tensors as wide as its inner layer: at 262144 tokens and 14336 channels, 7.5 GB each in
bfloat16. Tokens don't meet in it, so y = f(x) is y_i = f(x_i) over tiles x_i, and only x is kept for the backward,
which computes f(x_i) again tile by tile:

    dx_i = (df/dx)(x_i)^T dy_i        dW = sum_i (df/dW)(x_i)^T dy_i, summed in float32

A layer that is recomputed anyway (gradient checkpointing) pays nothing for it: see `_Keep`. Parameters get their
gradient from autograd once, whole: DDP's and FSDP2's hooks see one gradient as from any other layer.
Source: sequence-tiled computation in Arctic Long Sequence Training (arXiv 2506.13996, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from retrofox.anatomy import causal_lm, decoder_layers
from retrofox.planning.steps import auto_tile

EXPERTS = ("experts", "gate", "router")
"""Names of the parts that route tokens to experts: their output depends on which tokens share a tile."""


def tile_modules(model: Any, which: str | int) -> int:
    """Tiles the MLPs of a model's layers, "auto" or by tokens of a tile, or undoes it ("none"); returns how many."""
    mlps = 0
    for layer in decoder_layers(model):
        module: Any = getattr(layer, "mlp", None)
        if not _takes_tiles(module):
            continue
        if isinstance(module.__dict__.get("forward"), Tiled):
            before = module.__dict__.pop("forward").forward
            if getattr(before, "__self__", None) is not module:
                module.forward = before
        if which != "none":
            module.forward = Tiled(module, tile_tokens(module, which), module.forward)
            mlps += 1
    if which != "none" and not mlps:
        raise ValueError(
            f"tiled_mlp: the layers of a {causal_lm(model).config.model_type} model have no MLP to tile (experts see "
            "their own tokens only): set tiled_mlp: none"
        )
    return mlps


def tile_tokens(module: Any, which: str | int) -> int:
    """Tokens of a tile of this module: as given, or with "auto" a power of two by its widest layer."""
    if isinstance(which, int):
        return which
    widths = [max(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]
    return auto_tile(max(widths, default=1))


def _takes_tiles(mlp: Any) -> bool:
    """Whether an MLP does the same to every token: linear layers, and no experts."""
    if not isinstance(mlp, nn.Module):
        return False
    names = {part for name, _ in mlp.named_modules() for part in name.split(".")}
    return not names & set(EXPERTS) and any(isinstance(module, nn.Linear) for module in mlp.modules())


class Tiled:
    """A module's forward over tiles of tokens: x (..., width) -> (..., width out), rows longer than a tile in parts."""

    def __init__(self, module: nn.Module, tokens: int, forward: Callable[[torch.Tensor], torch.Tensor]):
        self.module, self.tokens, self.forward = module, tokens, forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() <= self.tokens:
            return self.forward(x)
        trained = self.trained()
        if not (torch.is_grad_enabled() and (x.requires_grad or trained)):
            return self.whole(x)
        kept: Any = _Keep.apply(torch.empty(0, device=x.device, requires_grad=True), x)
        return _OverTiles.apply(x, self, [kept], *trained)  # type: ignore[return-value]

    def trained(self) -> list[nn.Parameter]:
        """The module's parameters that take a gradient; whole while the layer runs, where FSDP2 shards them."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def tiles(self, x: torch.Tensor) -> Iterator[slice]:
        """Equal parts of the tokens of x (1, N, width), none longer than `tokens`."""
        count = x.shape[1]
        step = -(-count // -(-count // self.tokens))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The forward of all tiles, without a graph."""
        flat, out = x.reshape(1, -1, x.shape[-1]), None
        # Copies of weights that autocast makes here have no graph: its cache must not give them to anyone else.
        with torch.no_grad(), torch.autocast(**_autocast_of(x.device.type), cache_enabled=False):
            for tile in self.tiles(flat):
                y = self.forward(flat[:, tile])
                if out is None:
                    out = y.new_empty(1, flat.shape[1], y.shape[-1])
                out[:, tile] = y
        assert out is not None
        return out.view(*x.shape[:-1], out.shape[-1])


class _Keep(torch.autograd.Function):
    """Keeps x for `_OverTiles`, from a node of its own that runs before the tiles do.

    Gradient checkpointing recomputes a layer up to the last tensor it kept. With x kept after the MLP ran, as a
    function's saved tensors are, every MLP would run once more for nothing: forward, recomputation, and tile by tile.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):  # never part of a loss
        return None, None


class _OverTiles(torch.autograd.Function):
    """The forward over tiles, and the backward that computes each of them again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiled: Tiled, kept: Any, *trained: torch.Tensor) -> torch.Tensor:
        ctx.tiled, ctx.kept = tiled, kept
        ctx.autocast = _autocast_of(x.device.type)
        ctx.random = torch.get_rng_state(), *get_device_states(x)  # dropout must drop the same in the backward
        return tiled.whole(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor):  # type: ignore[override]
        if not ctx.kept:
            raise RuntimeError("a tiled MLP has no second backward: it lets go of its input in the first")
        # By way of the tensor, in a list, where autograd does not look: in torch 2.11 a node ends with its tensor, so a
        # name holds the tensor until its node has given x.
        kept = ctx.kept.pop()
        (x,) = kept.grad_fn.saved_tensors
        del kept
        tiled: Tiled = ctx.tiled
        trained = tiled.trained()
        sums: list[torch.Tensor | None] = [None] * len(trained)
        wants_x = ctx.needs_input_grad[0]
        flat, d_out = x.reshape(1, -1, x.shape[-1]), d_out.reshape(1, -1, d_out.shape[-1])
        dx = torch.empty_like(flat) if wants_x else None
        torch.clear_autocast_cache()  # of copies without a graph, in case this thread is under autocast
        on_cpu, devices, states = ctx.random
        with torch.enable_grad(), torch.random.fork_rng(devices), torch.autocast(**ctx.autocast):
            torch.set_rng_state(on_cpu)
            set_device_states(devices, states)
            for tile in tiled.tiles(flat):
                part = flat[:, tile].detach().requires_grad_(wants_x)
                inputs = [part, *trained] if wants_x else trained
                found = torch.autograd.grad(tiled.forward(part), inputs, d_out[:, tile], allow_unused=True)
                if dx is not None:
                    dx[:, tile] = found[0]
                for index, gradient in enumerate(found[int(wants_x) :]):
                    if gradient is not None:
                        before = sums[index]
                        sums[index] = gradient.to(torch.float32, copy=True) if before is None else before.add_(gradient)
        gradients = [None if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True)]
        return None if dx is None else dx.view_as(x), None, None, *gradients


def _autocast_of(device: str) -> dict[str, Any]:
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }
