"""Attention of the heads while a model trains, for the log: copy scores, and attention mass by distance."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.anatomy import is_converted
from retrofox.heads.statistics import HeadMass, copy_scores
from retrofox.heads.watch import watch, watchable
from retrofox.model.modeling_fox import ForgetGate

COPY_TOKENS = 256
"""Tokens of the random sequence that stands twice; less where a row has no room for it."""
RETRIEVAL = 0.1
"""Copy score from which a head counts as a retrieval head."""


class HeadRecorder:
    """Measures every head every so many steps: one short text that stands twice, and one held-out row.

    A row is read as one text, whatever documents are packed in it. Random numbers of the training are left alone.

    Raises:
        ValueError: a control of a family that can't be converted, or an unconverted model with LoRA.
    """

    def __init__(self, model: Any, every: int | None, sequence_length: int):
        self.model, self.every = model, every
        self.size = max(2, min(COPY_TOKENS, sequence_length // 2))
        if every is not None:
            watchable(model)  # raises before the first step, if it can't be watched

    def is_due(self, step: int, max_steps: int) -> bool:
        """Whether a step's log line holds the heads."""
        return self.every is not None and (step % self.every == 0 or step >= max_steps)

    @torch.no_grad()
    def statistics(self, row: torch.Tensor | None) -> dict[str, float]:
        """Of all heads "copy_score_max" and "retrieval_heads", over the row "mass_first" and "mass_beyond_64", ...

        Args:
            row: (1, T) int64 tokens; None leaves the masses out, as does a distance that no query of it has.
        """
        training = self.model.training
        self.model.eval()
        try:
            model, original = watchable(self.model), not is_converted(self.model)
            scores = [score for layer in copy_scores(model, self.size, 1, original) for score in layer]
            found: dict[str, float] = {
                "copy_score_max": max(scores),
                "retrieval_heads": float(sum(score >= RETRIEVAL for score in scores)),
            }
            if row is not None:
                mass = HeadMass((getattr(model.config, "fox", None) or {}).get("sink_tokens") or 1)
                watch(model, row.to(next(model.parameters()).device), mass, original)
                found |= _means(mass.heads())
        finally:
            self.model.train(training)
            for gate in self.model.modules():
                if isinstance(gate, ForgetGate):
                    gate.last_log_f = None  # of these texts, and not of the training data that the log reports
        return found


def _means(heads: list[dict[str, Any]]) -> dict[str, float]:
    """Means over heads, of the distances that the row has."""
    columns = {"mass_first": [head["first_token_mass"] for head in heads]}
    columns |= {f"mass_beyond_{d}": [head["mass_beyond"][d] for head in heads] for d in heads[0]["mass_beyond"]}
    return {name: sum(values) / len(values) for name, values in columns.items() if None not in values}
