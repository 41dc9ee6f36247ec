"""Losses of documents too long for one device: several processes share each, as in training."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from retrofox.anatomy import LOGIT_BYTES, inner_model, logits_from_hidden, vocabulary_size
from retrofox.data.packed import IGNORE
from retrofox.data.windows import Window
from retrofox.evaluation.token_scores import require_finite
from retrofox.parallel.layout import degrees
from retrofox.parallel.mesh import build_mesh
from retrofox.parallel.settings import key_value_heads, refuse_sharing
from retrofox.parallel.shards import Shards, cut
from retrofox.support.launches import processes
from retrofox.support.memory import out_of_memory


def join(context: int, **unshared: Any) -> str | None:
    """Joins the processes that were launched to share documents; the device of this one, None where there is no GPU.

    Args:
        unshared: options of `evaluate` that run whole documents in one process; none may be given.

    Raises:
        ValueError: another number of processes was launched, or such an option is given.
    """
    given = [name for name, value in unshared.items() if value]
    if given:
        raise ValueError(f"context shares documents between processes for the loss alone: leave out {', '.join(given)}")
    if processes() != context:
        raise ValueError(
            f"context: {context} processes share a document, and {processes()} were launched: torchrun "
            f"--nproc-per-node {context} -m retrofox eval MODEL --context {context} ..."
        )
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


def is_first() -> bool:
    """Whether this process prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


class SharedLosses:
    """Losses of a converted model over documents that `context` processes share, each giving all of them.

    Raises:
        ValueError: a model whose documents can't be shared.
    """

    def __init__(self, context: int, model: Any):
        self.model, self.split = model, degrees(context, key_value_heads(model.config))
        refuse_sharing(model, self.split)
        self.mesh = build_mesh(self.split)

    def _padded(self, tokens: int) -> int:
        return -(-tokens // self.split.unit) * self.split.unit

    def of_windows(self, windows: Sequence[Window], advance: Callable[[int], Any]) -> list[np.ndarray]:
        """As `per_token_loss.window_losses`, every process with the same windows."""
        found = []
        for window in windows:
            try:
                losses = self._losses(torch.from_numpy(window.token_ids).to(next(self.model.parameters()).device))
            except torch.cuda.OutOfMemoryError as error:
                raise out_of_memory(f"a document of {len(window.token_ids)} tokens") from error
            found.append(losses[: len(window.token_ids) - 1].cpu().numpy())
            positions = np.arange(1, len(window.token_ids))
            require_finite(self.model, found[-1], positions, window.name or "a document")
            advance(len(positions))
        return found

    @torch.no_grad()
    def _losses(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(padded T,) float32, the loss of the token after each of (T,) tokens."""
        length = self._padded(len(token_ids))
        token_ids = F.pad(token_ids, (0, length - len(token_ids)))[None]
        positions = torch.arange(length, device=token_ids.device)[None]
        targets = F.pad(token_ids[:, 1:], (0, 1), value=IGNORE)
        part = cut({"input_ids": token_ids, "position_ids": positions, "targets": targets}, self.split, self.mesh.rank)
        shards = Shards(self.mesh, part["rows"], token_ids.device)
        hidden = inner_model(self.model)(
            input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False, shards=shards
        ).last_hidden_state
        budget = LOGIT_BYTES.get(token_ids.device.type, LOGIT_BYTES["cpu"])
        step = max(1, budget // (4 * vocabulary_size(self.model)))
        mine = torch.empty(1, hidden.shape[1], device=token_ids.device)
        for start in range(0, hidden.shape[1], step):
            logits = logits_from_hidden(self.model, hidden[:, start : start + step]).float()
            wanted = part["targets"][:, start : start + step]
            flat = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORE)
            mine[:, start : start + step] = flat.view(wanted.shape)
        found = torch.empty(length, device=token_ids.device)
        for process, losses in enumerate(self.mesh.gathered(mine)):
            at = 0
            for first, last in self.split.segments(process, length):
                found[first:last] = losses[0, at : at + last - first]
                at += last - first
        return found
