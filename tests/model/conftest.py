"""What the tests of the model's parts share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retrofox.acceleration import forgetting_cache, head_groups
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.model import modeling_fox as scores
from retrofox.model.modeling_fox import CACHE


@pytest.fixture(params=["bias", "operator"])
def path(request, monkeypatch) -> str:
    """The ways through the attention on a CPU: SDPA with a bias, and the operator."""
    if request.param == "operator":
        monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    return request.param


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """(2, 24) ids of a pico model."""
    return torch.randint(2, 288, (2, 24), generator=torch.Generator().manual_seed(1))


def ids_of(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 288, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(input_ids, **inputs).logits


def close(actual, expected, tolerance=1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def decode(model: Any, input_ids: torch.Tensor, cache: Any, mask: Any = None, positions: Any = None) -> torch.Tensor:
    """Logits through a cache: a prefill of 12 tokens, a chunk of three, then token by token."""
    parts, done = [], 0
    for step in [12, 3] + [1] * (input_ids.shape[1] - 15):
        seen = slice(done, done + step)
        extra = {} if mask is None else {"attention_mask": mask[:, : done + step], "position_ids": positions[:, seen]}
        parts.append(logits(model, input_ids[:, seen], **{CACHE: cache}, **extra))
        done += step
    return torch.cat(parts, 1)


@pytest.fixture
def small_pages(monkeypatch) -> None:
    """A cache that forgets looks often, and packs short rows."""
    monkeypatch.setattr(forgetting_cache, "PAGE", 16)
    monkeypatch.setattr(head_groups, "SPLIT", 32)


@pytest.fixture
def kept(monkeypatch) -> list[float]:
    """The share of keys that each cache held after its last step."""
    shares: list[float] = []
    update = ForgettingCache.update

    def noted(self, keys, values, layer_idx, *args, **kwargs):
        shown = update(self, keys, values, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        shares.append(layer.num_live / (len(layer) * layer.seen))
        return shown

    monkeypatch.setattr(ForgettingCache, "update", noted)
    return shares


def mask_of(rows: int, length: int) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : 11 * row] = 0
    return mask
