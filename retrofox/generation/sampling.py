"""Options of generation, checked. Importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_sampling(
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    num_beams: int,
    seed: int | None,
) -> None:
    """Raises ValueError for prompts or options that `generate` and `chat` don't take."""
    if not prompts:
        raise ValueError("no prompt given")
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"the prompt {prompt!r} is not UTF-8 text: convert it")
    if not 1 <= max_new_tokens <= 10**15:
        raise ValueError(f"max_new_tokens must be at least 1 and at most 10^15, got {max_new_tokens}")
    if temperature != 0 and not 1e-6 <= temperature < math.inf:  # below, logits / temperature leaves float32
        raise ValueError(f"temperature must be 0 (greedy), or at least 1e-6 and finite; got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if top_p < 1 and temperature == 0:
        raise ValueError(f"top_p {top_p} has no effect on greedy decoding: give a temperature above 0 too")
    if not 1 <= num_beams <= 10**15:
        raise ValueError(f"num_beams must be at least 1 and at most 10^15, got {num_beams}")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must lie between -2^63 and 2^63 - 1, got {seed}")
    if seed is not None and temperature == 0:
        raise ValueError(f"seed {seed} has no effect on greedy decoding: give a temperature above 0 too")
