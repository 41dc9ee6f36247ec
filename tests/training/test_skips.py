"""Training where positions skip ahead (`max_position`): RoPE sees the skips, documents stay whole, runs resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import retrofox
from retrofox.config import load_recipe
from retrofox.data.packed import IGNORE
from retrofox.training.data import collate_with_targets
from retrofox.training.objectives import hidden_states
from retrofox.training.train import train

SKIPPING = [*range(10), *range(300, 314)]
"""A document of 24 tokens whose positions skip ahead at the tenth."""


@pytest.fixture
def recipe(tmp_path, pico_fox, saved, write_recipe) -> Path:
    """One stage of 4 steps, each with skips and a checkpoint; documents are short, so every window has several."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        text = "".join(f"the fox forgets gate {i * i % 17}, " for i in range(number, number + 2 + number % 3))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    saved(pico_fox(rope="interpolate"), tmp_path / "model")
    data = {part: [str(tmp_path / "texts")] for part in ("train", "eval")}
    checkpoint = {"every_steps": 1, "keep": 9}
    return write_recipe({"max_position": 4096}, model=str(tmp_path / "model"), data=data, checkpoint=checkpoint)


def run(recipe: Path, *changes: str) -> dict:
    return train(load_recipe(recipe, list(changes)))["stages"][-1]


def test_skips_are_trained_on_and_held_out_windows_have_none(recipe, tmp_path, weights):
    found = run(recipe, f"output={tmp_path / 'skips'}")
    plain = run(recipe, "stages.0.max_position=null")
    assert found["loss_first"] != plain["loss_first"]
    assert found["eval_before"] == plain["eval_before"]
    assert weights(tmp_path / "skips") != weights(tmp_path / "run")


def batch_of(*positions: list[int]) -> dict[str, torch.Tensor]:
    """A batch as training makes it: each row is packed from documents, which begin where its positions are 0."""
    random = torch.Generator().manual_seed(4)
    rows = []
    for row in positions:
        starts = [place for place, position in enumerate(row) if position == 0]
        ids = torch.randint(2, 288, (len(row),), generator=random)
        labels = ids.clone()
        labels[starts] = IGNORE
        lengths = torch.tensor([*starts, len(row)]).diff()
        rows.append({"input_ids": ids, "labels": labels, "position_ids": torch.tensor(row), "doc_lengths": lengths})
    return collate_with_targets(rows)


BATCHES = {
    "one document a row": batch_of(SKIPPING, list(range(24))),
    "packed": batch_of([*range(9), *SKIPPING], [*SKIPPING, *range(3), *range(40, 46)]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_skips_turn_the_rotary_pairs_and_split_no_document(pico_llama, batch):
    """As in the base itself, told of documents by a mask over all pairs of tokens."""
    base = pico_llama()
    fox = retrofox.convert(pico_llama(), fox=retrofox.FoxSpec(rope="keep", gate="none")).eval()
    document = (batch["position_ids"] == 0).long().cumsum(1)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
    with torch.no_grad():
        positions = {"position_ids": batch["position_ids"], "attention_mask": mask}
        wanted = base.model(input_ids=batch["input_ids"], use_cache=False, **positions).last_hidden_state
        found = hidden_states(fox, batch)
        counted = torch.arange(batch["input_ids"].shape[1]).expand_as(document)
        first = torch.where(batch["position_ids"] == 0, counted, 0).cummax(1).values
        unskipped = hidden_states(fox, {**batch, "position_ids": counted - first})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    skipped = batch["position_ids"] != counted - first
    assert skipped.any()
    assert float((found - unskipped)[skipped].abs().amax(1).min()) > 1e-2
    assert float((found - unskipped)[~skipped].abs().max()) < 1e-4


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_a_forward_by_hand_gives_what_training_sees(pico_fox, batch):
    model = pico_fox(rope="interpolate", pro="all", log_n=16)
    with torch.no_grad():
        found = hidden_states(model, batch)
        packed = {"position_ids": batch["position_ids"], "cu_seqlens": batch["cu_seqlens"]}
        wanted = model.model(input_ids=batch["input_ids"], use_cache=False, **packed).last_hidden_state
        split = model.model(input_ids=batch["input_ids"], use_cache=False, position_ids=batch["position_ids"])
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, split.last_hidden_state)
