"""The page: nothing from a network, memory first, names escaped, words that intervals allow."""

from __future__ import annotations

import base64
import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from retrofox.reporting.page import render
from retrofox.reporting.summary import BETTER, UNCLEAR, WORSE, cell, difference, summarise


class Reader(HTMLParser):
    """Tags with their attributes, open tags, and the text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def page(made) -> str:
    return (made["out"] / "report.html").read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_elsewhere(page):
    read = Reader(page)
    assert read.open == []
    names = {tag for tag, _ in read.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, given in read.tags:
        for name, value in given.items():
            assert name not in ("srcset", "background", "action", "poster")
            assert not name.startswith("on")
            if name in ("href", "src"):
                assert str(value).startswith(("#", "data:image/svg+xml;base64,")), value
    assert "url(" not in page
    assert "@import" not in page
    assert "//" not in re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", page).replace("CPU, ", "")


def test_figures_are_those_that_the_evaluations_drew_and_name_no_file(page, made):
    files = [file.read_text(encoding="utf-8") for file in made["out"].rglob("*.svg")]
    assert sorted(figures(page)) == sorted(files)
    for drawn in files:
        references = re.findall(r'(?:xlink:href|href)="([^"]*)"', drawn)
        assert all(reference.startswith(("#", "data:")) for reference in references)


def test_memory_comes_first_and_everything_has_its_place(page, made):
    read = Reader(page)
    sections = [given["id"] for tag, given in read.tags if tag == "section"]
    assert sections == ["needles", "loss", "panel", "heads", "missing", "method"]
    assert [given["href"] for tag, given in read.tags if tag == "a"] == [f"#{name}" for name in sections]
    environment = made["result"]["environment"]
    assert environment["command"] in read.text
    for fact in (environment["cpu"]["name"], environment["versions"]["torch"]):
        assert fact in read.text
    for row in made["result"]["summary"]["rows"]:
        assert row["what"] in read.text
    for texts in made["result"]["summary"]["sentences"].values():
        assert all(text in read.text for text in texts)


def figures(page: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall(r"base64,([A-Za-z0-9+/=]+)", page)]


def test_names_make_no_html(made):
    result = copy.deepcopy(made["result"])
    result["summary"]["labels"]["model"] = '<script>alert("&")</script>|*x*'
    result["missing"]["<img src=x>"] = "a <b>bold</b> reason"
    read = Reader(render(result))
    assert not {"script", "b"} & {tag for tag, _ in read.tags}
    assert '<script>alert("&")</script>|*x*' in read.text


def needle_result(model: list[float], base: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {"modes": ["easy"], "lengths": [64], "depths": [0.0], "trials": len(model)}
    result |= {"models": {}, "answers": [], "names": {"model": "mine", "base": "theirs"}}
    for name, role, shares in (("mine", "model", model), ("theirs", "base", base)):
        row = {"found": sum(shares) / len(shares), "interval": [0.1, 0.9], "prompts": len(shares)}
        result["models"][name] = {"role": role, "modes": {"easy": {"by_length": [row]}}}
        result["answers"] += [{"model": name, "mode": "easy", "length": 64, "found": share} for share in shares]
    return result


@pytest.mark.parametrize(
    ("model", "base", "state"),
    [
        ([1.0] * 8, [0.0] * 8, BETTER),
        ([0.0] * 8, [1.0] * 8, WORSE),
        ([1.0] * 8, [1.0] * 4 + [0.0] * 4, UNCLEAR),  # four that differ: p = 1/8
        ([1.0, 0.0] * 8, [0.0, 1.0] * 8, UNCLEAR),
    ],
)
def test_a_difference_is_called_clear_by_a_paired_test_alone(model, base, state):
    summary = summarise({"needle-easy": needle_result(model, base)})
    assert [row["state"] for row in summary["rows"]] == [state]
    assert summary["labels"] == {"model": "mine", "base": "theirs"}


def test_tasks_are_judged_by_their_test_and_the_side_that_is_better():
    p = {"difference": 0.1, "standard_error": 0.01, "p": 0.001, "documents": 9}
    tasks = {
        "names": {"model": "mine", "base": "theirs"},
        "tasks": {
            key: {"t": {"acc,none": 0.5, "acc_stderr,none": 0.1, "perplexity,none": 5.0}} for key in ("model", "base")
        },
        "task_differences": {"model": {"t": {"acc,none": p, "perplexity,none": p}}},
    }
    rows = summarise({"tasks": tasks})["rows"]
    assert [(row["what"], row["state"]) for row in rows] == [("t, acc", BETTER), ("t, perplexity", WORSE)]
    assert cell(rows[0]["values"]["model"], "score") == ("0.5", "±0.100")
    assert difference(rows[0]) == ("+0.1000", "±0.0100, p 0.001")


@pytest.mark.parametrize(
    ("interval", "state"), [([-0.9, -0.1], BETTER), ([0.1, 0.9], WORSE), ([-0.8, 0.1], UNCLEAR), (None, UNCLEAR)]
)
def test_losses_are_judged_by_the_interval_of_their_difference(made, interval, state):
    parts = copy.deepcopy({name: made["result"]["parts"][name]["result"] for name in ("loss", "panel")})
    loss, changed = {"mean": 0.5, "interval": [-0.2, 1.2]}, {"mean": -0.4, "standard_error": 0.1, "interval": interval}
    for bucket in parts["loss"]["buckets"]:
        bucket["loss"]["model"], bucket["difference"]["model-base"] = loss, changed
    next(iter(parts["panel"]["kinds"].values()))["spans"][0] |= {"loss": loss, "difference": changed}
    for part, result in parts.items():
        row = summarise({part: result})["rows"][0]
        assert row["state"] == state
        assert row["values"]["model"]["interval"] == [0.0, 1.2]  # no loss lies below 0
        assert row["difference"]["interval"] == interval  # a difference has no such end


def test_numbers_are_printed_with_their_intervals_and_no_negative_zero():
    share = {"value": 0.77, "interval": [0.684, 0.841]}
    assert cell(share, "share") == ("77 %", "(68 to 84)")
    assert cell({"value": 3.21, "interval": None}, "nats") == ("3.210", "")
    assert cell(None, "nats") == cell({"value": None}, "share") == ("-", "")
    row = {"unit": "share", "difference": {"value": -0.001, "interval": [-0.004, 0.02]}}
    assert difference(row) == ("0 pp", "(0 to +2)")


def test_the_headline_says_what_was_shown_and_what_was_too_few():
    few = ["4 easy needle prompts a length"]
    shown = summarise({"needle-easy": needle_result([1.0] * 8, [0.0] * 8)})
    assert shown["headline"] == "Of 1 comparisons with the base, 1 are better and 0 worse"
    none = summarise({"needle-easy": needle_result([1.0] * 4, [0.0] * 4)})
    assert (none["headline"], none["few"]) == (f"No difference to the base shown; too few: {few[0]}", few)


def test_a_small_sample_has_a_banner_and_a_large_one_none(made):
    result = copy.deepcopy(made["result"])
    page = render(result)
    assert "Too little to show much: 3 documents, 2 easy needle prompts" in page
    result["summary"]["few"] = []
    assert "Too little" not in render(result)
