"""Tables of the arms in benchmarks/retrofit/arms.json. See figures.py.

An arm that is not on file has no row, and a column that no arm of a table has is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller

from figures import read, table
from measured_arms import (
    PANEL,
    Arm,
    above_all,
    all_arms,
    by_seed,
    cache_left,
    decoding_ms,
    found,
    found_back,
    instructions_followed,
    live_shares,
    loss,
    mean_of_tasks,
    on_file,
    own_answers,
    panel_of,
    panel_rows,
    prompts,
    ruler_mean,
    seeds_of,
    tokens,
    worst_row,
)

DEFAULT = ("base", "yarn8-12M", "yarn16-12M", "theta5M-12M", "no-gates-12M", "default", "yarn8-24M", "unbounded-24M")
STEPPED = ("late-step", "late-256", "step-32", "step-8", "step-8-chat", "step-8-x16", "step-16", "step-16-again")
TRIED = ("step-16-x16", "step-16-hot", "step-16-far", "yarn8-far")
STEPS = (
    *("stretch-facts", "windows-32k", "self-chat", "taught", "half-lives-512", "unbounded-log8k"),
    *("skips-64k", "skips-log", "broad-12M", "no-sink", "unbounded-budget", "unbounded-share15", "frozen-24M"),
    *("unbounded-again", "unbounded", "default-mean-of-seeds", "default-quarter-base", "default"),
)
FREQUENCIES = (
    *("ramp", "ramp-log8k", "mid4", "mid4-teach8k", "mid4-log8k", "rope4", "unbounded"),
    *("near-ramp", "early-ramp", "late-ramp", "yarn-layers-20", *STEPPED, *TRIED, "default"),
)
CONTROLS = ("control", "yarn8", "yarn16", "theta5M", "no-gates", "horizon")
RULED = ("base", "stretch", "yarn8-facts", *STEPS[:-1], *FREQUENCIES[:-1], "no-rope-1024", *DEFAULT[1:])
GATES = ("horizon", "horizon-kv", "horizon-12", "horizon-random", "pressed", "stretch", "retention")
PRESSED = ("pressed-start", "pressed-equal", "pressed-hinge", "pressed-cost")
LORA = ("lora-12M-yarn8", "lora-12M", "yarn8-lora", "horizon-lora")
NO_ROPE = (
    *("no-rope-40M", "yarn8-40M", "no-rope-1024", "no-rope-38M", "no-rope-mixed", "no-rope", "yarn8-taught"),
    "drope-taught",
)
PANELS = ("yarn8-12M", "no-gates-12M", "taught", "unbounded", *LORA[:2], "no-rope", "no-rope-mixed", "no-rope-40M")
"""The arms of each table, where they are on file; a second seed follows its first."""
OF_THE_README = (
    ("original", "base"),
    ("fine-tuned, RoPE as it was", "control"),
    ("YaRN x 8, trained as the default", "yarn8-12M"),
    ("stretched RoPE without gates, likewise", "no-gates-12M"),
    ("**gates and stretched RoPE** (default)", "default"),
    ("gates, RoPE removed", "no-rope-40M"),
)
"""Rows of the README's table: a label and an arm, whose seeds share the row."""
UNTRAINED = {
    "yarn:4": "YaRN x 4",
    "window:4096": "window of 4096",
    "streaming:4096,4": "StreamingLLM 4096 + 4",
    "drope": "no RoPE",
    "self-extend": "Self-Extend",
    "dual-chunk": "dual chunk attention",
}
RULER = (4096, 8192, 16384, 32768)
LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536)
NO_ARM = "none measured yet"
COLUMNS: dict[str, Callable[[Arm], str]] = {
    "tokens": tokens,
    "prompts": prompts,
    "easy needles at 4k, %": lambda arm: found(arm, 4096),
    "easy, 8k": lambda arm: found(arm, 8192),
    "easy, 16k": lambda arm: found(arm, 16384),
    "easy, 32k": lambda arm: found(arm, 32768),
    "easy, 64k": lambda arm: found(arm, 65536),
    "standard, 8k": lambda arm: found(arm, 8192, "standard"),
    "standard, 16k": lambda arm: found(arm, 16384, "standard"),
    "standard, 32k": lambda arm: found(arm, 32768, "standard"),
    "loss at 4k-8k": lambda arm: loss(arm, 4096),
    "at 24k-32k": lambda arm: loss(arm, 24576),
    "at 96k-128k": lambda arm: loss(arm, 98304),
    "cache left at 32k, %": lambda arm: cache_left(arm, 32768),
    "left at 128k, %": lambda arm: cache_left(arm, 131072),
    "short tasks": mean_of_tasks,
}


README_COLUMNS: dict[str, Callable[[Arm], str]] = {
    "trained on": tokens,
    "needles at 8k, %": lambda arm: found(arm, 8192),
    "needles at 32k, %": lambda arm: found(arm, 32768),
    "loss at 24k-32k": lambda arm: loss(arm, 24576, 2),
    "loss at 96k-128k": lambda arm: loss(arm, 98304, 2),
    "worst text": worst_row,
    "short tasks, %": mean_of_tasks,
    "keys left at 32k, %": lambda arm: cache_left(arm, 32768),
    "decoding, ms": decoding_ms,
}


def without_dashes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the rows and columns in which there are only dashes."""

    def measured(cells: Sequence[str]) -> bool:
        return bool(set("".join(cells)) - set("-/, "))

    rows = [row for row in rows if measured(row[1:])]
    kept = [n for n in range(len(header)) if measured([row[n] for row in rows])]
    return (
        table([header[n] for n in kept], [[row[n] for n in kept] for row in rows])
        if rows
        else table(["arm"], [[NO_ARM]])
    )


def readme_table() -> str:
    """The README's arms; where seeds differ, each. Bold needles: see `above_all`."""
    rows = []
    for label, name in OF_THE_README:
        if seeds := seeds_of(name):
            written = [by_seed(of, seeds) for of in README_COLUMNS.values()]
            for column, length in enumerate((8192, 32768), start=1):
                if above_all(name, length):
                    written[column] = f"**{written[column]}**"
            rows.append([label, *written])
    return without_dashes(["SmolLM2-135M", *README_COLUMNS], rows)


def arms_table(
    names: Sequence[str], columns: dict[str, Callable[[Arm], str]] = COLUMNS, first: Sequence[Sequence[str]] = ()
) -> str:
    """An arm a row, commas between its seeds, below the `first` rows; needles, losses, cache if not said otherwise."""
    rows = [[label, *(by_seed(of, seeds) for of in columns.values())] for label, seeds in on_file(names).items()]
    return without_dashes(["arm", *columns], [*first, *rows])


ARM_TABLES = {
    "retrofit_default": DEFAULT,
    "retrofit_steps": STEPS,
    "retrofit_frequencies": FREQUENCIES,
    "retrofit_controls": CONTROLS,
    "retrofit_gates": GATES,
    "retrofit_pressed": PRESSED,
    "retrofit_lora": LORA,
    "retrofit_no_rope": NO_ROPE,
}
"""Generated part -> its arms."""
AGAIN = (
    *("yarn8-12M", "no-gates-12M", "yarn16-12M", "theta5M-12M", "unbounded-again", "default", "no-sink", "broad-12M"),
    *("yarn8-24M", "unbounded-24M", "no-rope-1024"),
)
PANEL_TABLES = {
    "retrofit_panel": (PANELS, "panel"),
    "retrofit_panel_again": (AGAIN, "panel_again"),
    "retrofit_panel_third": (("step-16", *TRIED[1:]), "panel"),
}
"""The same, and which of an arm's panels; each table is of other documents."""


def retrofit_loss() -> str:
    """Loss by position in six documents of 131072 tokens."""
    starts = {0: "0-512", 4096: "4k-8k", 16384: "16k-24k", 32768: "32k-48k", 65536: "64k-96k", 98304: "96k-128k"}
    names = [*DEFAULT, *STEPS, *FREQUENCIES, *CONTROLS, "no-rope-40M", "yarn8-taught", "drope-taught"]
    return arms_table(names, {span: partial(loss, start=start, of="loss_128k") for start, span in starts.items()})


def columns_of_arms(title: str, names: Sequence[str], rows_of: Callable[[Arm], dict[str, str]]) -> str:
    """A table with an arm a column, of those in which `rows_of` finds anything: what a row is called -> the cell."""
    found = {label: [rows for arm in seeds if (rows := rows_of(arm))] for label, seeds in on_file(names).items()}
    titles = dict.fromkeys(name for seeds in found.values() for rows in seeds for name in rows)
    cells = {name: methodcaller("get", name, "-") for name in titles}
    rows = [[name, *(by_seed(cell, seeds) for seeds in found.values())] for name, cell in cells.items()]
    return without_dashes([title, *found], rows)


def panel_table(names: Sequence[str], panel: str) -> str:
    """Loss less the base's on each kind of unlike text, of the arms that have read a whole panel."""

    def of(arm: Arm) -> dict[str, str]:
        rows = panel_rows(arm.get(panel) or {})
        return {kind: f"{nats:+.3f}" for kind, nats in rows.items()} if len(rows) >= PANEL else {}

    return columns_of_arms("text", names, of)


def retrofit_ruler_tasks() -> str:
    """Each of RULER's tasks at 32k, per cent."""

    def of(arm: Arm) -> dict[str, str]:
        scores = next((row["tasks"] for row in arm.get("ruler", ()) if row["length"] == RULER[-1]), {})
        return {task: f"{100 * score:.0f}" for task, score in scores.items()}

    return columns_of_arms("task at 32k", ("yarn8-12M", "no-gates-12M", "ramp", "default"), of)


def retrofit_instructions() -> str:
    """The base's own answers, and instructions whose answers a program checks."""
    names = [*DEFAULT, *STEPS, *FREQUENCIES, *LORA, *CONTROLS, *NO_ROPE]
    measured = next(found for name in names for arm in seeds_of(name) if (found := panel_of(arm).get("instructions")))
    base = ["base", f"{measured['base']['mean']:.2f}", f"{100 * measured['followed']['base']:.0f}"]
    columns = {"loss on the base's answers": own_answers, "instructions followed, %": instructions_followed}
    return arms_table(names, columns, [base])


def retrofit_live() -> str:
    """Share of attention operations and of the cache that the gates leave alive, per cent."""
    names = [*GATES, "unbounded", "default", "unbounded-share15", "unbounded-24M", *LORA, *NO_ROPE]
    columns = {"operations at 8k / 32k / 128k, %": "ops", "cache, %": "cache"}
    return arms_table(names, {title: partial(live_shares, of=of) for title, of in columns.items()})


def retrofit_distance() -> str:
    """Standard needles found, per cent, by the length of the text and how far back in it the needle stands."""
    columns = {
        f"{length // 1024}k, {length * quarters // 4096}k back": partial(found_back, length=length, quarters=quarters)
        for length in (8192, 16384, 32768)
        for quarters in (4, 3, 2, 1)
    }
    return arms_table(("near-ramp", "yarn-layers-20", *STEPPED, *TRIED), columns)


def retrofit_ruler() -> str:
    """Mean of RULER's tasks at each length, per cent, of the arms that were asked."""
    return arms_table(RULED, {f"{length // 1024}k": partial(ruler_mean, length=length) for length in RULER})


def retrofit_untrained() -> str:
    """Baselines made of the base without training: easy needles by length, and loss."""
    arms = all_arms()
    rows = []
    for name, label in UNTRAINED.items():
        if name in arms:
            needles = " / ".join(found(arms[name], length) for length in LENGTHS[:-1])
            method = ", ".join(
                f"{key} {value}" for key, value in arms[name].get("method", {}).items() if key != "trained"
            )
            rows.append(
                [f"{label}, {method}" if method else label, needles, loss(arms[name], 4096), loss(arms[name], 24576)]
            )
    return table(["base with", "easy needles at 1k / 4k / 8k / 16k / 32k, %", "loss at 4k-8k", "at 24k-32k"], rows)


def cache_methods() -> str:
    """What is left of a cache, by method: needles and loss at 32k, and both with a cache in 8 bits."""
    rows = []
    for row, rounded in zip(read("cache-methods.json")["rows"], read("cache-methods-fp8.json")["rows"], strict=True):
        measured = [[f"{100 * one['found']:.0f}", f"{one['loss']:.3f}"] for one in (row, rounded)]
        if row["method"] == "horizon":  # its cache was not rounded
            measured[1] = ["-", "-"]
        kept = [f"{100 * row['kept']:.0f}", str(row["prompts"])]
        rows.append([row["model"], row["method"], *kept, *measured[0], *measured[1]])
    measures = ["cache left, %", "prompts", "easy needles found, %", "loss", "found in 8 bits, %", "loss in 8 bits"]
    return table(["model", "method", *measures], rows, left=2)
