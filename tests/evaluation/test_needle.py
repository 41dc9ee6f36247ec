"""`retrofox needle`: grids and intervals that count right, files that hold them, refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from retrofox.evaluation.needle import MODES, needle
from retrofox.evaluation.needles import report, scoring
from retrofox.evaluation.needles.shares import wilson_interval
from retrofox.evaluation.needles.tasks import ACTS

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
    """Generation by a model that reads only the last 500 tokens, and those perfectly."""

    def answer(opened, token_ids, max_new_tokens):
        answers = []
        for ids in token_ids:
            seen = pico_tokenizer.decode(ids[-500:])
            act = next((act for act in ACTS if f"is to {act}" in seen), "do nothing")
            answers.append(pico_tokenizer(f" {act}.", add_special_tokens=False)["input_ids"][:max_new_tokens])
        return answers

    monkeypatch.setattr(scoring, "complete", answer)


def test_the_grid_counts_exact_matches_and_the_files_hold_it(haystack, llama, options, near_reader, tmp_path):
    result = needle(
        llama, [llama, llama], haystack, [480, 1200], [0.0, 1.0], "easy", tmp_path, trials=3, generate=True, **options
    )
    assert list(result["models"]) == ["LlamaForCausalLM", "LlamaForCausalLM (2)", "LlamaForCausalLM (3)"]
    assert [values["found"] for values in result["models"].values()] == [[[1.0, 0.0], [1.0, 1.0]]] * 3
    assert [values["role"] for values in result["models"].values()] == ["model", "base", "base2"]
    assert len(result["answers"]) == 3 * 2 * 2 * 3
    for values in result["models"].values():
        short, long = values["modes"]["easy"]["by_length"]
        assert (short["prompts"], short["found"], long["found"]) == (6, 1.0, 0.5)
        assert long["interval"] == pytest.approx(wilson_interval(0.5, 6))
    written = json.loads((tmp_path / "needle.json").read_text())
    assert written["models"] == result["models"]
    rows = list(csv.DictReader((tmp_path / "needle_lengths.csv").read_text().splitlines()))
    assert [(row["length"], float(row["found"])) for row in rows[:2]] == [("480", 1.0), ("1200", 0.5)]
    assert [float(rows[1][key]) for key in ("low", "high")] == pytest.approx(wilson_interval(0.5, 6))
    assert (tmp_path / "needle.csv").read_text().count(",True,") == 3 * 9
    stems = {"needle", "needle_model", "needle_base", "needle_base2"}
    pictures = {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == pictures | {"needle.json", "needle.csv", "needle_lengths.csv"}
    assert {Path(path).name for path in result["files"].values()} == {path.name for path in tmp_path.iterdir()}


def test_the_table_shows_shares_with_wilson_intervals_side_by_side(haystack, llama, options, near_reader, capsys):
    needle(llama, llama, haystack, [480, 1200], [0.0, 1.0], trials=3, generate=True, **options)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    one, two = "LlamaForCausalLM", "LlamaForCausalLM (2)"
    assert cells == [
        ["480", one, "100%", "61-100 %", "-"],
        ["", two, "100%", "61-100 %", "-"],
        ["1.17k", one, "50%", "19-81 %", "-"],
        ["", two, "50%", "19-81 %", "-"],
    ]


def test_the_figure_draws_each_modes_shares_and_intervals():
    rows = [{"found": 0.5, "interval": [0.2, 0.8]}, {"found": 1.0, "interval": [0.7, 1.0]}]
    other = [{"found": 0.0, "interval": [0.0, 0.3]}] * 2
    modes = {"easy": {"by_length": rows}, "multi-key": {"by_length": other}}
    result = {"modes": list(modes), "lengths": [64, 128], "models": {"m": {"modes": modes}}, "decided_by": "x"}
    figure = report.length_figure(result)
    assert isinstance(figure, Figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(modes)
    [bars] = figure.axes[0].containers
    np.testing.assert_allclose(bars[0].get_ydata(), [0.5, 1.0])
    ends = [segment[:, 1] for segment in bars[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[0.2, 0.8], [0.7, 1.0]])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_asks_its_own_questions_in_both_ways(haystack, llama, options, mode):
    size = {"lengths": [2500], "trials": 1} if mode == "common-words" else {"lengths": [1200], "trials": 2}
    options = {**options, **size, "depths": 1, "mode": mode}
    forced, decoded = (needle(llama, None, haystack, generate=generate, **options) for generate in (False, True))
    assert (forced["mode"], forced["modes"]) == (mode, [mode])
    assert {answer["mode"] for answer in forced["answers"]} == {mode}
    assert [a["share"] for a in forced["answers"]] == [a["share"] for a in decoded["answers"]]
    assert all(answer["log_probability"] < 0 for answer in forced["answers"])
    assert all(answer["log_probability"] is None for answer in decoded["answers"])
    values = {"multi-value": 4, "multi-query": 4, "variable-tracking": 5, "common-words": 10}.get(mode, 1)
    assert all(len(answer["answer"].split(" | ")) == values for answer in forced["answers"])


def test_several_modes_share_one_run(haystack, llama, options, tmp_path, capsys):
    modes = ["standard", "multi-value", "standard"]
    result = needle(llama, None, haystack, [1100], [0.0, 1.0], modes, tmp_path, trials=1, **options)
    assert result["modes"] == ["standard", "multi-value"]
    own = result["models"]["LlamaForCausalLM"]["modes"]
    assert (own["standard"]["depths"], own["multi-value"]["depths"]) == ([0.0, 1.0], None)
    assert np.shape(own["standard"]["found"]) == (2, 1)
    assert np.shape(own["multi-value"]["found"]) == (1, 1)
    assert [rows["by_length"][0]["prompts"] for rows in own.values()] == [2, 2]
    assert {path.stem for path in tmp_path.glob("*.png")} == {"needle", "needle_model_standard"}
    printed = capsys.readouterr().out
    assert "standard mode" in printed
    assert "multi-value mode" in printed


def test_the_command_line_hands_every_option_on(run, monkeypatch):
    given: dict[str, Any] = {}

    def record(model, against, data, lengths, **options):
        given.update(options, model=model, against=against, data=data, lengths=lengths)

    monkeypatch.setattr("retrofox.evaluation.needle.needle", record)
    words = (
        "M --data a b --against B C --lengths 64,128 --depths 3 --mode multi-key --mode standard --trials 7 --seed 5"
    )
    assert run("needle", *words.split(), "--batch", "4", "--generate", "--out", "o", "--baseline", "drope")[0] == 0
    assert given == {
        "model": "M", "against": ["B", "C"], "data": ["a", "b"], "lengths": [64, 128], "depths": 3, "batch": 4,
        "mode": ["multi-key", "standard"], "trials": 7, "seed": 5, "generate": True, "out": Path("o"),
        "text_field": "text", "device": None, "dtype": None, "baselines": ["drope"],
    }  # fmt: skip
    assert run("needle", "M", "--data", "a")[0] == 0
    assert (given["mode"], given["batch"], given["generate"], given["against"]) == (["easy"], "auto", False, None)


def test_the_mode_of_the_command_line_is_the_mode_that_runs(run, pico_checkpoint, haystack, tmp_path):
    for name, modes in (("standard", ["standard"]), ("all", list(MODES))):
        words = ["--lengths", 2500, "--depths", 1, "--trials", 1, "--mode", name, "--out", tmp_path / name]
        code, printed, _ = run("needle", pico_checkpoint, "--data", haystack[0], *words)
        assert code == 0
        written = json.loads((tmp_path / name / "needle.json").read_text())
        assert [answer["mode"] for answer in written["answers"]] == modes
        assert all(f"{mode} mode" in printed for mode in modes)
    code, _, err = run("needle", pico_checkpoint, "--data", haystack[0], "--mode", "hard")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "mode must be one of easy, standard" in err


def test_needle_runs_a_model_in_batches(haystack, llama, options):
    options = {**options, "lengths": [400, 500], "depths": 3, "trials": 1}
    together, alone = (needle(llama, None, haystack, batch=batch, **options) for batch in (4, 1))
    assert [a["answer"] for a in together["answers"]] == [a["answer"] for a in alone["answers"]]
    assert together["depths"] == [0.0, 0.5, 1.0]


def test_refusals(haystack, llama, options, tmp_path):
    for change, message in (
        ({"mode": "hard"}, "mode must be one of easy, standard"),
        ({"mode": ["easy", "hard"]}, "got 'hard'"),
        ({"mode": ["all", "hard"]}, "got 'hard'"),
        ({"mode": []}, "mode must be one of"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [10**30]}, "lengths"),
        ({"depths": -1}, "depths must be at least 1"),
        ({"depths": [1.5]}, "depths"),
        ({"trials": 0}, "trials"),
        ({"batch": 0}, "batch must be auto, or"),
        ({"batch": "many"}, "batch must be auto, or .* got 'many'"),
        ({"data": []}, "haystack"),
        ({"lengths": [40]}, r"can't hold needle and question of mode easy: the lengths must be at least \d+"),
    ):
        with pytest.raises(ValueError, match=message):
            needle(llama, **{"data": haystack, "out": tmp_path / "out", **options, **change})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        needle(llama, None, [*haystack, "nowhere.txt"], **options)
    assert not list(tmp_path.iterdir())


def test_models_with_other_tokenizers_are_not_compared(haystack, llama, options, tmp_path, pico_checkpoint):
    path = pico_checkpoint / "tokenizer.json"
    changed = json.loads(path.read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:3]
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="tokenizer mismatch"):
        needle(llama, pico_checkpoint, haystack, [400], **options)
