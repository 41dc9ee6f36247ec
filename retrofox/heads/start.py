"""Starting half-lives of gates: longer for heads that attend farther; heads that look facts up start open."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from retrofox.config_values import kv_heads_of, trained_length
from retrofox.data.sources import Text, as_source
from retrofox.data.windows import documents
from retrofox.fox_spec import FoxSpec
from retrofox.half_lives import log_spaced, open_half_life
from retrofox.heads.needles import LONGEST, Needle, by_kv_head, needle_attention, plant, strongest
from retrofox.heads.watch import BLOCK, Attention, watch
from retrofox.support.report import reading_bar

logger = logging.getLogger(__name__)
DOCUMENTS = 4
LENGTH = 4096
"""Tokens read of each document, at most: less where the model was trained to less."""
SHORT = 256
"""Tokens of a document below which its heads' distances say little."""
QUERIES = 1024
"""Queries measured in each document and layer, in blocks evenly spread over its second half."""


@dataclass
class Start:
    """Measurements of heads and the starts chosen from them, by layer.

    Attributes:
        distances: median attention distance of each head, in tokens.
        half_lives: half-life that each gate starts with, in tokens.
        needle_attention: attention of each kv head to planted facts; empty where none were planted.
        open_heads: (layer, kv head) of those that start open.
    """

    distances: list[list[int]]
    half_lives: list[list[float]]
    needle_attention: list[list[float]]
    open_heads: list[tuple[int, int]]


class Distances:
    """Attention of each head by distance, the first tokens left out, summed over queries.

    Attributes:
        mass: layer -> (H, T) float64, on the layer's device: on a CPU the threads of several trainings would clash. T
            is the length of the first text, and no later one is longer.
    """

    def __init__(self, first_tokens: int):
        self.first_tokens = first_tokens
        self.mass: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        heads, length, _ = attention.query.shape
        first = max(length // 2, self.first_tokens + 1)
        number = max(1, min(QUERIES, length - first) // BLOCK)
        mass = torch.zeros(heads, length, dtype=torch.float64, device=attention.query.device)
        for start in torch.linspace(first, max(first, length - BLOCK), number).int().tolist():
            stop = min(start + BLOCK, length)
            keys = torch.arange(self.first_tokens, stop, device=mass.device)
            distance = torch.arange(start, stop, device=mass.device)[:, None] - keys
            weights = attention.weights(start, stop)[..., self.first_tokens :]
            mass.index_add_(1, distance.clamp_min(0).flatten(), weights.flatten(1).double())
        known = self.mass.setdefault(layer, torch.zeros_like(mass))
        known[:, :length] += mass

    def medians(self) -> list[list[int]]:
        """Distance in tokens within which half of a head's attention lies, by layer and head."""
        found = []
        for _, mass in sorted(self.mass.items()):
            sums = mass.cpu().cumsum(1)
            found.append(torch.searchsorted(sums, sums[:, -1:] / 2).flatten().tolist())
        return found


def half_lives_by_distance(
    distances: torch.Tensor, shortest: float, longest: float, open_heads: Sequence[tuple[int, int]] = ()
) -> torch.Tensor:
    """(layers, kv heads) half-lives, log-spaced over a model's kv heads, the longer the farther a head looks.

    Args:
        distances: (layers, kv heads) in tokens.
        shortest, longest: the first and the last of them, in tokens.
        open_heads: (layer, kv head) that are left out of the order; theirs is infinite.
    """
    is_open = torch.zeros(distances.shape, dtype=torch.bool)
    for place in open_heads:
        is_open[place] = True
    order = distances.double().masked_fill(is_open, math.inf).flatten().argsort(stable=True)
    closed = int((~is_open).sum())
    found = torch.full((len(order),), math.inf, dtype=torch.float64)
    found[order[:closed]] = torch.tensor(log_spaced(shortest, longest, closed), dtype=torch.float64)
    return found.view(distances.shape)


@torch.no_grad()
def measure_start(model: PreTrainedModel, tokenizer: Any, texts: Sequence[Text]) -> Start:
    """Measures every head of a converted model, run as its base, on texts.

    Of all kv heads the `open_heads` that pay most attention to planted facts start open. The half-lives of the others
    are log-spaced between the ends of the spec's `half_life`, in order of their attention distance: the mean of their
    query heads' medians, all of which start with the same half-life, since a kv head's cache is as long as the longest.

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: no text, no tokenizer, or a model trained to too few tokens for planted facts.
    """
    spec = FoxSpec.from_dict(model.config.fox)
    assert spec.half_life is not None  # resolved
    trained, training = trained_length(model.config), model.training
    documents = documents_of(texts, tokenizer)
    if (longest := max(map(len, documents))) < min(SHORT, trained):
        logger.warning(
            "heads are measured on %d tokens, too few to tell near heads from far ones: give texts of %s or more",
            *(longest, f"{min(LENGTH, trained):,}"),
        )
    kv_heads = kv_heads_of(model.config)
    distances = Distances(max(1, spec.sink_tokens))
    number, chosen = (spec.open_heads, ()) if isinstance(spec.open_heads, int) else (0, spec.open_heads)
    read = [ids[: min(LENGTH, trained)] for ids in sorted(documents, key=len, reverse=True)[:DOCUMENTS]]
    needles = plant(documents, tokenizer, min(LONGEST, trained)) if number else []
    scores = torch.empty(0)
    tokens = sum(map(len, read)) + sum(needle.token_ids.numel() for needle in needles)
    model.eval()
    try:
        with reading_bar(model, "measuring heads", tokens):
            for ids in read:
                watch(model, torch.from_numpy(ids).long()[None], distances, original=True)
            if needles:
                scores = by_kv_head(needle_scores(model, needles, original=True), kv_heads)
                chosen = strongest(scores, number)
    finally:
        model.train(training)
    medians = distances.medians()
    by_group = torch.tensor(medians, dtype=torch.float64).unflatten(-1, (kv_heads, -1)).mean(-1)
    closed = half_lives_by_distance(by_group, *spec.half_life, chosen)
    lives = closed.clamp_max(open_half_life(spec, trained))
    if spec.gate_heads == "query":
        lives = lives.repeat_interleave(len(medians[0]) // kv_heads, -1)
    return Start(medians, lives.tolist(), scores.tolist(), list(chosen))


def needle_scores(model: PreTrainedModel, needles: Sequence[Needle], original: bool = False) -> torch.Tensor:
    """(layers, H): each head's attention to the planted values, mean over prompts; `original`: as the base model."""
    scores: dict[int, torch.Tensor] = {}
    for needle in needles:

        def visit(layer: int, attention: Attention, needle: Needle = needle) -> None:
            found = needle_attention(attention.weights(needle.answer.start, needle.answer.stop), needle.value)
            scores[layer] = scores.get(layer, 0) + found.double() / len(needles)

        watch(model, needle.token_ids, visit, original=original)
    return torch.stack([scores[layer].cpu() for layer in sorted(scores)])


TOKENS_READ = 1 << 21
"""Most tokens read of the sources together: a few seconds of tokenising."""


def documents_of(files: Sequence[Text], tokenizer: Any) -> list[np.ndarray]:
    """Documents as tokens, int32, each source giving its first documents up to its weight's share of TOKENS_READ.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no source, no tokenizer, or no text in the sources.
    """
    if not files:
        raise ValueError("no text to measure heads on: name at least one file")
    if tokenizer is None:
        raise ValueError(
            "measuring heads on text needs a tokenizer, and the model has none: put its files beside the model"
        )
    found: list[np.ndarray] = []
    sources = [as_source(file) for file in files]
    weights = sum(source.weight for source in sources)
    for source in sources:
        left = max(1, int(TOKENS_READ * source.weight / weights))
        for _, ids in documents([source], tokenizer):
            found.append(ids[:left])
            left -= len(ids)
            if left <= 0:
                break
    if not any(len(ids) for ids in found):
        raise ValueError(f"no text in {', '.join(source.path for source in sources)}")
    return found
