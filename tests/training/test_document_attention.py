"""Unconverted models over packed rows whose positions skip ahead: each document as if it were alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from retrofox.model.configuration_fox import SUPPORTED
from retrofox.training.document_attention import set_document_attention
from retrofox.training.objectives import hidden_states
from retrofox.training.train import train
from tests import conftest

SIZES = {
    **conftest.PICO, "vocab_size": 96, "max_position_embeddings": 512, "initializer_range": 0.15,
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "attn_logit_softcapping": None,
}  # fmt: skip
NO_LAYER_TYPES = ("mistral", "mixtral", "phi3", "qwen2_moe", "starcoder2")
"""Families whose layers all have the window, or none."""
DOCUMENTS = [
    [[*range(9)], [*range(4), *range(300, 320)]],
    [[*range(10), *range(90, 94)], [0], [*range(3), *range(400, 415)]],
]
"""Positions of each document of two rows; three of them skip ahead."""


def family(model_type: str):
    torch.manual_seed(0)
    latent = model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
    values = {**SIZES, **(conftest.DEEPSEEK if latent else {} if model_type in NO_LAYER_TYPES else WINDOWS)}
    values["sliding_window"] = None if model_type == "olmoe" else 7  # it has none: its mask would not show one
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()


def batch() -> dict[str, torch.Tensor]:
    rows = [[position for document in row for position in document] for row in DOCUMENTS]
    lengths = [0, *(len(document) for row in DOCUMENTS for document in row)]
    ids = torch.randint(2, 96, (len(rows), len(rows[0])), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    return {"input_ids": ids, "position_ids": torch.tensor(rows), "cu_seqlens": ends}


@pytest.mark.parametrize("model_type", sorted(SUPPORTED.keys() - {"gemma2"}))  # gemma2 caps its scores
def test_a_packed_row_with_skips_gives_what_its_documents_give_alone(model_type):
    model, packed = family(model_type), batch()
    with torch.no_grad():
        alone = []
        for row, documents in enumerate(DOCUMENTS):
            at = 0
            for positions in documents:
                ids = packed["input_ids"][row : row + 1, at : at + len(positions)]
                # with a mask transformers looks for no documents in the positions
                given = {"position_ids": torch.tensor([positions]), "attention_mask": torch.ones_like(ids)}
                alone.append(model.model(input_ids=ids, use_cache=False, **given).last_hidden_state[0])
                at += len(positions)
        set_document_attention(model)
        found = hidden_states(model, packed)
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_one_document_a_row_gives_what_plain_sdpa_gives(pico_llama):
    model, ids = pico_llama(), batch()["input_ids"]
    with torch.no_grad():
        wanted = hidden_states(model, {"input_ids": ids})
        set_document_attention(model)
        assert torch.equal(hidden_states(model, {"input_ids": ids}), wanted)


@pytest.fixture
def control(make_recipe):
    """control(**keys) -> a recipe with skips for an unconverted model with YaRN."""
    yarn = {"rope_type": "yarn", "factor": 8.0}
    common = {"converted": False, "fox": None, "rope_scaling": yarn}
    return lambda **keys: make_recipe({"tokens": 256, "max_position": 512}, **{**common, **keys})


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None, "rope_theta": 5e5}, {"rope_scaling": None}])
def test_a_control_trains_with_skips_and_says_which_attention_runs(control, capsys, rope):
    result = train(control(**rope))
    assert "attention: SDPA, one causal call a document" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(result["model"])
    assert model.config._attn_implementation == "sdpa"
