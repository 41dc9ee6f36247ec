"""Changes to a model that make it train fast: a bfloat16 residual stream, fused norms, recomputation.

Weights stay float32 (they are the master copy; gradients accumulate in float32) and autocast runs the products in
bfloat16. Left alone, autocast keeps embeddings and norms, hence the whole residual stream, in float32: on a 576-wide
model the elementwise kernels then move twice the bytes. Here the embedding returns bfloat16 and each norm is one
fused kernel in the stream's dtype with its statistics in float32.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import fox_kernels
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from retrofox.anatomy import causal_lm, decoder_layers
from retrofox.config import Stage
from retrofox.planning.steps import recomputed_layers
from retrofox.training.offload import Offload
from retrofox.training.tiling import tile_modules


@contextlib.contextmanager
def repeatable(on: bool) -> Iterator[None]:
    """Inside, gradients on a GPU are the same bits in every run (on), or as fast as can be (off).

    On: Forgetting Attention's ordered backward, torch.use_deterministic_algorithms (an operator without a repeatable
    form warns) and cuBLAS with a workspace of its own, which counts only if no product ran before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with fox_kernels.deterministic(on):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def lower_precision(model: Any, dtype: torch.dtype) -> None:
    """Runs residual stream and norms in `dtype`; float32 changes nothing."""
    if dtype != torch.float32:
        lower_precision_stream(model, dtype)
        fuse_norms(model)


def lower_precision_stream(model: Any, dtype: torch.dtype) -> None:
    """Makes the token embedding return `dtype`, so that residual additions run in it, and adapters take it as it is.

    peft casts each adapter's input to float32, its weights' dtype, and autocast casts the copy back: 4.3 GB of them
    for each of seven adapters at 262144 tokens and 4096 channels, for the same bits.
    """

    def cast(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(dtype)

    causal_lm(model).get_input_embeddings().register_forward_hook(cast)
    if "peft" not in sys.modules:  # no adapters; to import it takes seconds
        return
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and not any(module.use_dora.values()):
            module.cast_input_dtype_enabled = False


def fuse_norms(model: nn.Module) -> int:
    """Runs every RMSNorm y = w x / sqrt(mean(x^2) + eps) as one kernel; returns how many.

    A module is one if torch's rms_norm agrees with it on random numbers, whatever its class is called; those that
    differ (Gemma's 1 + w) are left as they are.
    """
    fused, verdicts = 0, {}
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), _epsilon(module)
        if eps is None or not isinstance(weight, torch.Tensor) or weight.ndim != 1 or weight.is_meta:
            continue
        if type(module) not in verdicts:
            verdicts[type(module)] = _is_rms_norm(module, eps)
        if verdicts[type(module)]:
            module.forward = functools.partial(_rms_norm, module, eps)
            fused += 1
    return fused


def _epsilon(module: nn.Module) -> float | None:
    if "RMSNorm" not in type(module).__name__:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    # Its own generator: looking at a norm must not move the random numbers of the run.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator).to(weight.device)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator))
        try:
            return torch.allclose(module(x).float(), F.rms_norm(x, x.shape[-1:], weight.float(), eps), atol=1e-5)
        finally:
            weight.copy_(kept)


def _rms_norm(module: Any, eps: float, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], module.weight.to(x.dtype), eps)


def recompute(model: Any, which: str | int, offload: bool = False) -> None:
    """Recomputes no layer ("none"), all ("full") or every n-th, with `offload` from CPU memory."""
    layers = decoder_layers(model)
    chosen = recomputed_layers(which, len(layers))
    function = Offload().run if offload else functools.partial(checkpoint, use_reentrant=False)
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
        if layer.gradient_checkpointing and not hasattr(type(layer), "gradient_checkpointing"):
            raise ValueError(f"{type(layer).__name__} has no gradient checkpointing: set gradient_checkpointing: none")
        layer._gradient_checkpointing_func = function


def save_memory(model: Any, stage: Stage) -> None:
    """Applies a stage's switches on activations; ValueError where the layers can't do what one asks for."""
    recompute(model, stage.gradient_checkpointing, stage.offload_activations)
    tile_modules(model, stage.tiled_mlp)
