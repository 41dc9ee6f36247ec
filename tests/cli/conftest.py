"""What the tests of the command line share."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "base"
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
