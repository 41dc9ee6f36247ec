"""Values of a FoxSpec's fields: which are allowed, and the forms in which they are written."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

TOKENS = frozenset(
    {
        *("rope_length", "max_wavelength", "layer_max_wavelength", "half_life", "max_half_life"),
        *("sink_tokens", "log_n"),
    }
)
"""Fields of a FoxSpec that count tokens, alone, in a list or in a mapping."""
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rope_factor": (lambda x: 1 <= x <= 1e6, "a number from 1 to 1e6, times the trained length"),
    "rope_length": (lambda x: 1 <= x < math.inf, "a trained length in tokens, 1 or more"),
    "beta_fast": (lambda x: 0 < x <= 1e6, "a number of turns within the trained length, above 0 and at most 1e6"),
    "beta_slow": (lambda x: 0 < x <= 1e6, "a number of turns within the trained length, above 0 and at most 1e6"),
    "max_wavelength": (lambda x: x > 0, "a positive number of tokens"),
    "max_half_life": (lambda x: 1 <= x < math.inf, "a number of tokens, 1 or more"),
    "sink_tokens": (lambda x: isinstance(x, int) and 0 <= x < 2**31, "an integer >= 0 and below 2^31"),
    "log_n": (lambda x: 2 <= x < math.inf, "a trained length of at least 2 tokens"),
    "horizon": (lambda x: 0 < x <= 1e4, "the nats a key may decay by, above 0 and at most 10,000, say 16"),
}
"""Field of a FoxSpec -> whether it may have a value, and words for the values that it may have."""


def check_number(name: str, value: Any) -> None:
    """Raises ValueError for a value that a field of NUMBERS can't have."""
    allowed, wanted = NUMBERS[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not allowed(value):
        raise ValueError(f"{name} must be {wanted}; got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises ValueError for a name that is not allowed, with the nearest one that is."""
    if value not in (known := tuple(allowed)):
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}{hint and f' ({hint})'}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A question with the nearest of the known names; "" where none is near."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def parts_of(value: Any, known: tuple[str, ...], *more: str) -> tuple[str, ...]:
    """Names of Pro parts, each once, of a list, or of text: names between commas, "all" (without `more`) or "none"."""
    if value in ("all", "none"):
        return known if value == "all" else ()
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else (value,)
    for part in parts:
        one_of("pro", part, (*known, *more))
    return tuple(dict.fromkeys(parts))


def half_life_of(value: Any) -> tuple[float, float]:
    """(shortest, longest) half-life in tokens."""
    try:
        low, high = (float(x) for x in value)
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if not 0.01 <= low <= high <= 1e12:
        raise ValueError(
            f"half_life takes two numbers of tokens, shortest and longest, 0.01 <= shortest <= longest <= 1e12; got "
            f"{value}"
        )
    return low, high


def wavelengths_of(values: Any) -> dict[int, float]:
    """{layer: tokens} of a mapping."""
    try:
        found = {int(layer): float(tokens) for layer, tokens in values.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        found = {0: math.nan}
    if not all(tokens >= 0 for tokens in found.values()):
        raise ValueError(
            f"layer_max_wavelength takes tokens per layer, 0 or more, such as {{0: .inf, 20: 0}}; got {values}"
        )
    return found


def open_heads_of(value: Any, measured: bool) -> int | tuple[tuple[int, int], ...]:
    """How many kv heads are to be found by measuring, or the (layer, kv head) of each, sorted."""
    if _is_count(value) and (value == 0 or measured):
        return value
    pairs: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_count, pair)) for pair in pairs):
        raise ValueError(
            f"open_heads takes [[layer, kv head], ...], or with init measured a number of kv heads; got {value!r}"
        )
    return tuple(sorted({(layer, kv_head) for layer, kv_head in pairs}))


def require_places(spec: Any, layers: int, kv_heads: int) -> None:
    """Raises ValueError where a FoxSpec names layers or open heads that a model lacks."""
    too_deep = [i for i in spec.layer_max_wavelength if not 0 <= i < layers]
    if too_deep:
        raise ValueError(f"layer_max_wavelength names layers {too_deep[:5]}; the model has 0..{layers - 1}")
    open_heads = spec.open_heads
    if isinstance(open_heads, int):
        lacking = open_heads > layers * kv_heads
    else:
        lacking = any(layer >= layers or kv_head >= kv_heads for layer, kv_head in open_heads)
    if lacking:
        raise ValueError(
            f"open_heads {open_heads}: the model has {kv_heads} kv heads in each of layers 0..{layers - 1}, "
            f"{layers * kv_heads} in all: set fox.open_heads, to a tenth of them as the default does"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
