"""How many keys the gates leave alive, in closed form. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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
