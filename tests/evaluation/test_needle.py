"""`retrofox needle`: grids and intervals that count right, files that hold them, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrofox.evaluation import needle as needle_module
from retrofox.evaluation.needle import MODES, needle
from retrofox.evaluation.statistics import wilson_interval

SENTENCES = "A fox crossed the field. Rain fell on the mill! Nobody came. Who would? "


@pytest.fixture(scope="module")
def haystack(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("hay") / "hay.txt"
    letters = [a + b + c + d for a in "bdg" for b in "ae" for c in "lmnr" for d in "ou"]
    path.write_text("".join(f"{SENTENCES}The {word} slept. " for word in letters), encoding="utf-8")
    return [str(path)]


@pytest.fixture(scope="module")
def options(pico_tokenizer) -> dict[str, Any]:
    return {"tokenizer": pico_tokenizer, "progress": False}


@pytest.fixture(scope="module")
def llama(pico_llama) -> Any:
    return pico_llama(max_position_embeddings=4096)


@pytest.fixture
def near_reader(pico_tokenizer, monkeypatch) -> None:
    """Scores of a model that reads only the last 500 tokens, and those perfectly."""

    def score(model, texts, advance):
        scores = []
        for text in texts:
            answer = text.token_ids[text.positions]
            seen = pico_tokenizer.decode(text.token_ids[: text.positions[0]][-500:].tolist())
            knows = f"is to{pico_tokenizer.decode(answer.tolist())}" in seen
            scores.append((np.full(len(answer), 0.5, np.float32), answer if knows else answer + 1))
        return scores

    monkeypatch.setattr(needle_module, "score_tokens", score)


def test_the_grid_counts_exact_matches_and_the_files_hold_it(haystack, llama, options, near_reader, tmp_path):
    result = needle(llama, [llama, llama], haystack, [480, 1200], [0.0, 1.0], "easy", tmp_path, trials=3, **options)
    assert list(result["models"]) == ["LlamaForCausalLM", "LlamaForCausalLM (2)", "LlamaForCausalLM (3)"]
    own = [values["modes"]["easy"] for values in result["models"].values()]
    assert [values["found"] for values in own] == [[[1.0, 0.0], [1.0, 1.0]]] * 3
    assert [values["role"] for values in result["models"].values()] == ["model", "base", "base2"]
    assert len(result["answers"]) == 3 * 2 * 2 * 3
    for values in own:
        short, long = values["by_length"]
        assert (short["prompts"], short["found"], long["found"]) == (6, 1.0, 0.5)
        assert long["interval"] == pytest.approx(wilson_interval(0.5, 6))
    written = json.loads((tmp_path / "needle.json").read_text())
    assert written["models"] == result["models"]
    stems = {"needle", "needle_model_easy", "needle_base_easy", "needle_base2_easy"}
    pictures = {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == pictures | {"needle.json"}
    assert {Path(path).name for path in result["files"].values()} == {path.name for path in tmp_path.iterdir()}


def test_a_needle_is_found_where_greedy_decoding_emits_its_answer(haystack, llama, options):
    result = needle(llama, None, haystack, [480], 2, ["easy", "standard"], trials=2, **options)
    assert result["modes"] == list(MODES)
    tokenizer = options["tokenizer"]
    hay = needle_module.read_haystack(tokenizer, haystack, 480, "text")
    prompts = needle_module.make_prompts(hay, MODES, [480], [0.0, 1.0], 2, 0)
    for prompt, answer in zip(prompts, result["answers"], strict=True):
        ids = torch.tensor([prompt.token_ids.tolist()])
        decoded = llama.generate(ids, max_new_tokens=len(prompt.answer), do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer["found"] == (decoded == prompt.answer)
        assert tokenizer.decode(decoded, skip_special_tokens=True).startswith(answer["answer"])
        assert answer["log_probability"] < 0
