"""Figures: what is drawn is what was given, and the same numbers give the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrofox.evaluation import gates_report, loss_report
from retrofox.support.plots import save_figure


def curve(label: str, level: float, error: float | None = 0.1, look: int = 0) -> dict:
    position = np.geomspace(1, 4096, 40)
    return {
        "label": label,
        "look": look,
        "position": position.tolist(),
        "mean": (level - 0.05 * np.log2(position)).tolist(),
        "standard_error": [error] * 40,
    }


def losses(*curves: dict, less: tuple[dict, ...] = ()):
    """The figure of eval.json with these curves and differences."""
    lines = [{"key": key, "label": own["label"]} for key, own in zip(("base", "model"), curves, strict=False)]
    given = {"lines": lines, "curves": curves, "difference_curves": less, "trained_length": 1024, "documents": 2}
    return loss_report.figure(given)


def test_names_are_drawn_as_they_are_and_the_same_numbers_give_the_same_files(tmp_path):
    name = r"m$\frac$"  # no formula
    drawn = [losses(curve(name, 4.0), curve("a$b$", 4.1), less=(curve(name, 0.1),)) for _ in range(2)]
    assert [text.get_text().strip() for text in drawn[0].axes[0].get_legend().get_texts()] == [name, "a$b$"]  # type: ignore
    saved = [save_figure(figure, tmp_path / stem) for figure, stem in zip(drawn, ("x", "y"), strict=True)]
    first, second = ([Path(file).read_bytes() for file in files.values()] for files in saved)
    assert first == second


def test_differences_get_a_panel_of_their_own_in_the_same_colours():
    curves = [curve("a", 4.0, look=0), curve("b", 4.2, look=1)]
    upper, lower = losses(*curves, less=(curve("b", 0.1, look=1),)).axes
    assert lower.get_lines()[0].get_color() == upper.get_lines()[1].get_color()
    assert lower.get_title(loc="left") == "L(i) less that of a"
    assert "nats" in lower.get_ylabel()
    assert lower.get_yscale() == "linear"
    assert losses(*curves, less=(curve("b", -5.0, look=1),)).axes[1].get_yscale() == "symlog"


def test_a_text_of_two_tokens_is_drawn():
    figure = losses({"label": "a", "look": 0, "position": [1.0], "mean": [4.0], "standard_error": [None]})
    assert figure.axes[0].get_xlim() == (1.0, 2.0)


def test_heads_that_never_forget_are_counted():
    heads = [{"layer": n, "half_life": life} for n, life in ((0, 10.0), (0, 300.0), (1, 5000.0), (1, None))]
    result = {"trained_length": 1024, "layers": 2, "heads": heads, "tokens": 0}
    labels = gates_report.figure(result).axes[0].get_legend_handles_labels()[1]
    assert labels == ["a head (3)", "over 128k (1)", "local below 64", "global from 1k"]
