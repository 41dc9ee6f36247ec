"""Backends of a layer's attention that need retrofox: the kernels for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fox_kernels import decode_attention, decodes

from retrofox.acceleration.forgetting_cache import ForgettingLayer, by_live_keys
from retrofox.acceleration.installed_kernels import decode_at, decodes_at
from retrofox.acceleration.pooled_cache import PooledLayer
from retrofox.acceleration.static_cache import visible_at


def choosing(slow: Callable[[Any], tuple[str, str]]) -> Callable[[Any], tuple[str, str]]:
    """`choose` with the backends of this module."""

    def choose(call: Any) -> tuple[str, str]:
        layer = call.gates.layer
        if isinstance(layer, ForgettingLayer):
            return "live", "the cache holds live keys only"
        if call.mask is None and getattr(layer, "length", None) is not None:
            return "step", "only the device knows the cache's length"
        backend, reason = slow(call)
        if backend != "operator" or call.cu_seqlens is not None or not hasattr(layer, "reserve"):
            return backend, reason
        q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        if decodes(q, k, v):
            return "decode", "few queries meet many cached keys"
        return backend, reason

    return choose


def by_decoding(call: Any) -> torch.Tensor:
    """The kernels for decoding; they skip keys beyond a horizon."""
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    high, low = (x[..., : call.key.shape[2]] for x in call.gates.layer.cumulative())
    return decode_attention(q, k, v, high, low, seq_start=call.seq_start, **call.options)


def by_step(call: Any, masked_attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A decoding step whose length only the device knows: it counts the filled positions of key and value."""
    layer, query = call.gates.layer, call.query
    length, dim, pooled = layer.length, query.shape[3], isinstance(layer, PooledLayer)
    if pooled:  # each row's kv heads are rows of their own
        query = query.reshape(len(layer.held), -1, *query.shape[2:])
        key, value, high, low = layer.pooled(dim)
    else:
        key, value, (high, low) = call.key, call.value, layer.cumulative()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if decodes_at(q, k):
        if layer.first is None:
            layer.first = torch.zeros(k.shape[0] * k.shape[2], dtype=torch.int32, device=k.device)
        given = {"seq_start": length.seq_start, "first": layer.first, "offset": layer.offset, **call.options}
        out = decode_at(q, k, v, high, low, length.on_device, **given)
    else:
        if pooled:
            key, value, high, low = layer.gathered(dim)
        options = {name: call.options[name] for name in ("scale", "sink", "softcap", "horizon")}
        visible = visible_at(length, query.shape[2], call.options["window"])
        out = masked_attention(query, key, value, (high, low), visible, **options)
    return out.reshape(call.query.shape[0], 1, -1, out.shape[3]) if pooled else out


def backends(code: Any) -> dict[str, Callable[[Any], torch.Tensor]]:
    """Name -> backend; where none of these serves, the functions of `code`, a modeling_fox module, do."""
    return {
        "decode": by_decoding,
        "step": functools.partial(by_step, masked_attention=code.masked_attention),
        "live": functools.partial(by_live_keys, attend=code.attend),
    }
