"""Facts planted in text and asked for at its end, to find the heads that look them up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrofox.data.synthetic_facts import TELLINGS, WORD

PROMPTS = 16
LONGEST = 2048
"""Tokens of a prompt, at most."""
DEEPEST = 0.85
"""Facts stand at depths from 0, the prompt's start, to this."""


@dataclass
class Needle:
    """A prompt that ends with its answer.

    Attributes:
        token_ids: (1, T) int64: text, in it the fact, then the question and the fact again.
        value: positions of the fact's value where it is first told, and of the token before it.
        answer: positions that predict the value where it is told again.
    """

    token_ids: torch.Tensor
    value: range
    answer: range


def needle_attention(weights: torch.Tensor, value: range) -> torch.Tensor:
    """(H,) attention to the value, mean over queries: weights (H, queries, keys) of the queries that answer."""
    return weights[..., value.start : value.stop].sum(-1).mean(-1)


def by_kv_head(scores: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(layers, kv heads): of (layers, H) scores the largest among the query heads of each kv head."""
    return scores.unflatten(-1, (kv_heads, -1)).amax(-1)


def strongest(scores: torch.Tensor, number: int) -> list[tuple[int, int]]:
    """(layer, kv head) of the `number` largest of (layers, kv heads) scores, in order of layers."""
    order = scores.flatten().argsort(descending=True, stable=True)[:number].tolist()
    return sorted(divmod(place, scores.shape[1]) for place in order)


def plant(documents: Sequence[np.ndarray], tokenizer: Any, length: int, prompts: int = PROMPTS) -> list[Needle]:
    """Prompts of up to `length` tokens, each with a fact of the documents' own words planted at a depth of its own."""
    special = np.array(sorted({*tokenizer.all_special_ids}))
    hay = np.concatenate(documents)
    hay = hay[~np.isin(hay, special)]
    words = sorted({*WORD.findall(tokenizer.decode(hay[:20_000]))}) or ["entry"]
    start = list(tokenizer("").input_ids)
    draw = random.Random(0)
    found = []
    for number in range(prompts):
        before, value, after, question = _fact(draw, words, number, tokenizer)
        rest = len(start) + 2 * len(before) + 2 * len(value) + len(after) + len(question)
        room = min(length - rest, len(hay))
        if room < 1:
            raise ValueError(
                f"open_heads: prompts of {length} tokens can't hold a fact and its question, {rest} tokens: name the "
                "heads, as in open_heads: [[LAYER, KV_HEAD], ...]"
            )
        at = draw.randrange(len(hay) - room + 1)
        text = hay[at : at + room].tolist()
        cut = round(DEEPEST * number / max(1, prompts - 1) * room)
        told = [*start, *text[:cut], *before]
        asked = [*told, *value, *after, *text[cut:], *question, *before]
        found.append(
            Needle(
                torch.tensor([[*asked, *value]]),
                range(len(told) - 1, len(told) + len(value)),
                range(len(asked) - 1, len(asked) + len(value) - 1),
            )
        )
    return found


def _fact(draw: random.Random, words: Sequence[str], number: int, tokenizer: Any) -> tuple[list[int], ...]:
    """Tokens of a fact up to its value, of its value, of its end, and of the question that it answers."""
    telling, question = TELLINGS[number % len(TELLINGS)]
    key = " ".join(draw.choices(words, k=2))
    value = " ".join(draw.choices(words, k=4)) if number % 2 else str(draw.randint(10**5, 10**8))
    before, after = telling.format(key=key, value="\0").split("\0")
    pieces = ("\n" + before.rstrip(), " " + value, after + "\n", "\n" + question.format(key=key))
    return tuple(list(tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces)
