"""Options that would exhaust the memory are refused in one line before anything runs."""

from __future__ import annotations

import pytest

from retrofox.generation import room
from retrofox.generation.generate import generate
from retrofox.loading.opened import open_model


@pytest.fixture
def opened(pico_fox, pico_tokenizer):
    return open_model(pico_fox(), tokenizer=pico_tokenizer)


def test_more_beams_than_there_is_memory_for_are_refused(run, pico_fox_checkpoint):
    code, out, err = run("generate", pico_fox_checkpoint, "the fox", "--num-beams", 10**9, "--max-new-tokens", 2)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: num_beams 1,000,000,000 for prompts of 1 x ")
    assert err.endswith("are free on cpu: give fewer\n")


def test_beams_are_counted_with_their_scores_and_keys(opened, monkeypatch):
    needed = 2 * 3 * (2 * 4 * 288 + 4 * 2 * 2 * 2 * 8 * 4)  # 2 prompts of 4 tokens; 2 layers, 2 key/value heads of 8
    ids = [opened.tokenizer("forgets")["input_ids"][0]] * 4
    monkeypatch.setattr("retrofox.generation.generate._encode", lambda *_: ids)
    beams = {"num_beams": 3, "max_new_tokens": 2, "tokenizer": opened.tokenizer, "stream": False}
    for free, enough in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(room, "free_bytes", lambda device, free=free: free)
        if enough:
            assert len(generate(opened.model, ["a", "b"], **beams)["texts"]) == 2
            continue
        with pytest.raises(ValueError, match=r"num_beams 3 for prompts of 2 x 4 tokens takes at least \d+ kB"):
            generate(opened.model, ["a", "b"], **beams)
    assert generate(opened.model, ["a"], 2, tokenizer=opened.tokenizer, stream=False)["new_tokens"] == 2


SHARED = "import sys\nfrom retrofox.cli import main\nsys.argv[0] = 'retrofox'\nmain()"


def test_new_tokens_that_shared_rooms_can_not_hold_are_refused(launch, pico_fox_checkpoint):
    words = ["generate", pico_fox_checkpoint, "the fox", "--context", "2", "--max-new-tokens", "1e15"]
    done = launch(SHARED, *words, processes=2)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors
    for line in errors:
        assert line.startswith("error: max_new_tokens 1,000,000,000,000,000 with context 2 sets aside, on each process")
    assert "Traceback" not in done.stderr
