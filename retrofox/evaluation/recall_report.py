"""The report of recall: numbers by octave with their intervals, tables, files, a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from retrofox.evaluation.bootstrap import Bootstrap
from retrofox.evaluation.recall_figure import recall_figure
from retrofox.support.files import write_result
from retrofox.support.plots import save_csv, save_figure, tokens_label

KINDS = ("all", "cut", "whole")
"""Readings: every token that repeats something; the sampled ones with their source cut, and with other text cut."""


class Sums:
    """Losses, hits and tokens of one model, summed by kind of reading, octave of distance and document.

    Attributes:
        loss, hits, tokens: per kind of reading, (documents, octaves) float64.
    """

    def __init__(self, documents: int, octaves: int):
        self.loss, self.hits, self.tokens = (
            {kind: np.zeros((documents, octaves)) for kind in KINDS} for _ in ("loss", "hits", "tokens")
        )

    def add(self, kind: str, document: int, octave: np.ndarray, loss: np.ndarray, hit: np.ndarray) -> None:
        """Adds tokens of one document, their octaves (P,), losses (P,) and hits (P,)."""
        for sums, values in ((self.loss, loss), (self.hits, hit), (self.tokens, np.ones(len(octave)))):
            np.add.at(sums[kind][document], octave, values.astype(np.float64))


def octaves(sums: Mapping[str, Sums], edges: list[int]) -> list[dict[str, Any]]:
    """Per octave: from, to, tokens, documents, and by model "loss", "accuracy", "difference" and "control".

    Every number is {"mean", "interval"}. "difference" is to the model keyed "base", absent without one; "control"
    holds the sampled tokens' "tokens", "documents", and by model loss and accuracy "whole" and "cut", and "recalled",
    the paired loss(cut) - loss(whole) and accuracy(whole) - accuracy(cut).
    """
    any_model = next(iter(sums.values()))
    draws = Bootstrap(len(any_model.tokens["all"]))
    table = []
    for octave, (low, high) in enumerate(pairwise(edges)):
        tokens = any_model.tokens["all"][:, octave]
        row: dict[str, Any] = {
            "from": low,
            "to": high,
            "tokens": int(tokens.sum()),
            "documents": int((tokens > 0).sum()),
        }
        row["loss"] = {key: draws.ratio(s.loss["all"][:, octave], tokens) for key, s in sums.items()}
        row["accuracy"] = {key: _share(draws.ratio(s.hits["all"][:, octave], tokens)) for key, s in sums.items()}
        if "base" in sums:
            row["difference"] = {
                key: {
                    "loss": draws.ratio((s.loss["all"] - sums["base"].loss["all"])[:, octave], tokens),
                    "accuracy": draws.ratio((s.hits["all"] - sums["base"].hits["all"])[:, octave], tokens),
                }
                for key, s in sums.items()
                if key != "base"
            }
        sampled = any_model.tokens["cut"][:, octave]
        row["control"] = {"tokens": int(sampled.sum()), "documents": int((sampled > 0).sum())}
        row["control"] |= {key: _control(s, octave, draws) for key, s in sums.items()}
        table.append(row)
    return table


def _control(sums: Sums, octave: int, draws: Bootstrap) -> dict[str, Any]:
    loss, hits, tokens = ({k: s[k][:, octave] for k in KINDS} for s in (sums.loss, sums.hits, sums.tokens))
    found: dict[str, Any] = {
        kind: {
            "loss": draws.ratio(loss[kind], tokens[kind]),
            "accuracy": _share(draws.ratio(hits[kind], tokens[kind])),
        }
        for kind in ("whole", "cut")
    }
    found["recalled"] = {
        "loss": draws.ratio(loss["cut"] - loss["whole"], tokens["cut"]),
        "accuracy": draws.ratio(hits["whole"] - hits["cut"], tokens["cut"]),
    }
    return found


def _share(value: dict[str, Any]) -> dict[str, Any]:
    """An accuracy: its interval can't leave 0 .. 1."""
    if value["interval"] is not None:
        value["interval"] = [min(1.0, max(0.0, end)) for end in value["interval"]]
    return value


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Accuracy and loss by distance, then the control, then the conclusion in words."""
    labels = {line["key"]: line["label"] for line in result["lines"]}
    documents = result["documents"]
    title = f"Tokens that complete {result['ngram']} {result['unit']} seen before: top-1 accuracy, loss in nats"
    table = _table(f"{title}; {documents} document{'s' * (documents > 1)}", labels)
    for row in result["octaves"]:
        cells = [f"{_percent(row['accuracy'][key])}  {_nats(row['loss'][key])}" for key in labels]
        table.add_row(_distance(row), f"{row['tokens']:,}", *cells)
    console.print(table)
    if not any(row["control"]["tokens"] for row in result["octaves"]):
        return
    table = _table("The same with the source cut: accuracy whole > cut, rise of the loss", labels)
    for row in result["octaves"]:
        control = row["control"]
        cells = [
            f"{_percent(control[key]['whole']['accuracy'])} > {_percent(control[key]['cut']['accuracy'])}  "
            f"{_nats(control[key]['recalled']['loss'], signed=True)}"
            for key in labels
        ]
        table.add_row(_distance(row), f"{control['tokens']:,}", *cells)
    console.print(table)
    for sentence in verdicts(result):
        console.print(sentence, highlight=False, soft_wrap=True)


def verdicts(result: dict[str, Any]) -> list[str]:
    """Per model, the farthest octave where cutting the source raises the loss by more than its interval."""
    sentences = []
    for line in result["lines"]:
        rises = [(row, row["control"][line["key"]]["recalled"]["loss"]) for row in result["octaves"]]
        known = [(row, rise) for row, rise in rises if rise["interval"] is not None]
        clear = [(row, rise) for row, rise in known if rise["interval"][0] > 0]
        if not known:
            sentences.append(f"{line['label']}: no interval, since fewer than two documents repeat themselves")
        elif not clear:
            sentences.append(f"{line['label']}: at no distance does cutting the source clearly raise the loss")
        else:
            row, rise = clear[-1]
            low, high = rise["interval"]
            sentences.append(
                f"{line['label']} recalls text up to {_distance(row)} tokens back: cutting it there raises the loss by "
                f"{rise['mean']:+.3f} nats ({low:+.3f} to {high:+.3f})"
            )
    return sentences


def write_files(result: dict[str, Any], out: Path) -> dict[str, str]:
    """Writes recall.csv and the figure, then recall.json; returns their paths by name."""
    files = {"csv": save_csv(out / "recall.csv", *_rows(result))}
    figure = recall_figure(_curves(result), trained_length=result.get("trained_length"), subtitle=_subtitle(result))
    files["png"], files["svg"] = save_figure(figure, out / "recall")
    files["json"] = str(out / "recall.json")
    content = {**result, "files": files}
    write_result(files["json"], (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return files


def _rows(result: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """One row per octave and model, every number followed by the ends of its interval."""
    numbers = {
        "loss": lambda row, key: row["loss"][key],
        "accuracy": lambda row, key: row["accuracy"][key],
        "loss less base": lambda row, key: row.get("difference", {}).get(key, {}).get("loss"),
        "accuracy less base": lambda row, key: row.get("difference", {}).get(key, {}).get("accuracy"),
        "loss whole": lambda row, key: row["control"][key]["whole"]["loss"],
        "loss cut": lambda row, key: row["control"][key]["cut"]["loss"],
        "loss recalled": lambda row, key: row["control"][key]["recalled"]["loss"],
        "accuracy whole": lambda row, key: row["control"][key]["whole"]["accuracy"],
        "accuracy cut": lambda row, key: row["control"][key]["cut"]["accuracy"],
        "accuracy recalled": lambda row, key: row["control"][key]["recalled"]["accuracy"],
    }
    header = ["model", "from", "to", "tokens", "documents", "control tokens", "control documents"]
    header += [f"{name}{end}" for name in numbers for end in ("", " low", " high")]
    rows = []
    for line in result["lines"]:
        for row in result["octaves"]:
            cells: list[object] = [line["label"], row["from"], row["to"], row["tokens"], row["documents"]]
            cells += [row["control"]["tokens"], row["control"]["documents"]]
            for number in numbers.values():
                value = number(row, line["key"]) or {"mean": None, "interval": None}
                cells += [value["mean"], *(value["interval"] or [None, None])]
            rows.append(cells)
    return header, rows


def _curves(result: dict[str, Any]) -> list[dict[str, Any]]:
    curves = []
    for line in result["lines"]:
        rows = [row for row in result["octaves"] if row["tokens"]]
        cut = [row for row in rows if row["control"]["tokens"]]
        key = line["key"]
        curves.append(
            {
                "label": line["label"],
                "distance": [_centre(row) for row in rows],
                "accuracy": [row["accuracy"][key] for row in rows],
                "cut_distance": [_centre(row) for row in cut],
                "accuracy_cut": [row["control"][key]["cut"]["accuracy"] for row in cut],
                "recalled": [row["control"][key]["recalled"]["loss"] for row in cut],
            }
        )
    return curves


def _centre(row: dict[str, Any]) -> float:
    return math.sqrt(row["from"] * row["to"])


def _subtitle(result: dict[str, Any]) -> str:
    documents = result["documents"]
    interval = "1 document" if documents == 1 else f"{documents} documents, band: 95 % interval over them"
    return f"tokens that complete {result['ngram']} {result['unit']} last seen d tokens back; {interval}"


def _table(title: str, labels: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("distance", "tokens", *labels.values()):
        table.add_column(name, justify="right")
    return table


def _distance(row: dict[str, Any]) -> str:
    return f"{tokens_label(row['from'])}-{tokens_label(row['to'])}"


def _percent(value: dict[str, Any]) -> str:
    return "-" if value["mean"] is None else f"{100 * value['mean']:.0f} %"


def _nats(value: dict[str, Any], signed: bool = False) -> str:
    if value["mean"] is None:
        return ""
    text = f"{value['mean']:+.3f}" if signed else f"{value['mean']:.3f}"
    return text if value["interval"] is None else f"{text} ±{value['interval'][1] - value['mean']:.3f}"
