"""Figures: what is drawn is what was given, files are whole, the same numbers give the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrofox.support.files import write_result
from retrofox.support.plots import half_life_figure, loss_figure, needle_figure, save_figure, tokens_label


def curve(label: str, level: float, error: float | None = 0.1, look: int = 0) -> dict:
    position = np.geomspace(1, 4096, 40)
    return {
        "label": label,
        "look": look,
        "position": position.tolist(),
        "mean": (level - 0.05 * np.log2(position)).tolist(),
        "standard_error": [error] * 40,
    }


def test_loss_figure_draws_each_model_once_with_units_and_a_legend():
    figure = loss_figure([curve("retrofit", 4.0), curve("base", 4.2)], [], reference="base", trained_length=1024)
    [axes] = figure.axes
    loss_figure([curve("one", 3.0, None)], [], reference="")  # of a single document there is no band
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels[:2] == ["retrofit", "base"]
    np.testing.assert_allclose(np.asarray(axes.get_lines()[0].get_ydata()), curve("", 4.0)["mean"])
    assert "tokens" in axes.get_xlabel()
    assert "nats" in axes.get_ylabel()
    assert axes.get_legend_handles_labels()[1] == ["retrofit", "base"]
    assert any("trained length 1k" in text.get_text() for text in axes.texts)


def test_names_are_drawn_as_they_are(tmp_path):
    name = r"_m$\frac$"  # no formula, and not left out of the legend as matplotlib leaves out _names
    figure = loss_figure([curve(name, 4.0), curve("a$b$", 4.1)], [curve(name, 0.1)], reference="a$b$", subtitle=name)
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == [name, "a$b$"]  # type: ignore
    save_figure(figure, tmp_path / "loss")
    save_figure(needle_figure([[1.0]], [1024], [0.0], title=name), tmp_path / "needle")


def test_differences_get_a_panel_of_their_own_in_the_same_colours():
    curves = [curve("a", 4.0, look=0), curve("b", 4.2, look=1)]
    upper, lower = loss_figure(curves, [curve("b", 0.1, look=1)], reference="a").axes
    assert lower.get_lines()[0].get_color() == upper.get_lines()[1].get_color()
    assert lower.get_title(loc="left") == "L(i) less that of a"
    assert "nats" in lower.get_ylabel()
    assert lower.get_yscale() == "linear"
    wide = loss_figure(curves, [curve("b", -5.0, look=1)], reference="a")
    assert wide.axes[1].get_yscale() == "symlog"


def test_needle_figure_shows_every_cell():
    grid = [[1.0, 0.5], [0.25, 1.0], [0.0, 0.75]]
    figure = needle_figure(grid, [1024, 8192], [0.0, 0.5, 1.0], trained_length=2048, title="t")
    axes = figure.axes[0]
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), grid)
    shown = [text.get_text() for text in axes.texts]
    assert [text for text in shown if text.endswith("%")] == ["100%", "50%", "25%", "100%", "0%", "75%"]
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["1k", "8k"]


def test_half_life_figure_counts_heads_that_never_forget():
    figure = half_life_figure([[10.0, 300.0], [5000.0, np.inf]], local_below=64, global_from=1024, ceiling=2**20)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["a head (3)", "over 1M (1)", "local below 64", "global from 1k"]


def test_the_same_numbers_give_the_same_files(tmp_path):
    saved = [save_figure(loss_figure([curve("a", 4.0)], [], reference=""), tmp_path / name) for name in ("x", "y")]
    for first, second in zip(*saved, strict=True):
        assert Path(first).read_bytes() == Path(second).read_bytes()


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_result(path, b"old")
    assert path.stat().st_mode & 0o444 == 0o444
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk is gone")))
    with pytest.raises(ValueError, match=r"can't write .*results.json: disk is gone; free some disk space"):
        write_result(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def test_token_counts_are_labelled_as_context_lengths_are_named():
    assert [tokens_label(n) for n in (1, 512, 1000, 1024, 1536, 32768, 1 << 20)] == [
        "1", "512", "1000", "1k", "1.5k", "32k", "1M"
    ]  # fmt: skip
    # a half-life comes back from its gate with a rounding error, and 1000 to 1023 k have four digits
    assert [tokens_label(n) for n in (1023.9, 1048575.1, 1040000.0, 3.5 * 2**20)] == ["1k", "1M", "1016k", "3.5M"]
