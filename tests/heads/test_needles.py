"""Facts planted in text, and scores of the heads that look them up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrofox.heads.needles import by_kv_head, needle_attention, plant, strongest

TEXT = "the fox forgets the gate, and the gate forgets many different foxes beside these rivers. " * 40


@pytest.fixture
def documents(pico_tokenizer) -> list[np.ndarray]:
    return [np.array(pico_tokenizer(TEXT).input_ids, np.int32)]


def test_a_score_is_the_attention_to_the_value_averaged_over_the_queries_that_answer():
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], [[1.0, 0, 0, 0], [0, 0, 0, 1.0]]])
    assert needle_attention(weights, range(1, 3)).tolist() == pytest.approx([0.5, 0.0])


def test_a_kv_head_has_the_score_of_its_best_query_head():
    assert by_kv_head(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), 2).tolist() == [[4.0, 3.0]]
    assert by_kv_head(torch.tensor([[1.0, 4.0]]), 2).tolist() == [[1.0, 4.0]]


def test_the_strongest_heads_come_in_order_of_layers():
    assert strongest(torch.tensor([[0.1, 0.9], [0.2, 0.1], [0.3, 0.8]]), 3) == [(0, 1), (2, 0), (2, 1)]


def test_a_planted_value_stands_where_it_is_said_to_and_ends_the_prompt(documents, pico_tokenizer):
    for needle in plant(documents, pico_tokenizer, 400):
        tokens = needle.token_ids[0].tolist()
        value = tokens[needle.value.start + 1 : needle.value.stop]
        assert tokens[needle.answer.start + 1 : needle.answer.stop + 1] == value == tokens[-len(value) :]
        assert len(needle.answer) == len(value)
        assert len(tokens) == 400


def test_facts_stand_at_depths_from_the_start_on(documents, pico_tokenizer):
    depths = [needle.value.start for needle in plant(documents, pico_tokenizer, 1000, prompts=4)]
    assert depths[0] < 100
    assert depths == sorted(depths)
    assert depths[-1] > 400


def test_a_model_too_short_for_a_fact_is_refused(documents, pico_tokenizer):
    with pytest.raises(ValueError, match=r"can't hold a fact .* name the heads"):
        plant(documents, pico_tokenizer, 40)
