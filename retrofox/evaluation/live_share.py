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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrofox.anatomy import attentions, exempt_tokens, inner_model, sliding_window
from retrofox.data.windows import Window
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.report import progress_bar

HORIZON = 16.0
"""Nats at which a key counts as forgotten where the model has no horizon of its own: e^-16 is 1e-7."""
LENGTHS = (8192, 32768, 131072)
C_BYTES = 8
"""Bytes of c that a cache keeps per token and query head: two float32."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory, by its data sheet: decoding is predicted from it, not measured."""


@dataclass(frozen=True)
class LiveShare:
    """Shares of one layer, by head, means over the batch.

    Attributes:
        ops: (H,) float64, live query-key pairs of each query head over those it has without gates.
        reach: (H,) float64, keys that the last query sees over those it sees without gates.
        cache: (Hkv,) float64, keys that each kv head must keep after the last token, likewise.
    """

    ops: np.ndarray
    reach: np.ndarray
    cache: np.ndarray


def live_share(
    c: np.ndarray | torch.Tensor, horizon: float, kv_heads: int, *, sinks: int = 0, window: int | None = None
) -> LiveShare:
    """The live share of one layer after a text of T tokens.

    Args:
        c: (B, H, T) float64, sums of log f in nats from the text's start; it never rises along T.
        horizon: t > 0 in nats.
        kv_heads: Hkv, a divisor of H; query heads h * H / Hkv .. (h + 1) * H / Hkv - 1 read kv head h.
        sinks: first tokens that never decay.
        window: tokens that a query of the layer sees, its own among them; None = all before it.
    """
    c = np.asarray(c, np.float64)
    batch, heads, length = c.shape
    assert horizon > 0
    assert heads % kv_heads == 0, f"{heads} query heads, {kv_heads} kv heads"
    assert (np.diff(c, axis=-1) <= 0).all(), "c rises along the text"
    query = np.arange(length)
    start = np.zeros(length, np.int64) if window is None else np.maximum(0, query - window + 1)
    live = np.empty((batch, heads, length))
    for row in range(batch):
        for head in range(heads):
            falling = -c[row, head]
            first = np.searchsorted(falling, falling - horizon, side="right")
            first = np.maximum(first, start)
            live[row, head] = query - first + 1 + np.clip(np.minimum(sinks, first) - start, 0, None)
    visible = query - start + 1
    last = live[..., -1] / visible[-1]
    return LiveShare(
        ops=(live.sum(-1) / visible.sum()).mean(0),
        reach=last.mean(0),
        cache=last.reshape(batch, kv_heads, -1).max(-1).mean(0),
    )


@torch.no_grad()
def measure_live_share(
    opened: LoadedModel,
    windows: Sequence[Window],
    horizon: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    progress: bool = True,
) -> dict[str, Any]:
    """The live share of a converted model on real text, at each length that a text reaches.

    Args:
        windows: texts; each counts at every length that it has, by its first tokens.
        horizon: in nats; None = the model's own, else HORIZON.

    Returns:
        {"horizon", "bandwidth", "lengths": [{"length", "documents", "ops", "cache", "cache_bytes_per_token",
        "base_bytes_per_token", "decode_ms", "base_decode_ms", "open_heads"}]}; shares are means over layers and heads,
        bytes are those that keys, values and c take after the last token, divided by the text's tokens. Decoding's
        milliseconds are the time that BANDWIDTH needs to read weights and cache once: no token of one text takes less.
        An open head, "LAYER.HEAD", is a query head that sees the whole text at that length.

    Raises:
        ValueError: no text is as long as the shortest length.
    """
    nats: float = horizon or (opened.fox or {}).get("horizon") or HORIZON
    longest = max((len(window.token_ids) for window in windows), default=0)
    wanted = sorted({length for length in lengths if length <= longest})
    if not wanted:
        raise ValueError(f"the live share needs a text of at least {min(lengths)} tokens, the longest has {longest}")
    found: dict[int, list[list[LiveShare | None]]] = {length: [] for length in wanted}
    with progress_bar("tokens", progress) as bar:
        task = bar.add_task(f"{opened.name}, live share", total=sum(len(w.token_ids) for w in windows))
        for window in windows:
            own = [length for length in wanted if length <= len(window.token_ids)]
            if own:
                ids = torch.from_numpy(window.token_ids[: own[-1]])[None].to(opened.device)
                with listening(opened.model) as heard:
                    inner_model(opened.model)(input_ids=ids, use_cache=False)
                for length in own:
                    found[length].append(_by_layer(opened.model, heard, nats, length))
            bar.advance(task, len(window.token_ids))
    rows = [_row(opened.model, length, found[length]) for length in wanted]
    return {"horizon": nats, "bandwidth": BANDWIDTH, "lengths": rows}


@contextmanager
def listening(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, forward passes leave c (B, H, T) float64 of each layer with gates here, by layer."""
    heard: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, arguments: Any, log_f: torch.Tensor) -> None:
            heard[layer] = log_f.detach().double().cumsum(-2).transpose(-1, -2).cpu()

        return hook

    gates = [attention.forget_gate for _, attention in attentions(model)]
    hooks = [gate.register_forward_hook(keep(n)) for n, gate in enumerate(gates) if gate is not None]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _by_layer(model: Any, heard: dict[int, torch.Tensor], horizon: float, length: int) -> list[LiveShare | None]:
    """One entry for each layer, None for a layer without gates."""
    heads, kv_heads = model.config.num_attention_heads, _kv_heads(model.config)
    shares: list[LiveShare | None] = []
    for layer, (_, attention) in enumerate(attentions(model)):
        if layer not in heard:
            shares.append(None)
            continue
        c = heard[layer][..., :length].numpy()
        c = np.repeat(c, heads // c.shape[1], axis=1)  # one gate may serve all query heads of a kv head
        window = sliding_window(attention)
        shares.append(live_share(c, horizon, kv_heads, sinks=exempt_tokens(attention), window=window))
    return shares


def _row(model: Any, length: int, documents: Sequence[Sequence[LiveShare | None]]) -> dict[str, Any]:
    config = model.config
    heads, kv_heads, layers = config.num_attention_heads, _kv_heads(config), list(attentions(model))
    ops, cache = np.ones((len(layers), heads)), np.ones((len(layers), kv_heads))
    reach = np.ones((len(layers), heads))
    for layer in range(len(layers)):
        own = [shares[layer] for shares in documents]
        known = [share for share in own if share is not None]
        if known:
            ops[layer] = np.mean([share.ops for share in known], axis=0)
            cache[layer] = np.mean([share.cache for share in known], axis=0)
            reach[layer] = np.mean([share.reach for share in known], axis=0)
    itemsize = next(model.parameters()).element_size()
    base = kept = 0.0
    for layer, (_, attention) in enumerate(layers):
        window = sliding_window(attention)
        seen = 1.0 if window is None else min(1.0, window / length)  # of the text's tokens
        entry = 2 * attention.head_dim * itemsize
        base += seen * kv_heads * entry
        c_bytes = C_BYTES * heads / kv_heads if attention.forget_gate is not None else 0
        kept += seen * float(cache[layer].sum()) * (entry + c_bytes)
    weights = _weight_bytes(model)
    still_open = [f"{layer}.{head}" for layer, head in zip(*np.nonzero(reach >= 1.0), strict=True)]
    return {
        "length": length,
        "documents": len(documents),
        "ops": float(ops.mean()),
        "cache": float(cache.mean()),
        "cache_bytes_per_token": kept,
        "base_bytes_per_token": base,
        "decode_ms": 1e3 * (weights + kept * length) / BANDWIDTH,
        "base_decode_ms": 1e3 * (weights + base * length) / BANDWIDTH,
        "open_heads": still_open,
    }


def _weight_bytes(model: Any) -> int:
    """Bytes of the parameters that a decoded token reads: all but an embedding that is not the head's, too."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    rows = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is rows
    return total if tied else total - rows.numel() * rows.element_size()


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
