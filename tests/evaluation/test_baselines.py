"""Columns beside a model: its base under YaRN, models of other kinds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from retrofox.evaluation.compared_models import compare, with_yarn
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.names import yarn_factors
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.generation.generate import complete
from retrofox.loading.loaded_model import LoadedModel, open_model

LENGTH = 150  # beyond the 128 tokens of a pico model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 288, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def base(pico_llama, pico_tokenizer) -> LoadedModel:
    return LoadedModel(pico_llama(), pico_tokenizer, "pico", "pico-source")


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def losses(model, ids: torch.Tensor) -> torch.Tensor:
    """(B, T - 1) of all tokens but the first."""
    texts = [Scored(row.numpy(), np.arange(1, len(row))) for row in ids]
    return torch.stack([torch.from_numpy(loss) for loss, _ in score_tokens(model, texts)])


def test_yarn_is_transformers_own(base, pico_llama, ids):
    ours = with_yarn(base, 2.5)
    theirs = pico_llama(rope_scaling={"rope_type": "yarn", "factor": 2.5})
    assert torch.equal(logits(ours.model, ids), logits(theirs, ids))
    assert (logits(ours.model, ids) - logits(base.model, ids)).abs().max() > 0.1
    assert ours.model.lm_head.weight is base.model.lm_head.weight
    assert ours.name == "pico + YaRN x2.5"
    assert base.model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("word", ["yan:4", "yarn", "yarn:1", "ntk:4", "drope"])
def test_other_baselines_are_refused(word):
    with pytest.raises(ValueError, match=f"a baseline is yarn:FACTOR .* got '{word}'"):
        yarn_factors([word])


def test_baselines_are_made_of_an_unconverted_base(base, pico_fox, pico_llama, pico_tokenizer):
    fox, options = pico_fox(), {"tokenizer": pico_tokenizer}
    for models in ((fox, None), (base.model, [fox])):
        with pytest.raises(ValueError, match="this model is converted: give its base as the first --against"):
            compare(*models, [], None, baselines=["yarn:4"], **options)
    measured = compare(fox, base.model, [], None, baselines=["yarn:2", "yarn:2.0"], **options)
    assert [key for key, _ in measured.columns()] == ["model", "base", "yarn:2"]
    scaled = LoadedModel(pico_llama(rope_scaling={"rope_type": "linear", "factor": 2.0}), pico_tokenizer, "s", "s")
    with pytest.raises(ValueError, match=r"baseline yarn:4 of s: .*scaled already"):
        with_yarn(scaled, 4)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the fox forgets a gate often and a gate the fox " * 12)
    return str(path)


def test_eval_has_a_column_for_every_baseline(base, pico_fox, pico_tokenizer, text, tmp_path):
    specs = ["yarn:4", "yarn:2"]
    result = evaluate(
        pico_fox(),
        base.model,
        [text],
        200,
        tmp_path / "out",
        baselines=specs,
        controls=False,
        tokenizer=pico_tokenizer,
        progress=False,
    )
    assert [line["key"] for line in result["lines"]] == ["model", "base", *specs]
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert set(written["buckets"][0]["difference"]) == {"model-base", *(f"{spec}-base" for spec in specs)}
    token_ids = torch.tensor([[*pico_tokenizer(Path(text).read_text())["input_ids"]][:200]])
    for line, factor in zip(result["lines"][2:], yarn_factors(specs), strict=True):
        own = losses(with_yarn(base, factor).model, token_ids).mean().item()
        assert line["mean"] == pytest.approx(own, abs=1e-4)
    alone = evaluate(base.model, None, [text], 64, baselines=["yarn:4"], tokenizer=pico_tokenizer, progress=False)
    assert set(alone["buckets"][0]["difference"]) == {"yarn:4-model"}


SIZES = {"vocab_size": 288, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "head_dim": 16}
MAMBA2 = {"num_hidden_layers": 2, "state_size": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 16}
RECURRENT_GEMMA = {"num_hidden_layers": 3, "num_attention_heads": 2, "lru_width": 32, "intermediate_size": 48}
RECURRENT_GEMMA |= {"attention_window_size": 32, "w_init_variance_scale": 4.0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "config"), [("Mamba2", MAMBA2), ("RecurrentGemma", RECURRENT_GEMMA)])
def test_models_without_attention_or_of_another_make_are_columns(
    name, config, pico_fox, pico_tokenizer, text, tmp_path, ids
):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **config)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "other")
    pico_tokenizer.save_pretrained(tmp_path / "other")
    other = open_model(str(tmp_path / "other"))
    own = F.cross_entropy(logits(other.model, ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(losses(other.model, ids), own, atol=1e-5, rtol=1e-5)
    result = evaluate(
        pico_fox(), str(tmp_path / "other"), [text], 100, controls=False, tokenizer=pico_tokenizer, progress=False
    )
    assert [line["label"] for line in result["lines"]][1] == "other"
    assert result["lines"][1]["mean"] > 0
    answers = complete(other, [ids[0, :20].tolist(), ids[1, :20].tolist()], 3, ignore_eos=True)
    assert [len(answer) for answer in answers] == [3, 3]
