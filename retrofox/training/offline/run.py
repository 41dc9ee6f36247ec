"""The original that `retrofox teacher` runs, and its distributions over a batch, a piece of logits at a time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrofox.anatomy import causal_lm, is_converted
from retrofox.config import Recipe
from retrofox.conversion.fingerprint import model_fingerprint
from retrofox.loading.base import load_base
from retrofox.loading.configs import any_config
from retrofox.loading.device import PRECISIONS
from retrofox.loading.source import holds_converted, read_config, refuse_adapter
from retrofox.training.chunked_loss import Head, chunk_rows
from retrofox.training.model import load_any
from retrofox.training.objectives import hidden_states, original_form
from retrofox.training.offline.codec import id_type, quantised, top_k_and_rest
from retrofox.training.teacher import named_original


@dataclass(frozen=True)
class Original:
    """The model that a recipe's distill stages learn from, as `training.teacher.teacher_for` finds it; not loaded."""

    source: str
    revision: str | None
    fingerprint: str
    vocabulary: int

    @classmethod
    def of(cls, recipe: Recipe) -> Original:
        """The recipe's model; of a converted one that training or a refit has changed, its base.

        Raises:
            FileNotFoundError: no such model.
            ValueError: an adapter; a base that is needed and not named, or not there.
        """
        refuse_adapter(recipe.model)
        source, revision = recipe.model, None
        if holds_converted(source):
            changed = named_original(Path(source))
            if changed is not None:
                source, revision = str(changed.base), changed.base_revision
        config = read_config(source)["vocab_size"] if holds_converted(source) else any_config(source).vocab_size
        return cls(source, revision, model_fingerprint(source), int(config))

    def load(self, recipe: Recipe, device: torch.device) -> Running:
        """The model in the recipe's precision, on a device."""
        dtype = PRECISIONS[recipe.precision]
        model: Any
        if holds_converted(self.source):
            model = load_any(recipe, Path(self.source), dtype)
        else:
            model, _ = load_base(self.source, dtype=dtype, revision=self.revision)
        return Running(model.to(device).requires_grad_(False).eval(), device, dtype)


@dataclass(frozen=True)
class Running:
    """An original on its device."""

    model: Any
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def distributions(
        self, batch: dict[str, torch.Tensor], top_k: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids (B, T, k), codes (B, T, k + 1), mean mass (B,) of the rest) of a batch of packed windows, as on disk.

        Products run in the recipe's precision, as those of a teacher in memory do; log-probabilities are float32.
        """
        batch = {key: value.to(self.device) for key, value in batch.items()}
        mixed = contextlib.nullcontext()
        if self.dtype != torch.float32:
            mixed = torch.autocast(self.device.type, self.dtype)
        plain = not is_converted(self.model)
        with mixed, contextlib.nullcontext() if plain else original_form(self.model):
            hidden = hidden_states(self.model, batch).flatten(0, 1).to(self.dtype)
        lm = causal_lm(self.model)
        module = lm.get_output_embeddings()
        head = Head(lm.config, module.weight.to(self.dtype), module.bias)
        ids, codes, rest = [], [], []
        for part in hidden.split(chunk_rows(lm.config.vocab_size, self.device) // 4 or 1):
            chosen, log_p = top_k_and_rest(head.logits(part).float() / temperature, top_k)
            ids.append(chosen.cpu().numpy().astype(id_type(lm.config.vocab_size)))
            codes.append(quantised(log_p).cpu().numpy().astype("<u2"))
            rest.append(log_p[:, -1].exp().cpu())
        shape = batch["input_ids"].shape
        all_ids, all_codes = (np.concatenate(parts).reshape(*shape, -1) for parts in (ids, codes))
        return all_ids, all_codes, torch.cat(rest).view(shape).mean(1).numpy()
