"""How many keys the gates leave alive, in closed form. Importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from retrofox.fox_spec import FoxSpec
from retrofox.half_lives import initial_bias, log_spaced, open_half_life

HORIZON = 16.0
"""Nats by which a key of a model without a horizon has decayed when it counts as forgotten."""
LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072}


def live_shares(rates: Sequence[Sequence[float]], horizon: float, kv_heads: int) -> dict[str, float]:
    """Live shares of operations and of the cache, as if every token of a head decayed alike.

    With s = min(1, horizon / rate / length) of each head, operations are 2 s - s^2 on average, and the cache keeps for
    each kv head the largest s of its query heads.

    Args:
        rates: by layer and head, nats by which a token decays what came before it: the mean of -log f.
    """
    found, group = {}, max(1, len(rates[0]) // kv_heads)
    for name, length in LENGTHS.items():
        seen = [[min(1.0, horizon / max(rate, 1e-12) / length) for rate in heads] for heads in rates]
        every = [2 * share - share * share for heads in seen for share in heads]
        kept = [max(heads[start : start + group]) for heads in seen for start in range(0, len(heads), group)]
        found[f"live_operations_{name}"] = sum(every) / len(every)
        found[f"live_cache_{name}"] = sum(kept) / len(kept)
    return found


def live_at_start(spec: FoxSpec, trained_length: int, layers: int, heads: int, kv_heads: int) -> dict[str, float]:
    """Live shares before training, by the half-lives that a resolved spec with gates starts with.

    With init "measured" a text decides which heads are near, far or open, but not how many.
    """
    number = spec.open_heads if isinstance(spec.open_heads, int) else len(spec.open_heads)
    opened = math.log(2.0) / open_half_life(spec, trained_length)
    bound = 0.0 if spec.max_half_life is None else math.log(2.0) / spec.max_half_life
    if spec.init == "measured":  # the query heads of a kv head start alike
        assert spec.half_life is not None
        closed = log_spaced(*spec.half_life, layers * kv_heads - number)
        rates = [max(opened, math.log(2.0) / life) + bound for life in closed] + [opened] * number
        return live_shares([rates], spec.horizon or HORIZON, len(rates))
    biases = initial_bias(spec, kv_heads if spec.gate_heads == "kv" else heads)
    rows = [[math.log1p(math.exp(-bias)) + bound for bias in biases] for _ in range(layers)]
    group = max(1, len(biases) // kv_heads)
    for layer, kv_head in () if isinstance(spec.open_heads, int) else spec.open_heads:
        rows[layer][kv_head * group : (kv_head + 1) * group] = [opened] * group
    return live_shares(rows, spec.horizon or HORIZON, kv_heads)


def shares_text(live: Mapping[str, float]) -> str:
    """Live shares of operations and cache by length, as a log line and a plan have them."""
    return " ".join(f"{n} {live[f'live_operations_{n}']:.0%}/{live[f'live_cache_{n}']:.0%}" for n in LENGTHS)
