"""Attention of every head of a converted model, watched while the model runs.

A wrapper of the attention function computes its weights again, a block of queries at a time, so that no T x T matrix
exists. A base model is watched in its converted form in mode "original", which gives the base's attention.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrofox.anatomy import attention_mode, inner_model
from retrofox.model import modeling_fox as fox
from retrofox.model.modeling_fox import scale_by_position

BLOCK = 64
"""Consecutive queries whose attention exists at one time: (H, 64, keys) float32."""


@dataclass
class Attention:
    """Inputs of one layer's attention for one text: queries (H, T, D), keys (Hkv, T, D), c (H, T) float64.

    c is the running sum of log f, 0 everywhere without gates; `sink` first keys are exempt from decay.
    """

    query: torch.Tensor
    key: torch.Tensor
    c: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sink: int

    def weights(self, start: int, stop: int) -> torch.Tensor:
        """(H, stop - start, stop) float32: attention of the queries start .. stop - 1 over the keys 0 .. stop - 1."""
        heads, _, head_dim = self.query.shape
        kv_heads = self.key.shape[0]
        query = (self.query[:, start:stop] * self.scaling).reshape(kv_heads, -1, head_dim)
        logits = (query @ self.key[:, :stop].transpose(1, 2)).view(heads, stop - start, stop)
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        # c_i - c_j, up to c_i - c_start, which the softmax takes out
        relative = (self.c[:, :stop] - self.c[:, start : start + 1]).float()
        logits[..., : self.sink] -= relative[:, start:, None] if self.sink else 0
        logits[..., self.sink :] -= relative[:, None, self.sink :]
        distance = torch.arange(start, stop, device=logits.device)[:, None] - torch.arange(stop, device=logits.device)
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        return logits.masked_fill_(hidden, -math.inf).softmax(-1)


Visit = Callable[[int, Attention], None]


@torch.no_grad()
def watch(model: PreTrainedModel, token_ids: torch.Tensor, visit: Visit, original: bool = False) -> None:
    """Runs one text (1, T) through a converted model and calls visit(layer, attention) in every layer.

    Args:
        original: run it in mode "original", as the base model.
    """

    # Named as the function it stands for: the mixin refuses to run with any other.
    def fox_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        visit(module.layer_idx, _received(module, query, key, options))
        return fox.fox_attention(module, query, key, value, mask, **options)

    mode = attention_mode(model, "original") if original else contextlib.nullcontext()
    # The interface's own way to override a function for a while; every family looks it up at each call.
    ALL_ATTENTION_FUNCTIONS["fox"] = fox_attention
    try:
        with mode:
            inner_model(model)(input_ids=token_ids.to(model.device), use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS["fox"]


def _received(module: Any, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> Attention:
    gates, window = options["gates"], options.get("sliding_window")
    if module.log_n is not None and module.mode != "original":
        query = scale_by_position(query, module.log_n, gates.position_ids, key.shape[2])
    scaling = options.get("scaling")
    return Attention(
        query=query[0].float(),
        key=key[0].float(),
        c=gates.log_f[0].double().cumsum(0).T,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=options.get("softcap"),
        sink=module.sink_tokens if window is None and module.mode != "original" else 0,
    )
