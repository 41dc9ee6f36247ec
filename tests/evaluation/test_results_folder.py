"""Where results may go: not among the texts they are measured on, which would be others the next time."""

import pytest


@pytest.mark.parametrize("command", ["eval", "needle", "inspect", "report"])
def test_results_among_the_texts_are_refused(pico_fox_checkpoint, run, tmp_path, command):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the fox forgets the gate, and so on and on " * 20)
    before = sorted(texts.rglob("*"))
    for out in (texts / "results", texts):
        code, _, error = run(command, pico_fox_checkpoint, "--data", texts, "--out", out)
        assert code == 2
        assert f"results can't go to {out}: it lies inside the data, {texts}, and would be read as texts" in error
        assert len(error.strip().splitlines()) == 1
    assert sorted(texts.rglob("*")) == before


def test_results_in_a_folder_that_is_not_searched_are_not_read_as_texts(pico_fox_checkpoint, run, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the fox forgets the gate, and so on and on " * 20)
    for _ in range(2):
        words = ("--data", texts, "--length", 32, "--out", texts / "_results")
        code, _, error = run("eval", pico_fox_checkpoint, *words)
        assert code == 0, error
