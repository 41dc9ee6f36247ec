"""Loss and argmax at chosen tokens of texts, by one forward pass, without the logits of the other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from retrofox.anatomy import LOGIT_BYTES, read_logits, require_known_tokens, vocabulary_size
from retrofox.config_values import depends_on_length
from retrofox.support.memory import out_of_memory
from retrofox.support.report import after_layers

LossAndBest = tuple[np.ndarray, np.ndarray]
"""(P,) float32 losses in nats, (P,) int64 likeliest tokens."""
BATCH_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 17}
"""Tokens of a batch; on a GPU that runs out of memory, less."""
MULTIPLE = 16
"""Rows are padded to a multiple of this on a GPU, so that kernels meet few shapes."""
HEAD = 1 / 8
"""About the head's share of the time to score every token of a text: how far a progress bar moves for it."""


@dataclass(frozen=True)
class Scored:
    """A text and the positions (P,), each >= 1, of the tokens to score in it."""

    token_ids: np.ndarray
    positions: np.ndarray
    name: str = "a text"

    @property
    def needed(self) -> int:
        """Tokens that the forward pass reads: those before the last position."""
        return int(self.positions.max()) if len(self.positions) else 0

    @property
    def tokens(self) -> np.ndarray:
        """(P,) int64, the tokens to score."""
        return np.asarray(self.token_ids[self.positions], np.int64)


def score_tokens(
    model: PreTrainedModel, texts: Sequence[Scored], advance: Callable[[float], Any] = float
) -> list[LossAndBest]:
    """Per text (loss, argmax) at each of its positions: -ln p(x_i | x_0 .. x_{i-1}), and the likeliest token there.

    Texts of like length share a batch and are padded at the end, out of sight of every real token; those of a model
    whose RoPE depends on the length share one only where they are equally long. A batch has as many as BATCH_TOKENS
    holds, fewer where a GPU's memory is short. The head is applied to the positions asked for alone, at most
    LOGIT_BYTES of logits at a time.

    Args:
        advance: called with tokens read since its last call, parts of tokens after each layer.

    Returns:
        ((P,) float32 in nats, (P,) int64) for each text, in the order given.

    Raises:
        ValueError: the device ran out of memory, a token id lies outside the vocabulary, or a loss is no number.
    """
    largest = [int(text.token_ids.max()) for text in texts if len(text.token_ids)]
    require_known_tokens(model, max(largest, default=0))
    order = sorted((n for n, text in enumerate(texts) if len(text.positions)), key=lambda n: -texts[n].needed)
    found: list[LossAndBest] = [(np.empty(0, np.float32), np.empty(0, np.int64))] * len(texts)
    device = next(model.parameters()).device
    budget = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    same_length = depends_on_length(model.config)
    start = 0
    while start < len(order):
        longest = texts[order[start]].needed
        numbers = order[start : start + max(1, budget // longest)]
        if same_length:
            numbers = [n for n in numbers if texts[n].needed == longest]
        try:
            scores = _score([texts[n] for n in numbers], model, device, advance)
        except torch.cuda.OutOfMemoryError as error:
            if len(numbers) == 1:
                raise out_of_memory(f"a text of {longest} tokens") from error
            budget = longest * (len(numbers) // 2)
            scores = None
        if scores is None:
            torch.cuda.empty_cache()
            continue
        for n, score in zip(numbers, scores, strict=True):
            require_finite(model, score[0], texts[n].positions, texts[n].name)
            found[n] = score
        start += len(numbers)
    return found


@torch.no_grad()
def _score(
    texts: Sequence[Scored], model: PreTrainedModel, device: torch.device, advance: Callable[[float], Any]
) -> list[LossAndBest]:
    needed, longest = sum(text.needed for text in texts), texts[0].needed
    if device.type == "cuda" and not depends_on_length(model.config):
        longest = -(-longest // MULTIPLE) * MULTIPLE
    ids = np.zeros((len(texts), longest), np.int64)
    for row, text in enumerate(texts):
        ids[row, : text.needed] = text.token_ids[: text.needed]
    with after_layers(model, lambda read: advance(read / longest * needed * (1 - HEAD))):
        logits_at = read_logits(model, torch.from_numpy(ids).to(device))
    sizes = [len(text.positions) for text in texts]
    rows = torch.from_numpy(np.repeat(np.arange(len(texts)), sizes)).to(device)
    before = torch.from_numpy(np.concatenate([text.positions for text in texts]) - 1).to(device)
    target = torch.from_numpy(np.concatenate([text.tokens for text in texts])).to(device)
    losses, best = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    step = max(1, LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"]) // (4 * vocabulary_size(model)))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        logits = logits_at((rows[part], before[part]))
        losses[part] = F.cross_entropy(logits, target[part], reduction="none").cpu()
        best[part] = logits.argmax(-1).cpu()
        advance(needed * HEAD * len(logits) / len(rows))
    ends = np.cumsum(sizes)[:-1]
    return list(zip(np.split(losses.numpy(), ends), np.split(best.numpy(), ends), strict=True))


def require_finite(model: PreTrainedModel, losses: np.ndarray, positions: np.ndarray, name: str) -> None:
    """Raises ValueError that names the first position (P,) of a text whose loss (P,) is no number."""
    broken = np.flatnonzero(~np.isfinite(losses))
    if len(broken):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ValueError(
            f"the loss at position {positions[broken[0]]} of {name} is {losses[broken[0]]} in {dtype}: the weights are "
            "damaged, or too large for this dtype"
        )
