"""Memory that is alive on a CPU, counted operation by operation, and the plan of a stage that is made of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from retrofox.config import validate
from retrofox.training.groups import set_trainable
from retrofox.training.live_bytes import LiveBytes
from retrofox.training.memory import memory
from retrofox.training.memory_probe import _pass

KB = 1024
CPU = torch.device("cpu")


def test_what_is_allocated_counts_until_it_is_freed():
    x = torch.randn(256)
    with LiveBytes() as live:
        y = x + 1
        view = y[3:]
        y.mul_(2)
        assert live.now == KB
        z = torch.cat([y, y])
        assert (live.now, live.peak) == (3 * KB, 3 * KB)
        del y, z
        assert (live.now, live.peak) == (KB, 3 * KB)  # the view holds it
        del view
    assert live.now == 0


def test_a_recomputed_backward_shows_in_the_peak():
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64)

    def chain() -> torch.Tensor:
        y = x @ weight
        for _ in range(4):
            y = torch.sin(y)
        return y.sum()

    with LiveBytes() as live:
        loss = checkpoint(chain, use_reentrant=False)
        assert live.now < KB
        before = live.peak = live.now
        loss.backward()  # type: ignore[union-attr]
    assert live.peak - before >= 4 * 16 * KB  # what each sine keeps


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_an_align_stage_is_planned_with_all_that_its_layers_hold(pico_fox, pico_checkpoint, tmp_path, recomputed):
    """Recomputed, autograd saves next to nothing; inputs and outputs of every layer wait all the same."""
    tokens = 192
    stage = {"objective": "align", "tokens": 1000, "sequence_length": tokens, "gradient_checkpointing": recomputed}
    (tmp_path / "books.txt").write_text("the fox forgets the gate")
    recipe = validate(
        {
            "model": str(pico_checkpoint),
            "fox": {"half_life": [2, 200], "max_wavelength": 40},
            "output": str(tmp_path / "out"),
            "data": {"train": [str(tmp_path / "books.txt")]},
            "stages": [stage],
            "precision": "fp32",
        }
    )
    model = pico_fox(config={"num_hidden_layers": 6}).train()
    set_trainable(model, recipe.stages[0])
    planned = memory(recipe, recipe.stages[0], model, 1, False, CPU)
    with LiveBytes() as live:
        loss = _pass(model, recipe, recipe.stages[0], tokens, CPU)
        kept = live.now
        loss.backward()
    assert planned["activations"] == pytest.approx(kept, rel=0.1)
    assert planned["activations"] + planned["workspace"] == pytest.approx(live.peak, rel=0.15)
