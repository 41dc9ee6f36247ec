"""Losses and top-1 hits of a few chosen tokens per text, without the logits of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from retrofox import anatomy
from retrofox.anatomy import inner_model, logits_from_hidden, require_known_tokens, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Reading:
    """A text to run through a model and the positions (>= 1) whose tokens are to be predicted there."""

    token_ids: np.ndarray
    positions: np.ndarray
    name: str = ""

    @property
    def needed(self) -> int:
        """Tokens that the forward pass must see: those before the last position."""
        return int(self.positions.max()) if len(self.positions) else 0


def read(
    model: PreTrainedModel,
    readings: Sequence[Reading],
    batch: int = 1,
    advance: Callable[[int], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per reading (loss, hit) of each of its positions: -ln p(x_i | x_0 .. x_{i-1}) and whether x_i is the argmax.

    Texts of like length share a batch and are padded at the end, out of sight of every position that is read. The head
    is applied to the positions asked for alone, at most LOGIT_BYTES of them at a time.

    Args:
        batch: texts run at one time.
        advance: called after each batch with the number of tokens run.

    Returns:
        ((P,) float32 in nats, (P,) bool) for each reading, in the order given.

    Raises:
        ValueError: the device ran out of memory, a token id lies outside the vocabulary, or a loss is no number.
    """
    require_known_tokens(model, max((int(r.token_ids.max()) for r in readings), default=0))
    order = sorted((n for n, r in enumerate(readings) if len(r.positions)), key=lambda n: -readings[n].needed)
    found = [(np.empty(0, np.float32), np.empty(0, bool))] * len(readings)
    for start in range(0, len(order), batch):
        members = [readings[n] for n in order[start : start + batch]]
        try:
            losses, hits = _read_batch(model, members)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU ran out of memory at batch {len(members)} x {members[0].needed} tokens; lower the batch or "
                "the length, or load the model in bfloat16"
            ) from error
        ends = np.cumsum([len(member.positions) for member in members])[:-1]
        for n, loss, hit in zip(order[start:], np.split(losses, ends), np.split(hits, ends), strict=False):
            _require_finite(model, readings[n], loss)
            found[n] = (loss, hit)
        if advance is not None:
            advance(sum(member.needed for member in members))
    return found


@torch.no_grad()
def _read_batch(model: PreTrainedModel, members: Sequence[Reading]) -> tuple[np.ndarray, np.ndarray]:
    device = next(model.parameters()).device
    ids = np.zeros((len(members), members[0].needed), np.int64)
    for row, member in enumerate(members):
        ids[row, : member.needed] = member.token_ids[: member.needed]
    hidden = inner_model(model)(input_ids=torch.from_numpy(ids).to(device), use_cache=False).last_hidden_state
    rows = np.concatenate([np.full(len(member.positions), row) for row, member in enumerate(members)])
    position = np.concatenate([member.positions for member in members])
    target = torch.from_numpy(np.concatenate([m.token_ids[m.positions] for m in members]).astype(np.int64)).to(device)
    row_of, column = torch.from_numpy(rows).to(device), torch.from_numpy(position - 1).to(device)
    losses, hits = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.bool)
    budget = anatomy.LOGIT_BYTES.get(device.type, anatomy.LOGIT_BYTES["cpu"])
    step = max(1, budget // (4 * vocabulary_size(model)))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        logits = logits_from_hidden(model, hidden[row_of[part], column[part]]).float()
        losses[part] = F.cross_entropy(logits, target[part], reduction="none").cpu()
        hits[part] = (logits.argmax(-1) == target[part]).cpu()
    return losses.numpy(), hits.numpy()


def _require_finite(model: PreTrainedModel, reading: Reading, loss: np.ndarray) -> None:
    broken = np.flatnonzero(~np.isfinite(loss))
    if len(broken):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ValueError(
            f"the loss at position {reading.positions[broken[0]]} of {reading.name or 'a document'} is "
            f"{loss[broken[0]]} in {dtype}: the weights are damaged, or too large for this dtype"
        )
