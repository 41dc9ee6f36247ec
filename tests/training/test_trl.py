"""TRL's trainers on a converted model: SFT packed and padded, DPO without a path; tests/examples/ has the scripts."""

from __future__ import annotations

import math

import pytest
import torch

import retrofox

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
TEXTS = [f"the fox forgets gate {i * i % 7} and so on, " * (1 + i % 3) for i in range(12)]
PAIRS = [{"prompt": "the fox", "chosen": f" forgets gate {i}", "rejected": " and so on and on"} for i in range(8)]


@pytest.fixture(scope="module", autouse=True)
def _quiet_progress():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def settings(tmp_path):
    """settings(Config, **values): two steps on the CPU in float32."""

    def build(kind, **values):
        common = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": []}
        quiet = {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
        return kind(str(tmp_path / "trl"), use_cpu=True, bf16=False, **{**common, **quiet, **values})

    return build


def losses(trainer) -> list[float]:
    """Trains; the loss of every step, all of them finite, with gates that moved."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = [name for name, p in model.named_parameters() if p.requires_grad and not torch.equal(p, before[name])]
    assert any("forget_gate" in name for name in moved)
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 2
    assert all(math.isfinite(loss) for loss in found)
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_sft_scores_documents_as_the_model_alone_does(pico_fox_checkpoint, pico_tokenizer, settings, packing):
    from trl import SFTConfig, SFTTrainer

    model = retrofox.load(pico_fox_checkpoint)
    rows = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    values = {"packing": True, "padding_free": True, "max_length": 128} if packing else {"max_length": 64}
    trainer = SFTTrainer(model, settings(SFTConfig, **values), train_dataset=rows, processing_class=pico_tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        found = float(trainer.compute_loss(model.train(), dict(batch)))
        total, count = 0.0, 0
        for ids in documents(batch):
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
    assert found == pytest.approx(total / count, rel=1e-4)
    first, last = losses(trainer)
    assert last < first


def documents(batch) -> list[torch.Tensor]:
    """The documents of a batch, by its mask or where its positions restart."""
    if "attention_mask" in batch:
        return [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    return list(batch["input_ids"][0].tensor_split(starts[1:]))


def test_dpo_of_a_model_without_a_path_needs_a_copy(pico_checkpoint, pico_tokenizer, settings):
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    model = retrofox.convert(AutoModelForCausalLM.from_pretrained(pico_checkpoint), fox=retrofox.FoxSpec())
    trainer = DPOTrainer(
        model,
        args=settings(DPOConfig),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=pico_tokenizer,
    )
    with pytest.raises(ValueError, match=r"no forget gates reached this LlamaAttention.*ref_model=copy\.deepcopy"):
        trainer.train()
