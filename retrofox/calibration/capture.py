"""Running a converted model layer by layer, and capturing the inputs of one layer's attention operator."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrofox.anatomy import decoder_layers, inner_model, token_losses
from retrofox.model import attention as fox
from retrofox.model.attention import FoxMixin

ROWS_AT_ONCE = 2
"""Sequences that pass through a decoder layer at one time: more only costs memory on a CPU."""


@dataclass
class Operands:
    """What attention receives for one window: queries (H, T, D), keys and values (Hkv, T, D), float32.

    Queries and keys are rotated and normed. `inputs` (T, hidden) enter the attention block; `raw_queries`
    (H, T, D) the queries as projected, before norm and rotation. `window` and `softcap` are the layer's own.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    inputs: torch.Tensor
    raw_queries: torch.Tensor | None


@dataclass
class LayerCall:
    """The arguments a decoder layer is called with beside the hidden states; the same for every window."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Recorder(nn.Module):
    """Stands in for a decoder layer: keeps its arguments and hands the hidden states on."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["_layer"] = layer
        self.call: LayerCall | None = None
        self.hidden: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        self.call, self.hidden = LayerCall(arguments, keywords), hidden_states
        return hidden_states


class _Replay(nn.Module):
    """Stands in for all decoder layers: returns hidden states computed elsewhere."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self.hidden


@contextlib.contextmanager
def _layers_replaced(model: PreTrainedModel, layers: list[nn.Module]) -> Iterator[nn.Module]:
    inner = inner_model(model)
    native = inner.layers
    inner.layers = nn.ModuleList(layers)
    try:
        yield inner
    finally:
        inner.layers = native


@torch.no_grad()
def enter(model: PreTrainedModel, token_ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
    """(hidden states (N, T, hidden) that enter the first layer, the arguments of every layer), computing no layer."""
    recorders = [_Recorder(layer) for layer in decoder_layers(model)]
    hidden = []
    with _layers_replaced(model, list(recorders)) as inner:
        for row in token_ids.to(model.device):
            inner(input_ids=row[None], use_cache=False)
            assert recorders[0].hidden is not None
            hidden.append(recorders[0].hidden)
    calls = [recorder.call for recorder in recorders]
    assert None not in calls
    return torch.cat(hidden), calls  # type: ignore[return-value]


@torch.no_grad()
def losses_from(model: PreTrainedModel, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Per-token losses (N, T - 1) of windows (N, T), from what left the last layer for each, (N, T, hidden)."""
    rows = []
    for ids, left in zip(token_ids.to(hidden.device).split(1), hidden.split(1), strict=True):
        with _layers_replaced(model, [_Replay(left)]):
            rows.append(token_losses(model, ids))
    return torch.cat(rows)


@torch.no_grad()
def through(layer: nn.Module, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """The output of one decoder layer, (N, T, hidden), a few rows at a time."""
    rows = []
    for part in hidden.split(ROWS_AT_ONCE):
        out = layer(part, *call.arguments, **call.keywords)
        rows.append(out[0] if isinstance(out, tuple) else out)
    return torch.cat(rows)


@dataclass
class _Seen:
    """Filled in by `_watch` each time attention runs."""

    operator: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    projected: torch.Tensor | None = None


@contextlib.contextmanager
def _watch(attention: FoxMixin, compute: bool) -> Iterator[_Seen]:
    """Captures the inputs of `attention` and its operator. With `compute` False the operator returns zeros."""
    seen = _Seen()

    # It has the original function's name: the mixin refuses to run with any other attention function.
    def fox_attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any):
        seen.operator = {"query": query, "key": key, "value": value, "mask": mask, **options}
        if compute and options.get("sliding_window") is None and options.get("softcap") is None and mask is None:
            scale = options.get("scaling")  # the base's attention: torch's own causal kernel is the fastest on a CPU
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        if compute:
            return fox.fox_attention(module, query, key, value, mask, **options)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def block(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        seen.block = dict(keywords)
        seen.block.setdefault("hidden_states", arguments[0] if arguments else None)

    def projected(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        seen.projected = output

    hooks = [attention.register_forward_pre_hook(block, with_kwargs=True)]
    found = query_projection(attention)
    if found is not None:
        hooks.append(getattr(attention, found).register_forward_hook(projected))
    # The interface's own way to override a function for a while; every family looks it up at each call.
    ALL_ATTENTION_FUNCTIONS["fox"] = fox_attention
    try:
        yield seen
    finally:
        del ALL_ATTENTION_FUNCTIONS["fox"]
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run_original(
    layer: nn.Module, hidden: torch.Tensor, call: LayerCall
) -> tuple[torch.Tensor, list[tuple[Operands, dict[str, Any]]]]:
    """Runs a layer as the base model does; returns its output and, per window, operands and the block's arguments."""
    attention: FoxMixin = layer.self_attn  # type: ignore[assignment]
    outputs, captured = [], []
    with mode(attention, "original"), _watch(attention, compute=True) as seen:
        for row in hidden.split(1):
            outputs.append(through(layer, row, call))
            operands = _operands(attention, seen)
            operands.raw_queries = None  # only the converted queries are made anew from them
            captured.append((operands, dict(seen.block)))
    return torch.cat(outputs), captured


@torch.no_grad()
def through_original(layer: nn.Module, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """The output of one decoder layer in the base model, (N, T, hidden)."""
    attention: FoxMixin = layer.self_attn  # type: ignore[assignment]
    with mode(attention, "original"), _watch(attention, compute=True):
        return through(layer, hidden, call)


@torch.no_grad()
def converted_operands(attention: FoxMixin, block: dict[str, Any]) -> Operands:
    """The operands of the converted attention, its rotary pairs faded, on the inputs the original had."""
    with mode(attention, "open"), _watch(attention, compute=False) as seen:
        attention(**block)
        return _operands(attention, seen)


def _operands(attention: FoxMixin, seen: _Seen) -> Operands:
    query, key, value = (seen.operator[name][0].float() for name in ("query", "key", "value"))
    heads, length, head_dim = query.shape
    raw = None
    if seen.projected is not None:
        raw = seen.projected[0, :, : heads * head_dim].view(length, heads, head_dim).transpose(0, 1).float()
    scaling = seen.operator.get("scaling")
    return Operands(
        query=query,
        key=key,
        value=value,
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        window=seen.operator.get("sliding_window"),
        softcap=seen.operator.get("softcap"),
        inputs=seen.block["hidden_states"][0].float(),
        raw_queries=raw,
    )


@contextlib.contextmanager
def mode(attention: FoxMixin, name: str) -> Iterator[None]:
    """One attention in another mode ("original", "open", "fox") for a while."""
    before, attention.mode = attention.mode, name
    try:
        yield
    finally:
        attention.mode = before


def query_projection(attention: nn.Module) -> str | None:
    """Name of the linear layer whose first rows are the queries: "q_proj", or "qkv_proj" where they are fused."""
    for name in ("q_proj", "qkv_proj"):
        if isinstance(getattr(attention, name, None), nn.Linear):
            return name
    return None


Finish = Callable[[torch.Tensor, int, int], torch.Tensor]
"""(H, n, D) queries as projected, of positions start..stop-1 -> as they meet the keys, differentiable."""


def query_finish(attention: FoxMixin, operands: Operands, block: dict[str, Any]) -> Finish:
    """The family's own steps from projected to final queries, found by trying which reproduce the captured queries.

    Raises:
        ValueError: none does, so a matrix in front of it can't be fitted and folded; says why.
    """
    name = type(attention).__name__
    assert operands.raw_queries is not None
    for finish in _roads(attention, block):
        got = finish(operands.raw_queries, 0, operands.raw_queries.shape[1])
        if got.shape == operands.query.shape and torch.allclose(got, operands.query, rtol=1e-2, atol=1e-2):
            return finish
    raise ValueError(
        f"{name} does more to its queries after projecting them than a norm and a rotation, so a refit can't be "
        "fitted in front of it: pass refit_queries=False"
    )


def _roads(attention: FoxMixin, block: dict[str, Any]) -> Iterator[Finish]:
    """Rotation alone, nothing, then each of the two after a norm over a head or over all heads."""
    position = block.get("position_embeddings")
    if position is not None and attention.rotary_fade is not None:
        position = attention.rotary_fade(*position, block.get("position_ids"))
    module = next(sys.modules[c.__module__] for c in type(attention).__mro__ if "transformers.models" in c.__module__)
    rotate_pair = getattr(module, "apply_rotary_pos_emb", None)

    def rotate(query: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        cos, sin = (part[:, start:stop].float() for part in position)  # type: ignore[union-attr]
        return rotate_pair(query[None], query[None, :1], cos, sin)[0][0]  # type: ignore[misc]

    def as_is(query: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return query

    ends = [rotate, as_is] if position is not None and rotate_pair is not None else [as_is]
    yield from ends
    norm: Any = getattr(attention, "q_norm", None) or attention.q_norm_fox
    if norm is None:
        return

    def over_head(query: torch.Tensor) -> torch.Tensor:
        return norm(query.transpose(0, 1)).transpose(0, 1)

    def over_all(query: torch.Tensor) -> torch.Tensor:
        heads, length, head_dim = query.shape
        return norm(query.transpose(0, 1).reshape(length, -1)).view(length, heads, head_dim).transpose(0, 1)

    width = getattr(norm, "weight", torch.empty(0)).shape[-1:]
    normed = over_head if norm is attention.q_norm_fox or tuple(width) == (attention.head_dim,) else over_all
    for end in ends:
        yield lambda query, start, stop, end=end: end(normed(query), start, stop)
