"""Distillation from logits on disk: `Distill` with the teacher's k likeliest tokens and the rest as one outcome."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from retrofox.anatomy import causal_lm
from retrofox.config import Stage
from retrofox.data.packed import IGNORE
from retrofox.training.chunked_loss import AnyRows, chunk_rows, sum_over_rows
from retrofox.training.objectives import hidden_states
from retrofox.training.offline.codec import log_probabilities, rest_of, unsigned


class DistillTopK:
    """L = (1 - a) tau^2 KL_k(p || q) + a CE, mean over targets; p from a batch's `teacher_ids` and `teacher_codes`.

    KL_k = sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest) over the teacher's k likeliest tokens i and
    all others as one outcome, both distributions at temperature tau. It is KL where k = V and at most KL elsewhere:
    what it leaves out is p_rest times the KL of the two distributions within the rest, which no gradient sees.
    log q_rest is a log-sum-exp over the rest, not log(1 - sum_i q_i), which rounding makes log 0.

    Source: as `Distill`; the lumped outcome is the data-processing inequality applied to KL (Cover and Thomas,
    "Elements of Information Theory", section 2.7).
    """

    metrics = ("kl", "cross_entropy")

    def __init__(self, model: Any, stage: Stage, device: torch.device):
        self.temperature = stage.temperature or 1.0
        self.ce_weight = stage.ce_weight or 0.0
        self.rows = max(64, chunk_rows(causal_lm(model).config.vocab_size, device) // 4)
        self.kind, self.reason = "chunked", f"KL to the teacher logits in {stage.teacher_logits}"

    def __call__(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        targets = batch["targets"].flatten()
        ids, codes = (batch[name].flatten(0, 1) for name in ("teacher_ids", "teacher_codes"))

        def loss_of(logits: torch.Tensor, part: slice) -> torch.Tensor:
            valid = targets[part] >= 0
            kl = lumped_kl(logits / self.temperature, unsigned(ids[part]), log_probabilities(codes[part]))
            kl = self.temperature**2 * (kl * valid).sum()
            ce = F.cross_entropy(logits, targets[part], reduction="sum", ignore_index=IGNORE)
            return torch.stack(((1 - self.ce_weight) * kl + self.ce_weight * ce, kl, ce))

        return sum_over_rows(model, hidden_states(model, batch).flatten(0, 1), AnyRows(loss_of), self.rows)


def lumped_kl(logits: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL_k (N,) of log-probabilities (N, k + 1), of tokens ids (N, k) and the rest, to the softmax of logits (N, V)."""
    chosen, rest = logits.gather(1, ids), rest_of(logits, ids)
    total = torch.logaddexp(chosen.logsumexp(-1), rest)
    log_q = torch.cat((chosen, rest[:, None]), 1) - total[:, None]
    p = log_p.exp()
    outcomes = slice(0, ids.shape[1] + (ids.shape[1] < logits.shape[1]))  # with k = V there is no rest
    return (torch.xlogy(p, p) - p * log_q)[:, outcomes].sum(-1)


def any_logits(rows: int, tokens: int, vocabulary: int, device: Any = None) -> dict[str, torch.Tensor]:
    """A batch's `teacher_ids` and `teacher_codes` of no teacher, of the usual k: for measuring memory and time."""
    top_k = min(64, vocabulary)
    ids = torch.arange(top_k, dtype=torch.int16 if vocabulary <= 1 << 16 else torch.int32, device=device)
    codes = torch.arange(1000, 1000 + top_k + 1, dtype=torch.int16, device=device)
    return {"teacher_ids": ids.expand(rows, tokens, -1), "teacher_codes": codes.expand(rows, tokens, -1)}
