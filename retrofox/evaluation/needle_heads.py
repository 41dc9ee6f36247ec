"""Which heads look facts up: each head's attention to facts planted in the user's texts, when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrofox.data.windows import Window
from retrofox.heads.needles import LONGEST, plant
from retrofox.heads.start import needle_scores
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.plots import tokens_label

PROMPTS, LEAST = 8, 512
"""Prompts, and tokens that one needs at least: a text or model shorter than that tells nothing."""
LOOKS_UP = 0.1
"""Share of a head's attention from which it is said to look facts up."""
SHOWN = 8


def measure_needle_heads(opened: LoadedModel, windows: Sequence[Window]) -> list[list[float]] | None:
    """(layers, H): attention to the planted facts' values, mean over prompts; None where texts or model are too short.

    The model runs as it is, its gates on. Prompts have at most LONGEST tokens and lie inside the trained length.
    """
    texts = [window.token_ids for window in windows]
    trained = int(opened.model.config.max_position_embeddings)
    length = min(LONGEST, trained, max((len(text) for text in texts), default=0))
    if length < LEAST:
        return None
    return needle_scores(opened.model, plant(texts, opened.tokenizer, length, PROMPTS)).tolist()


def open_heads_sentence(live: Mapping[str, Any], heads: Sequence[Mapping[str, Any]]) -> str:
    """How many heads see the whole of the longest text, and how many of them look facts up."""
    row = live["lengths"][-1]
    whole = set(row["open_heads"])
    where = f"all of {tokens_label(row['length'])} tokens"
    if not whole:
        return f"no head sees {where}"
    scores = {f"{head['layer']}.{head['head']}": head.get("needle_attention") for head in heads}
    told = {name: score for name, score in scores.items() if score is not None}
    count = f"{len(whole)} head{'s' * (len(whole) > 1)} of {len(heads)} see{'s' * (len(whole) == 1)} {where}"
    if not told:
        return f"{count}: {_names(sorted(whole, key=_place))}"
    looking = sorted((n for n, score in told.items() if score >= LOOKS_UP), key=lambda n: -told[n])
    seeing = [f"{name} ({100 * told[name]:.0f} %)" for name in looking if name in whole]
    closed = [f"{name} ({100 * told[name]:.0f} %)" for name in looking if name not in whole]
    most = f"at least {100 * LOOKS_UP:.0f} % of attention on a planted fact"
    text = f"{count}; {len(seeing)} of these look facts up ({most})"
    text += f": {_names(seeing)}" if seeing else ""
    return text + (f"; closed heads that would: {_names(closed)}" if closed else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _place(name: str) -> tuple[int, int]:
    layer, _, head = name.partition(".")
    return int(layer), int(head)
