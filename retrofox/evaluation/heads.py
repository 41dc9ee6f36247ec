"""Attention of a model's heads, measured over a text: for `retrofox inspect`, before against after a retrofit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrofox.anatomy import is_converted
from retrofox.calibration.heads import BEYOND, HeadMass, Maps, copy_scores, texts_of, together, watch, watchable
from retrofox.data.windows import Window
from retrofox.loading.opened import Opened
from retrofox.support.report import progress_bar

RETRIEVAL = 0.1
"""Copy score from which a head counts as a retrieval head (Wu et al., "Retrieval Head", 2024, take the same share)."""
LONGEST_COPY = 512
"""Tokens of the random sequence that stands twice; shorter where the length asked for has no room for it."""
COPY_TEXTS = 2


def look(opened: Opened, images: dict[str, dict[str, Any]], progress: bool, reads: dict[str, Any]) -> dict[str, Any]:
    """One entry of "attention"; adds its maps to `images`, as "LAYER.HEAD" or for the second "against-LAYER.HEAD"."""
    heads, found = measure_heads(opened, progress=progress, **reads)
    require_finite(heads, opened.source)
    tokens = len(reads["windows"][0].token_ids)
    for (layer, head), image in found.items():
        name = f"{layer}.{head}"
        drawn = {**image, "tokens": tokens, "title": f"head {name} of {opened.name}"}
        images[f"against-{name}" if name in images else name] = drawn
    return {"label": opened.name, "source": opened.source, "heads": heads, "summary": summarise_heads(heads)}


def measure_heads(
    opened: Opened,
    windows: Sequence[Window],
    length: int,
    *,
    prune_eps: float | None = None,
    maps: Sequence[tuple[int, int]] = (),
    progress: bool = True,
) -> tuple[list[dict[str, Any]], dict[tuple[int, int], dict[str, np.ndarray]]]:
    """Per head of a converted or unconverted model: attention mass by distance, copy score, what pruning skips.

    Over each text, about 1024 evenly spread queries; attention of a block of 64 queries exists at one time. A base
    model runs in its converted form without gates, which gives the base's attention.

    Args:
        length: the random sequence of the copy score stands twice in it.
        prune_eps: share of a query's attention that pruning may lose; adds "prune_skips".
        maps: (layer, head) pairs whose attention and forget-gate matrix over the first text are wanted.

    Returns:
        One dict per head, as `HeadMass.heads` with "copy_score" and "retrieval"; and by (layer, head) the images
        "attention" and "decay", (P, P) float32, P at most 512.

    Raises:
        ValueError: a family that can't be converted, or a map of a head that does not exist.
    """
    original = not is_converted(opened.model)
    model = watchable(opened.model)
    spec = {} if opened.fox is None else opened.fox
    _require_heads(model.config, maps)
    mass = HeadMass(spec.get("sink_tokens") or 1, prune_eps=prune_eps)
    drawn = Maps(maps)
    size = max(2, min(LONGEST_COPY, length // 2))
    with progress_bar("texts", progress) as bar:
        task = bar.add_task(f"{opened.name}, heads", total=len(windows) + COPY_TEXTS)
        for number, ids in enumerate(texts_of(windows, opened.device)):
            watch(model, ids, together(mass, drawn) if maps and not number else mass, original)
            bar.advance(task)
        copied = copy_scores(model, size, COPY_TEXTS, original)
        bar.advance(task, COPY_TEXTS)
    heads = mass.heads()
    layers = sorted({head["layer"] for head in heads})
    for head in heads:
        score = copied[layers.index(head["layer"])][head["head"]]
        head |= {"copy_score": score, "retrieval": score >= RETRIEVAL}
    images = {place: {name: image.numpy() for name, image in found.items()} for place, found in drawn.found.items()}
    return heads, images


def head_places(asked: Sequence[str]) -> list[tuple[int, int]]:
    """(layer, head) of every "LAYER.HEAD"; raises ValueError where one is written otherwise."""
    places = []
    for text in asked:
        layer, dot, head = text.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise ValueError(f"a head is named LAYER.HEAD, such as 12.3; got {text!r}")
        places.append((int(layer), int(head)))
    return list(dict.fromkeys(places))


def check_prune_eps(eps: float | None) -> None:
    """Raises ValueError for an eps that is no share of the attention."""
    if eps is not None and not (math.isfinite(eps) and 0 < eps < 1):
        raise ValueError(
            f"prune_eps must lie between 0 and 1 (the share of attention that may be lost), such as 1e-4; got {eps}"
        )


def _require_heads(config: Any, maps: Sequence[tuple[int, int]]) -> None:
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    for layer, head in maps:
        if layer >= layers or head >= heads:
            raise ValueError(f"there is no head {layer}.{head}: layers are 0 to {layers - 1}, heads 0 to {heads - 1}")


def summarise_heads(heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over heads of the masses and of what pruning skips, and the retrieval heads by name, the best first."""
    best = sorted((h for h in heads if h["retrieval"]), key=lambda h: -h["copy_score"])
    summary: dict[str, Any] = {
        "first_token_mass": _mean([h["first_token_mass"] for h in heads]),
        "mass_beyond": {str(d): _mean([h["mass_beyond"][str(d)] for h in heads]) for d in BEYOND},
        "retrieval_heads": [f"{h['layer']}.{h['head']}" for h in best],
        "best_copy_score": max(h["copy_score"] for h in heads),
    }
    if "prune_skips" in heads[0]:
        summary["prune_skips"] = _mean([h["prune_skips"] for h in heads])
    return summary


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def require_finite(heads: Sequence[dict[str, Any]], source: str) -> None:
    """Raises ValueError where a head's attention is no number."""
    broken = [h for h in heads if not math.isfinite(h["copy_score"]) or not _finite(h["first_token_mass"])]
    if broken:
        named = ", ".join(f"layer {h['layer']} head {h['head']}" for h in broken[:5])
        raise ValueError(f"the attention of {source} is not finite, such as {named}: its weights are damaged")


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
