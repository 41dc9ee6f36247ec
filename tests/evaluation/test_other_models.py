"""Columns beside a model: models of other kinds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.generation.generate import complete
from retrofox.loading.loaded_model import open_model

LENGTH = 150  # beyond the 128 tokens of a pico model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 288, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def losses(model, ids: torch.Tensor) -> torch.Tensor:
    """(B, T - 1) of all tokens but the first."""
    texts = [Scored(row.numpy(), np.arange(1, len(row))) for row in ids]
    return torch.stack([torch.from_numpy(loss) for loss, _ in score_tokens(model, texts)])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the fox forgets a gate often and a gate the fox " * 12)
    return str(path)


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
