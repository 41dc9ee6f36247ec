"""Progress of long work where no terminal draws a bar: a line a minute."""

from __future__ import annotations

import io
import itertools
from functools import partialmethod

import numpy as np
import pytest

from retrofox.conversion.directory import copy_shards
from retrofox.data.windows import Window
from retrofox.evaluation.live_share import gates_of_texts
from retrofox.evaluation.model_difference import token_differences
from retrofox.evaluation.token_scores import BATCH_TOKENS, Scored, score_tokens
from retrofox.generation import generate as generation
from retrofox.loading.loaded_model import open_model
from retrofox.loading.shards import Shards
from retrofox.support import report


@pytest.fixture
def bars_read(monkeypatch):
    """bars_read(clock): from here on bars ask this function for the time in seconds."""
    init = report.Progress.__init__
    return lambda clock: monkeypatch.setattr(report.Progress, "__init__", partialmethod(init, get_time=clock))


def test_a_pipe_is_told_the_time_left_once_a_minute(bars_read, capsys):
    now = [0.0]
    bars_read(lambda: now[0])
    with report.progress_bar("tokens", True) as bar:
        task = bar.add_task("model", total=4000)
        for now[0] in (30, 59, 90, 100):
            bar.advance(task, 300)
    assert capsys.readouterr().err == "model: 900 of 4,000 tokens, 1 min 30 s so far, about 5 min 10 s left\n"


IDS = np.random.default_rng(0).integers(3, 280, 40)


def test_one_pass_over_a_text_advances_layer_by_layer(pico_fox):
    model, told = pico_fox(), []
    score_tokens(model, [Scored(IDS, np.arange(1, 40))], told.append)
    token_differences(model, model, IDS, told.append)
    assert sum(told) == pytest.approx(39 + 40)
    assert len(told) == 3 * model.config.num_hidden_layers + 2


@pytest.fixture
def slow(bars_read):
    """A minute passes between any two looks at the clock."""
    bars_read(itertools.count(0, 61).__next__)


def test_copied_weights_are_counted(slow, tmp_path, capsys):
    file = tmp_path / "base.safetensors"
    file.write_bytes(bytes(3_000_000))
    copy_shards(Shards({"copy.safetensors": file}), tmp_path, progress=True)
    assert (tmp_path / "copy.safetensors").read_bytes() == file.read_bytes()
    assert "copying weights: 3 of 3 MB" in capsys.readouterr().err


def test_answers_of_lm_evals_tasks_are_counted(slow, pico_fox, pico_tokenizer, capsys):
    from lm_eval.api.instance import Instance

    from retrofox.evaluation.harness_model import BatchedModel

    lm = BatchedModel(open_model(pico_fox(), tokenizer=pico_tokenizer), max_length=BATCH_TOKENS["cpu"])  # one a batch
    asked = {"until": ["fox"], "max_gen_toks": 4}
    found = lm.generate_until([Instance("generate_until", {}, (text, asked), 0) for text in ("the", "gate", "a")])
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 3 answers" in line]
    assert (len(found), len(lines)) == (3, 3)


def test_a_pass_longer_than_a_minute_tells_the_time_left(slow, pico_fox, pico_tokenizer, monkeypatch, capsys):
    opened = open_model(pico_fox(), tokenizer=pico_tokenizer)
    layers = opened.model.config.num_hidden_layers
    list(gates_of_texts(opened, [Window(IDS, "a")]))
    assert capsys.readouterr().err.count(f"{opened.name}: ") == layers
    monkeypatch.setattr(generation, "SHORT_PROMPT", 8)
    monkeypatch.setattr(generation, "CPU_PART", 16)
    hooks: list[int] = []

    class Hooks(io.StringIO):
        def write(self, text: str) -> int:
            hooks.append(len(opened.model.model.layers[0]._forward_hooks))
            return super().write(text)

    generation.generate(
        opened.model, ["the gate is open and the fox " * 2], 4, tokenizer=pico_tokenizer, output=Hooks()
    )
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("reading the prompt: ")]
    assert len(lines) == 2 * layers, lines
    assert "about 0 s left" in lines[-1]
    assert set(hooks) == {0}  # the prompt's are gone before the first token
