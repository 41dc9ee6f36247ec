"""Statistics of watched heads: attention mass by distance, copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from retrofox.heads.watch import BLOCK, Attention, watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUERIES = 1024
"""Queries measured per text and layer, in blocks evenly spread over the text."""
BEYOND = (64, 512, 4096)
"""Distances in tokens beyond which attention mass is counted."""


class HeadMass:
    """Where the attention of every head goes, summed over queries: beyond some distances, to the first tokens."""

    def __init__(self, first_tokens: int = 1, beyond: Sequence[int] = BEYOND):
        self.first_tokens, self.beyond = max(1, first_tokens), tuple(beyond)
        self.sums: dict[int, dict[Any, torch.Tensor]] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        found = self.sums.setdefault(layer, {})
        last = max(0, attention.length - BLOCK)
        number = min(max(1, QUERIES // BLOCK), math.ceil(attention.length / BLOCK))
        for start in sorted({round(last * n / max(1, number - 1)) for n in range(number)}):
            self._block(found, attention, start, min(start + BLOCK, attention.length))

    def _block(self, found: dict[Any, torch.Tensor], attention: Attention, start: int, stop: int) -> None:
        weights = attention.weights(start, stop)
        query = torch.arange(start, stop, device=weights.device)
        distance = query[:, None] - torch.arange(stop, device=weights.device)
        first = self.first_tokens
        seen = (query >= first).float()  # a query among the first tokens has nowhere else to look
        _add(found, "first", weights[..., :first].sum(-1) @ seen, seen.sum())
        for tokens in self.beyond:
            far = (distance > tokens) & (torch.arange(stop, device=weights.device) >= first)
            able = far.any(-1).float()  # queries that have such a key
            _add(found, tokens, (weights * far).sum((1, 2)), able.sum())

    def heads(self) -> list[dict[str, Any]]:
        """Per layer and head: "first_token_mass", "mass_beyond" by distance.

        A mass is a mean over the queries that have a key so far back, the first tokens left out of all but their own;
        None where no query has one.
        """
        rows = []
        for layer, found in sorted(self.sums.items()):
            shares = {name: (sums[:-1] / sums[-1]).tolist() if sums[-1] else None for name, sums in found.items()}
            for head in range(len(next(iter(found.values()))) - 1):
                value = {name: None if share is None else share[head] for name, share in shares.items()}
                beyond = {str(tokens): value[tokens] for tokens in self.beyond}
                rows.append({"layer": layer, "head": head, "first_token_mass": value["first"], "mass_beyond": beyond})
        return rows


def _add(found: dict[Any, torch.Tensor], name: Any, sums: torch.Tensor, count: torch.Tensor) -> None:
    """Adds (H,) sums and their count to the (H + 1,) float64 under a name."""
    new = torch.cat((sums, count[None])).double().cpu()
    found[name] = found[name] + new if name in found else new


class Copies:
    """Copy score of every head on a sequence of `size` random tokens that stands twice in a row.

    The mean over tokens t of the second copy of the attention to the token after t's first occurrence: 1 for a perfect
    induction head, about 1 / T for one that looks everywhere alike.

    Source: Olsson et al., "In-context Learning and Induction Heads" (2022), prefix matching score.
    """

    def __init__(self, size: int, start: int):
        self.size, self.start = size, start
        self.sums: dict[int, torch.Tensor] = {}
        self.texts: dict[int, int] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        total = torch.zeros(attention.query.shape[0], dtype=torch.float64)
        first, last = self.start + self.size, self.start + 2 * self.size - 1  # the last has no token after it to find
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            rows = torch.arange(stop - start, device=attention.query.device)
            sought = rows + start - self.size + 1
            total += attention.weights(start, stop)[:, rows, sought].double().sum(-1).cpu()
        self.sums[layer] = self.sums.get(layer, 0.0) + total / (self.size - 1)
        self.texts[layer] = self.texts.get(layer, 0) + 1

    def scores(self) -> list[list[float]]:
        """Copy scores by layer and head, means over the texts."""
        return [(self.sums[layer] / self.texts[layer]).tolist() for layer in sorted(self.sums)]


def repeated_tokens(vocabulary: int, size: int, bos: int | None, seed: int) -> torch.Tensor:
    """(1, T) int64: `size` random tokens twice in a row, after a `bos` token where there is one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (size,), generator=generator)
    start = [] if bos is None else [torch.tensor([bos])]
    return torch.cat([*start, tokens, tokens])[None]


def copy_scores(
    model: PreTrainedModel, size: int, texts: int = 2, original: bool = False, seed: int = 0
) -> list[list[float]]:
    """Copy scores of a converted model by layer and head, over `texts` sequences of `size` tokens that stand twice."""
    bos = getattr(model.config, "bos_token_id", None)
    copies = Copies(size, 0 if bos is None else 1)
    for number in range(texts):
        ids = repeated_tokens(model.config.vocab_size, size, bos, seed + number)
        watch(model, ids.to(next(model.parameters()).device), copies, original)
    return copies.scores()
