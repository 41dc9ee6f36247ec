"""Options of generation, checked. Importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

CACHES = ("auto", "full", "forgetting", "none")
"""Kinds of caches, see `caches.new_cache`."""


def check_sampling(
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    num_beams: int,
    seed: int | None,
    cache: str = "auto",
) -> None:
    """Raises ValueError for prompts or options that `generate` and `chat` don't take."""
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {cache!r}")
    if not prompts:
        raise ValueError("no prompt given")
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"the prompt {prompt!r} is not UTF-8 text: convert it")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if temperature != 0 and not 1e-6 <= temperature < math.inf:  # below, logits / temperature leaves float32
        raise ValueError(f"temperature must be 0 (greedy), or at least 1e-6 and finite; got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if top_p < 1 and temperature == 0:
        raise ValueError(f"top_p {top_p} has no effect on greedy decoding: give a temperature above 0 too")
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1, got {num_beams}")
    if seed is not None and temperature == 0:
        raise ValueError(f"seed {seed} has no effect on greedy decoding: give a temperature above 0 too")
