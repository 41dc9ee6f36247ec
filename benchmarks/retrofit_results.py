"""Gathers what training and evaluations wrote about each arm into one file, and draws it: loss beside needles.

    python benchmarks/retrofit_results.py collect RUNS [--into FILE]   # RUNS/ARM/{result.json,log.jsonl,eval/,...}
    python benchmarks/retrofit_results.py draw           # benchmarks/retrofit/retrofit.{svg,png}

Arms go into benchmarks/retrofit/arms.json, or FILE, beside those that are there; docs/results.md draws its tables from
it. A folder that holds evaluations without a result.json adds them to an arm that is there. Panels are read from
ARM/panel/panel.json and ARM/panel_again/, live shares from ARM/gates/gates.json (`panel` and `inspect` with --out),
RULER's scores from ARM/ruler.json (ruler.py).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from retrofox.support.files import write_json
from retrofox.support.plots import COLOURS, STYLE

HERE = Path(__file__).parent
ARMS = HERE / "retrofit" / "arms.json"
IMAGE = HERE / "retrofit" / "retrofit"
KEYS = ("fox", "lora", "rope_scaling", "rope_theta", "seed", "stages")
CURVE = 24
"""Points that are kept of a training's curve."""


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def needles(folder: Path, model: str | None = None) -> dict[str, Any]:
    """By mode: length, prompts, share found (by depth, too), its Wilson interval and the answers' mean log-probability.

    Of the model of that label, or of the only one; from needle-MODE/ and folders whose names go on, such as
    needle-easy-64k/.
    """
    found: dict[str, Any] = {}
    for mode in ("easy", "standard"):
        for path in sorted(folder.glob(f"needle-{mode}*/needle.json")):
            models = read(path)["models"]
            (label,) = models if model is None else [model]
            measured = models[label]["modes"][mode]
            by_depth = zip(*measured["found"], strict=True)  # written by depth, then length
            for row, depths in zip(measured["by_length"], by_depth, strict=True):
                found.setdefault(mode, []).append(row | {"by_depth": [round(share, 3) for share in depths]})
    return {mode: sorted(rows, key=lambda row: row["length"]) for mode, rows in found.items()}


def losses(path: Path, model: str = "model") -> list[dict[str, Any]]:
    """By stretch of positions: tokens, mean loss and its standard error, nats per token."""
    if not path.exists():
        return []
    return [
        {key: bucket[key] for key in ("from", "to", "tokens")} | bucket["loss"][model]
        for bucket in read(path)["buckets"]
    ]


def tasks(path: Path) -> dict[str, dict[str, float]]:
    """By task: accuracy and its standard error, of lm-eval's `acc`."""
    if not path.exists():
        return {}
    return {
        task: {"accuracy": scores["acc,none"], "error": scores["acc_stderr,none"]}
        for task, scores in sorted(read(path)["tasks"]["model"].items())
    }


def evaluations(folder: Path) -> dict[str, Any]:
    """What was measured of an arm: needles, losses, tasks; panel, live share and RULER where they are there."""
    found = {
        "needles": needles(folder),
        "loss": losses(folder / "eval" / "eval.json"),
        "loss_128k": losses(folder / "eval-128k" / "eval.json"),
        "tasks": tasks(folder / "tasks" / "eval.json"),
    }
    for name in ("panel", "panel_again"):  # of other documents
        if (panel := folder / name / "panel.json").exists():
            found[name] = {key: read(panel)[key] for key in ("kinds", "worst", "instructions")}
    if (gates := folder / "gates" / "gates.json").exists():
        found["live"] = read(gates)["live_share"]
    if (ruler := folder / "ruler.json").exists():
        found["ruler"] = read(ruler)["by_length"]
    return found


def arm(folder: Path) -> dict[str, Any]:
    """All that one folder tells of its arm."""
    result = read(folder / "result.json")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = log[:: max(1, len(log) // CURVE)]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["recipe"]
    facts = recipe["data"] | {key: share for key, share in recipe["data"]["train"][0].items() if share is not None}
    return {
        "recipe": {key: recipe.get(key) for key in KEYS},
        "facts": {
            "recall": facts.get("fact_share", facts.get("recall")),
            "questions": facts.get("questions"),
            "self_chat": recipe["data"].get("self_chat"),
        },
        "tokens": sum(stage["tokens"] for stage in result["stages"]),
        "seconds": result["seconds"],
        "tokens_per_second": [round(stage["tokens_per_second"]) for stage in result["stages"]],
        "memory_gb": round(max(row.get("memory_gb") or 0.0 for row in log), 1),
        "curve": [{key: row.get(key) for key in ("stage", "tokens", "loss")} for row in kept],
        "half_life": {key: log[-1].get(f"half_life_{key}") for key in ("p10", "p50", "p90")},
        **live_at_the_end(log[-1]),
        **evaluations(folder),
        "environment": without_folders(result["environment"]),
    }


def live_at_the_end(row: dict[str, Any]) -> dict[str, Any]:
    """The live share as the last line of training has it, from the gates' mean decay; none without gates."""
    lengths = [
        {"length": length, "ops": row[f"live_operations_{name}"], "cache": row[f"live_cache_{name}"]}
        for name, length in (("8k", 8192), ("32k", 32768), ("128k", 131072))
        if row.get(f"live_cache_{name}") is not None
    ]
    return {"live": {"from": "the training log", "lengths": lengths}} if lengths else {}


def without_folders(environment: dict[str, Any]) -> dict[str, Any]:
    """The environment, in its command of each absolute path the last part alone: where files lay says nothing."""
    return environment | {"command": re.sub(r"/(?:[^\s/,'=\]]+/)+", "", environment["command"])}


def collect(runs: Path, note: str, into: Path = ARMS) -> None:
    arms = read(into) if into.exists() else {"arms": {}}
    for folder in sorted(runs.iterdir()):
        if (folder / "result.json").exists():
            arms["arms"][folder.name] = arm(folder) | {"note": note}
        elif folder.name in arms["arms"]:
            arms["arms"][folder.name] |= {key: found for key, found in evaluations(folder).items() if found}
        else:
            continue
        print(folder.name)
    write_json(into, arms)


DRAWN: dict[str, tuple[str, str, Any]] = {
    "base": ("base", "#000000", ":"),
    "theta5M-12M-seed1": ("theta 5e6, 12M", COLOURS[4], "--"),
    "no-gates-12M": ("stretched, no gates, 12M", COLOURS[3], "--"),
    "yarn8-12M": ("YaRN x 8, 12M", COLOURS[1], "--"),
    "default": ("default, 12M", COLOURS[0], "-"),
}
"""Label, colour and line: what this toolkit made in whole lines, other trainings in dashes."""


def draw() -> None:
    """Two panels over a log axis: loss by position, easy needles found by length of the context."""
    arms = read(ARMS)["arms"]
    names = [name for name in DRAWN if name in arms]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        ends: dict[Any, list[tuple[float, float, str, str]]] = {left: [], right: []}
        for name in names:
            label, colour, line = DRAWN[name]
            look: dict[str, Any] = {"color": colour, "linestyle": line, "lw": 2, "marker": "o", "ms": 4}
            loss, found = arms[name]["loss_128k"], arms[name]["needles"]["easy"]
            for axes, x, y in (
                (left, [bucket["to"] for bucket in loss], [bucket["mean"] for bucket in loss]),
                (right, [row["length"] for row in found], [100 * row["found"] for row in found]),
            ):
                axes.plot(x, y, **look)
                ends[axes].append((y[-1], x[-1], label, colour))
        left.set(title="Loss, nats per token", xlabel="position in the document, up to (tokens)", ylim=(2.7, 9.9))
        right.set(title="Easy needles found, %", xlabel="length of the context (tokens)", ylim=(-4, 104))
        longest = max(bucket["to"] for bucket in arms["base"]["loss_128k"])
        ticks = [length for length in (512, 2048, 8192, 32768, 131072) if length <= longest]
        for axes, marks in ((left, ticks), (right, (1024, 4096, 8192, 16384, 32768, 65536))):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(marks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1024:g}k"))
            axes.axvline(8192, color="#555555", lw=1, ls=(0, (4, 3)))
            name_ends(axes, ends[axes])
        note: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "color": "#555555", "fontsize": 9}
        right.annotate("trained length", (8192, 3), xytext=(-4, 0), ha="right", **note)
        save(figure, IMAGE)


def name_ends(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """The name of each line right of the panel, tied to its end, (height, x, label, colour); none over another."""
    low, high = axes.get_ylim()
    step = (high - low) / 16
    places = [max(low, height - step / 4) for height, *_ in sorted(ends)]
    for n in range(1, len(places)):
        places[n] = max(places[n], places[n - 1] + step)
    for (height, x, label, colour), place in zip(sorted(ends), places, strict=True):
        axes.annotate(
            label,
            xy=(x, height),
            xytext=(1.04, (place - low) / (high - low)),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "relpos": (0, 0.5), "shrinkA": 1},
        )


def save(figure: Figure, image: Path) -> None:
    for suffix in (".png", ".svg"):
        figure.savefig(image.with_suffix(suffix), dpi=150, metadata={"Date": None} if suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "draw"])
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--note", default="", help="what to know of the machine, kept beside each arm")
    parser.add_argument("--into", type=Path, default=ARMS, help="file to collect into")
    options = parser.parse_args()
    if options.what == "draw":
        draw()
    elif options.runs is None:
        parser.error("collect needs the folder of runs")
    else:
        collect(options.runs, options.note, options.into)


if __name__ == "__main__":
    main()
