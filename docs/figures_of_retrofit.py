"""Tables of the arms in benchmarks/retrofit/arms.json. See figures.py.

An arm that is not on file has no row, and a column that no arm of a table has is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from figures import read, table
from measured_arms import (
    PANEL,
    Arm,
    above_all,
    all_arms,
    cache_left,
    decoding_ms,
    found,
    loss,
    mean_of_tasks,
    on_file,
    panel_of,
    panel_rows,
    prompts,
    seeds_of,
    tokens,
    worst_row,
)

DEFAULT = ("base", "yarn8-12M", "yarn16-12M", "theta5M-12M", "no-gates-12M", "default", "yarn8-24M", "unbounded-24M")
STEPPED = ("late-step", "late-256", "step-32", "step-8", "step-8-chat", "step-8-x16", "step-16", "step-16-x16")
STEPS = (
    *("stretch-facts", "windows-32k", "self-chat", "taught", "half-lives-512", "unbounded-log8k", "ramp"),
    *("ramp-log8k", "near-ramp", "early-ramp", "late-ramp", "yarn-layers-20", *STEPPED),
    *("mid4", "mid4-teach8k", "mid4-log8k", "rope4"),
    *("skips-64k", "skips-log", "broad-12M", "no-sink", "unbounded-budget", "unbounded-share15", "frozen-24M"),
    *("unbounded-again", "unbounded", "default"),
)
CONTROLS = ("control", "yarn8", "yarn16", "theta5M", "no-gates", "horizon")
RULED = ("base", "stretch", "stretch-codes", "yarn8-facts", *STEPS[:-1], "no-rope-1024", *DEFAULT[1:])
PARTS = ("no-gates-codes", "gates-yarn8", "stretch-codes", "stretch-bound", "stretch-logn")
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


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which every row has a dash."""
    if not rows:
        return table(["arm"], [[NO_ARM]])
    kept = [n for n in range(len(header)) if any(set(row[n]) - set("-/ ") for row in rows)]
    return table([header[n] for n in kept], [[row[n] for n in kept] for row in rows])


def readme_table() -> str:
    """The README's arms; where two seeds differ, both. Bold needles: see `above_all`."""
    rows = []
    for label, name in OF_THE_README:
        if seeds := seeds_of(name):
            cells = [dict.fromkeys(cell for cell in map(of, seeds) if cell != "-") for of in README_COLUMNS.values()]
            written = [", ".join(cell) or "-" for cell in cells]
            for column, length in enumerate((8192, 32768), start=1):
                if above_all(name, length):
                    written[column] = f"**{written[column]}**"
            rows.append([label, *written])
    return without_empty_columns(["SmolLM2-135M", *README_COLUMNS], rows)


def arms_table(names: Sequence[str]) -> str:
    """Needles, losses and what the gates leave, an arm a row."""
    rows = [[label, *(of(arm) for of in COLUMNS.values())] for label, arm in on_file(names).items()]
    return without_empty_columns(["arm", *COLUMNS], rows)


ARM_TABLES = {
    "retrofit_default": DEFAULT,
    "retrofit_steps": STEPS,
    "retrofit_controls": CONTROLS,
    "retrofit_gates": GATES,
    "retrofit_pressed": PRESSED,
    "retrofit_parts": PARTS,
    "retrofit_lora": LORA,
    "retrofit_no_rope": NO_ROPE,
}
"""Generated part -> its arms."""
AGAIN = (
    *("yarn8-12M", "no-gates-12M", "yarn16-12M", "theta5M-12M", "unbounded-again", "default", "no-sink", "broad-12M"),
    *("yarn8-24M", "unbounded-24M", "no-rope-1024"),
)
PANEL_TABLES = {"retrofit_panel": (PANELS, "panel"), "retrofit_panel_again": (AGAIN, "panel_again")}
"""The same, and which of an arm's panels; the second read other documents."""


def retrofit_loss() -> str:
    """Loss by position in six documents of 131072 tokens."""
    starts = {0: "0-512", 4096: "4k-8k", 16384: "16k-24k", 32768: "32k-48k", 65536: "64k-96k", 98304: "96k-128k"}
    rows = []
    for label, arm in on_file([*DEFAULT, *STEPS, *CONTROLS, "no-rope-40M", "yarn8-taught", "drope-taught"]).items():
        if buckets := arm.get("loss_128k"):
            by_start = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in buckets}
            rows.append([label, *(by_start[start] for start in starts)])
    return table(["arm", *starts.values()], rows)


def panel_table(names: Sequence[str], panel: str) -> str:
    """Loss less the base's on each kind of unlike text, a kind a row, of the arms that the panel has read."""
    arms = {label: panel_rows(arm.get(panel) or {}) for label, arm in on_file(names).items()}
    arms = {label: rows for label, rows in arms.items() if len(rows) >= PANEL}
    kinds = list(dict.fromkeys(kind for rows in arms.values() for kind in rows))
    rows = [[kind, *(f"{rows[kind]:+.3f}" if kind in rows else "-" for rows in arms.values())] for kind in kinds]
    return table(["text", *arms], rows) if rows else table(["text"], [[NO_ARM]])


def retrofit_instructions() -> str:
    """The base's own answers, and instructions whose answers a program checks."""
    rows = []
    for label, arm in on_file([*DEFAULT, *STEPS, *LORA, *CONTROLS, *NO_ROPE]).items():
        if measured := panel_of(arm).get("instructions"):
            followed = measured["followed"]
            base = [f"{measured['base']['mean']:.2f}", f"{100 * followed['base']:.0f}"]
            if not rows:
                rows.append(["base", *base])
            rows.append([label, f"{measured['loss']['mean']:.2f}", f"{100 * followed['model']:.0f}"])
    header = ["arm", "loss on the base's answers", "instructions followed, %"]
    return table(header, rows or [[NO_ARM, "-", "-"]])


def retrofit_live() -> str:
    """Share of attention operations and of the cache that the gates leave alive, per cent."""
    rows = []
    pressed = ("unbounded", "default", "unbounded-share15", "unbounded-24M")
    for label, arm in on_file([*GATES, "stretch-bound", *pressed, *LORA, *NO_ROPE]).items():
        lengths = (arm.get("live") or {}).get("lengths", ())
        if lengths:
            shares = [" / ".join(f"{100 * row[of]:.0f}" for row in lengths) for of in ("ops", "cache")]
            rows.append([label, *shares])
    return table(["arm", "operations at 8k / 32k / 128k, %", "cache, %"], rows or [[NO_ARM, "-", "-"]])


def retrofit_distance() -> str:
    """Standard needles found, per cent, by the length of the text and how far back in it the needle stands."""
    places = [(length, quarters) for length in (8192, 16384, 32768) for quarters in (4, 3, 2, 1)]
    rows = []
    for label, arm in on_file(("near-ramp", "yarn-layers-20", *STEPPED)).items():
        by_length = {row["length"]: row["by_depth"] for row in arm["needles"].get("standard", ())}
        depths = [by_length[length][4 - quarters] if length in by_length else None for length, quarters in places]
        if by_length:
            rows.append([label, *("-" if share is None else f"{100 * share:.0f}" for share in depths)])
    names = [f"{length // 1024}k, {length * quarters // 4096}k back" for length, quarters in places]
    return table(["arm", *names], rows)


def retrofit_ruler() -> str:
    """Mean of RULER's tasks at each length and its standard error, per cent, of the arms that were asked."""
    rows = []
    for label, arm in on_file(RULED).items():
        if scores := {row["length"]: row for row in arm.get("ruler", ())}:
            means = {n: f"{100 * row['mean']:.0f} ± {100 * row['standard_error']:.0f}" for n, row in scores.items()}
            rows.append([label, *(means.get(length, "-") for length in RULER)])
    return without_empty_columns(["arm", *(f"{length // 1024}k" for length in RULER)], rows)


def retrofit_ruler_tasks() -> str:
    """Each of RULER's tasks at 32k, per cent, a task a row."""
    arms = {
        label: row["tasks"]
        for label, arm in on_file(("yarn8-12M", "no-gates-12M", "ramp", "default")).items()
        for row in arm.get("ruler", ())
        if row["length"] == RULER[-1]
    }
    tasks = dict.fromkeys(task for scores in arms.values() for task in scores)
    rows = [[task, *(f"{100 * scores[task]:.0f}" for scores in arms.values())] for task in tasks]
    return table(["task at 32k", *arms], rows)


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
