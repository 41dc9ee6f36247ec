"""Losses of documents too long for one device: several processes share each, as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from retrofox.anatomy import LOGIT_BYTES, inner_model, logits_from_hidden, vocabulary_size
from retrofox.data.packed import IGNORE
from retrofox.parallel.launched import join as join_processes
from retrofox.parallel.launched import refuse_unconverted
from retrofox.parallel.layout import Degrees, degrees
from retrofox.parallel.mesh import Mesh, build_mesh
from retrofox.parallel.settings import key_value_heads, refuse_sharing
from retrofox.parallel.shards import Shards, cut

Losses = Callable[[Any, torch.Tensor], torch.Tensor]


def join(context: int, model: Any, **unshared: Any) -> str | None:
    """`parallel.launched.join` for `eval`.

    Args:
        unshared: options of `evaluate` that run whole documents in one process; none may be given.

    Raises:
        ValueError: another number of processes was launched, such an option is given, or the model is unconverted.
    """
    given = [name for name, value in unshared.items() if value]
    if given:
        raise ValueError(f"context shares documents between processes for the loss alone: leave out {', '.join(given)}")
    refuse_unconverted(model)
    return join_processes(context, "eval MODEL")


def shared_losses(context: int, model: Any, longest: int = 1) -> Losses:
    """`anatomy.token_losses` of a converted model over documents that `context` processes share.

    Every process calls it with the same tokens and gets all losses.

    Args:
        longest: tokens of the longest document.

    Raises:
        ValueError: a model, or a document of so many tokens, that can't be shared.
    """
    split = degrees(context, key_value_heads(model.config))

    def padded(tokens: int) -> int:
        return -(-tokens // split.unit) * split.unit

    refuse_sharing(model, padded(longest), split)
    mesh = build_mesh(split)

    def losses(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
        length = padded(token_ids.shape[1])
        refuse_sharing(model, length, split)
        return _losses(mesh, split, model, F.pad(token_ids, (0, length - token_ids.shape[1])))[
            :, : token_ids.shape[1] - 1
        ]

    return losses


@torch.no_grad()
def _losses(mesh: Mesh, split: Degrees, model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) float32, the loss of the token after each; T divides among the processes."""
    rows, length = token_ids.shape
    positions = torch.arange(length, device=token_ids.device).expand(rows, -1)
    targets = F.pad(token_ids[:, 1:], (0, 1), value=IGNORE)
    part = cut({"input_ids": token_ids, "position_ids": positions, "targets": targets}, split, mesh.rank)
    shards = Shards(mesh, part["rows"], token_ids.device)
    hidden = inner_model(model)(
        input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False, shards=shards
    ).last_hidden_state
    budget = LOGIT_BYTES.get(token_ids.device.type, LOGIT_BYTES["cpu"])
    step = max(1, budget // (4 * vocabulary_size(model) * rows))
    mine = torch.empty(rows, hidden.shape[1], device=token_ids.device)
    for start in range(0, hidden.shape[1], step):
        logits = logits_from_hidden(model, hidden[:, start : start + step]).float()
        wanted = part["targets"][:, start : start + step]
        flat = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORE)
        mine[:, start : start + step] = flat.view(wanted.shape)
    found = torch.empty(rows, length, device=token_ids.device)
    for process, losses in enumerate(mesh.gathered(mine)):
        at = 0
        for first, last in split.segments(process, length):
            found[:, first:last] = losses[:, at : at + last - first]
            at += last - first
    return found
