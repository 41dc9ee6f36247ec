"""Live share: how much of attention, and of the cache, a model's forget gates leave alive at a horizon.

A key j counts for query i while its decay is above e^-t, t the horizon:

    alive(i, j)  iff  c_i - c_j > -t,    c_i = sum_{u <= i} log f_u,  j <= i

c never rises, so a query's live keys are the last ones of its text, and a key that is dead stays dead. `ops` is the
share of query-key pairs that are alive, over all queries and query heads; `cache` is the share of keys that a kv head
must keep after the last token: the most that any query head of its group still sees. First tokens that never decay stay
alive; a layer's sliding window hides keys in the base too, so they count for neither side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrofox.anatomy import attentions, cached_heads, exempt_tokens, inner_model, sliding_window
from retrofox.config_values import horizon_of
from retrofox.data.windows import Window
from retrofox.loading.loaded_model import LoadedModel
from retrofox.planning.live_share import HORIZON, LENGTHS
from retrofox.support.report import reading_bar

C_BYTES = 8
"""Bytes of c that a cache keeps per token and gate: two float32."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory, by its data sheet: decoding is predicted from it, not measured."""


@dataclass(frozen=True)
class LiveShare:
    """Shares of one layer, by head.

    Attributes:
        ops: (H,) float64, live query-key pairs of each query head over those it has without gates.
        reach: (H,) float64, keys that the last query sees over those it sees without gates.
        cache: (Hkv,) float64, keys that each kv head must keep after the last token, likewise.
    """

    ops: np.ndarray
    reach: np.ndarray
    cache: np.ndarray


def live_share(c: np.ndarray, horizon: float, kv_heads: int, *, sinks: int = 0, window: int | None = None) -> LiveShare:
    """The live share of one layer after a text of T tokens.

    Args:
        c: (H, T) float64, sums of log f in nats from the text's start; it never rises along T.
        horizon: t > 0 in nats.
        kv_heads: Hkv, a divisor of H; query heads h * H / Hkv .. (h + 1) * H / Hkv - 1 read kv head h.
        sinks: first tokens that never decay.
        window: tokens that a query of the layer sees, its own among them; None = all before it.
    """
    heads, length = c.shape
    assert horizon > 0
    assert heads % kv_heads == 0, f"{heads} query heads, {kv_heads} kv heads"
    assert not (np.diff(c) > 0).any(), "c rises along the text"
    query = np.arange(length)
    start = np.zeros(length, np.int64) if window is None else np.maximum(0, query - window + 1)
    live = np.empty((heads, length))
    for head in range(heads):
        first = np.maximum(np.searchsorted(-c[head], -c[head] - horizon, side="right"), start)
        live[head] = query - first + 1 + np.clip(np.minimum(sinks, first) - start, 0, None)
    visible = query - start + 1
    reach = live[:, -1] / visible[-1]
    return LiveShare(live.sum(-1) / visible.sum(), reach, reach.reshape(kv_heads, -1).max(-1))


def measure_live_share(
    opened: LoadedModel,
    windows: Sequence[Window],
    horizon: float | None = None,
    lengths: Sequence[int] = tuple(LENGTHS.values()),
    progress: bool = True,
) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
    """The live share of a converted model on texts, and what its gates do on average.

    Args:
        horizon: in nats; None = the model's own, else HORIZON.
        lengths: a text counts at every length that it has, by its first tokens.

    Returns:
        ({"horizon", "bandwidth", "lengths": [{"length", "documents", "ops", "cache", "cache_bytes_per_token",
        "base_bytes_per_token", "decode_ms", "base_decode_ms", "open_heads"}]}, the mean of -log f (H,) float64 by layer
        with gates). Shares are means over layers and heads, bytes are those that keys, values and c take after the last
        token, divided by the text's tokens. Decoding's milliseconds are the time that BANDWIDTH needs to read weights
        and cache once: no token of one text takes less. An open head, "LAYER.HEAD", is a gate through which the whole
        text is seen at that length: a query head's, or with `gate_heads` "kv" a kv head's.
    """
    nats: float = horizon or horizon_of(opened.model.config) or HORIZON
    tokens = sum(len(window.token_ids) for window in windows)
    decay: dict[int, torch.Tensor] = {}
    found: dict[int, list[list[LiveShare]]] = {length: [] for length in sorted({*lengths})}
    for log_f in gates_of_texts(opened, windows, progress):
        sums = {layer: own.double().cumsum(0).T for layer, own in log_f.items()}
        for layer, c in sums.items():
            decay[layer] = decay.get(layer, torch.zeros(())) - c[:, -1] / tokens
        for length in found:
            if length <= next(iter(sums.values())).shape[-1]:
                found[length].append(_by_layer(opened.model, sums, length, nats))
    rows = [_row(opened.model, length, documents) for length, documents in found.items() if documents]
    return {"horizon": nats, "bandwidth": BANDWIDTH, "lengths": rows}, decay


def _by_layer(model: Any, sums: dict[int, torch.Tensor], length: int, horizon: float) -> list[LiveShare]:
    """Each layer's share after the first `length` tokens, from (H, T) c of the layers with gates."""
    heads, shares = model.config.num_attention_heads, []
    for layer, (_, attention) in enumerate(attentions(model)):
        kv_heads, _ = cached_heads(attention)
        if layer in sums:
            c = sums[layer][:, :length].numpy()
            c = np.repeat(c, heads // len(c), axis=0)  # one gate may serve all query heads of a kv head
            sinks, window = exempt_tokens(attention), sliding_window(attention)
            shares.append(live_share(c, horizon, kv_heads, sinks=sinks, window=window))
        else:
            shares.append(LiveShare(np.ones(heads), np.ones(heads), np.ones(kv_heads)))
    return shares


@torch.no_grad()
def gates_of_texts(
    opened: LoadedModel, windows: Sequence[Window], progress: bool = True
) -> Iterator[dict[int, torch.Tensor]]:
    """Runs each text through a converted model; gives (T, H) log f of its layers with gates, by layer."""
    recorded: dict[int, torch.Tensor] = {}

    def record(layer: int) -> Any:
        return lambda _, __, log_f: recorded.update({layer: log_f[0].cpu()})

    with ExitStack() as hooks:
        for layer, (_, attention) in enumerate(attentions(opened.model)):
            if attention.forget_gate is not None:
                hooks.enter_context(attention.forget_gate.register_forward_hook(record(layer)))
        hooks.enter_context(reading_bar(opened.model, opened.name, sum(len(w.token_ids) for w in windows), progress))
        for window in windows:
            ids = torch.from_numpy(window.token_ids)[None].to(opened.device)
            inner_model(opened.model)(input_ids=ids, use_cache=False)
            yield dict(recorded)


def _row(model: Any, length: int, documents: Sequence[Sequence[LiveShare]]) -> dict[str, Any]:
    """Means over documents at one length, and what they take in bytes and time."""
    ops, reach, cache = (
        np.mean([[getattr(share, name) for share in layers] for layers in documents], axis=0)
        for name in ("ops", "reach", "cache")
    )
    itemsize = next(model.parameters()).element_size()
    base = kept = 0.0
    for layer, (_, attention) in enumerate(attentions(model)):
        window = sliding_window(attention)
        seen = 1.0 if window is None else min(1.0, window / length)  # of the text's tokens
        kv_heads, channels = cached_heads(attention)
        entry = channels * itemsize
        base += seen * kv_heads * entry
        c_bytes = C_BYTES * len(attention.forget_gate.bias) / kv_heads if attention.forget_gate is not None else 0
        kept += seen * float(cache[layer].sum()) * (entry + c_bytes)
    weights = _weight_bytes(model)
    gates = []
    for own, (_, attention) in zip(reach, attentions(model), strict=True):  # heads that share a gate see the same keys
        gates.append(own[:: attention.heads_per_gate] if attention.forget_gate is not None else own)
    return {
        "length": length,
        "documents": len(documents),
        "ops": float(ops.mean()),
        "cache": float(cache.mean()),
        "cache_bytes_per_token": kept,
        "base_bytes_per_token": base,
        "decode_ms": 1e3 * (weights + kept * length) / BANDWIDTH,
        "base_decode_ms": 1e3 * (weights + base * length) / BANDWIDTH,
        "open_heads": [f"{layer}.{head}" for layer, own in enumerate(gates) for head in np.nonzero(own >= 1.0)[0]],
    }


def _weight_bytes(model: Any) -> int:
    """Bytes of the parameters that a decoded token reads: all but an embedding that is not the head's, too."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    rows = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is rows
    return total if tied else total - rows.numel() * rows.element_size()
