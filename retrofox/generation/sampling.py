"""Options of generation, checked. Importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

CACHES = ("auto", "full", "forgetting")
"""Kinds of caches, see `generate.new_cache`."""


def check_sampling(
    prompts: Sequence[str], max_new_tokens: int, temperature: float, top_p: float, seed: int | None, cache: str = "auto"
) -> None:
    """Raises ValueError for prompts or options that `generate` and `chat` don't take."""
    for allowed, said in (
        (cache in CACHES, f"cache must be one of {', '.join(CACHES)}, got {cache!r}"),
        (len(prompts) > 0, "no prompt given"),
        (all(p == p.encode(errors="replace").decode() for p in prompts), "a prompt is not UTF-8 text: convert it"),
        (max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}"),
        (  # below 1e-6, logits / temperature leaves float32
            temperature == 0 or 1e-6 <= temperature < math.inf,
            f"temperature must be 0 (greedy), or at least 1e-6 and finite; got {temperature}",
        ),
        (0 < top_p <= 1, f"top_p must lie in (0, 1], got {top_p}"),
        (seed is None or 0 <= seed < 2**63, f"seed must be at least 0 and below 2^63, got {seed}"),
    ):
        if not allowed:
            raise ValueError(said)
    idle = [f"top_p {top_p}"] * (top_p != 1) + [f"seed {seed}"] * (seed is not None)
    if idle and temperature == 0:
        raise ValueError(f"{idle[0]} has no effect on greedy decoding: give a temperature above 0 too")
