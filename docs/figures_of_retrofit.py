"""Tables of the arms in benchmarks/retrofit/arms.json. See figures.py.

An arm that is not on file has no row, and a column that no arm of a table has is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from figures import read, table

ARMS = {
    "base": "base",
    "control-asked": "control",
    "yarn": "YaRN x 4",
    "yarn-seed1": "YaRN x 4, seed 1",
    "yarn8": "YaRN x 8, skips",
    "yarn8-seed1": "YaRN x 8, skips, seed 1",
    "yarn16": "YaRN x 16, skips",
    "yarn16-seed1": "YaRN x 16, skips, seed 1",
    "theta": "theta 500,000",
    "theta5M": "theta 5M, skips",
    "theta5M-seed1": "theta 5M, skips, seed 1",
    "theta-gates": "theta 500,000, gates, skips",
    "drope-trained": "DroPE",
    "partial": "**default**",
    "partial-seed1": "**default**, seed 1",
    "partial-near": "default, no skips",
    "partial-open": "default, no gates",
    "lora": "**lora**",
    "lora-seed1": "**lora**, seed 1",
    "lora-skips": "lora, skips",
    "keep-seed1": "keep",
    "fox": "**fox**",
    "fox-seed1": "**fox**, seed 1",
    "fox-pro": "**fox-pro**",
    "fox-pro-seed1": "**fox-pro**, seed 1",
}
"""Names and labels."""
OF_THE_README = (
    ("original", ("base",)),
    ("fine-tuned, nothing changed", ("control-asked",)),
    ("fine-tuned with YaRN x 4", ("yarn", "yarn-seed1")),
    ("fine-tuned with YaRN x 8 and skips", ("yarn8", "yarn8-seed1")),
    ("**stretched RoPE and gates**, the default", ("partial", "partial-seed1")),
    ("**gates instead of RoPE**, `smollm2-fox`", ("fox", "fox-seed1")),
)
"""Rows of the README's table: a label, and the seeds of one arm."""
UNTRAINED = {
    "yarn:4": "YaRN x 4",
    "window:4096": "window of 4096",
    "streaming:4096,4": "StreamingLLM 4096 + 4",
    "drope": "no RoPE",
}
Arm = dict[str, Any]


def arms_on_file() -> dict[str, Arm]:
    """Label -> arm, in the order of ARMS; then those of other names whose panel or live share was measured."""
    arms = read("retrofit/arms.json")["arms"]
    others = {name: name for name, arm in arms.items() if name not in ARMS and ("panel" in arm or "live" in arm)}
    return {label: arms[name] for name, label in (ARMS | others).items() if name in arms}


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which every row has a dash."""
    kept = [n for n in range(len(header)) if any(row[n] != "-" for row in rows)]
    return table([header[n] for n in kept], [[row[n] for n in kept] for row in rows])


def readme_table() -> str:
    """The six arms of the README's table; where two seeds differ, both."""
    arms = read("retrofit/arms.json")["arms"]
    rows = []
    for label, names in OF_THE_README:
        if seeds := [arms[name] for name in names if name in arms]:
            cells = [[of(arm) for arm in seeds] for of in README_COLUMNS.values()]
            rows.append(
                [label, *(", ".join(dict.fromkeys(cell for cell in seen if cell != "-")) or "-" for seen in cells)]
            )
    return without_empty_columns(["SmolLM2-135M", *README_COLUMNS], rows)


def of_seeds(of: Callable[[Arm], str], seeds: Sequence[Arm]) -> str:
    """A cell with each seed's figure, but for those that are the same or missing."""
    return ", ".join(dict.fromkeys(cell for cell in map(of, seeds) if cell != "-")) or "-"


def readme_controls() -> str:
    """What the fairest control on file does beside the default, in a sentence."""
    arms = read("retrofit/arms.json")["arms"]
    default = seeds_of(arms, "partial")
    fair = seeds_of(arms, "yarn8")
    if not fair:
        return (
            "The fairest control, YaRN x 8 with the default's skips and no gates (`smollm2-yarn8`), is still to be "
            f"measured; the default without its gates finds {found(arms['partial-open'], 32768)} % at 32k."
        )
    ours, theirs = (mean_found(arms, 32768) for arms in (default, fair))
    verdict = "as many as" if abs(ours - theirs) < 0.05 else "fewer than" if theirs < ours else "more than"
    far = [" and ".join(dict.fromkeys(loss(arm, 98304, 2) for arm in arms)) for arms in (fair, default)]
    return (
        f"**Without any gates**, YaRN x 8 with the same tokens and skips finds {100 * theirs:.0f} % of the needles at "
        f"32k, {verdict} the default ({100 * ours:.0f} %), at {loss(fair[0], 24576, 2)} nats there (default "
        f"{loss(default[0], 24576, 2)}); at 96k-128k it is at {far[0]} nats, the default at {far[1]}."
    )


def seeds_of(arms: dict[str, Arm], name: str) -> list[Arm]:
    return [arms[key] for key in (name, f"{name}-seed1") if key in arms]


def mean_found(arms: Sequence[Arm], length: int, mode: str = "easy") -> float:
    """Mean share of needles found at a length over the seeds of an arm."""
    shares = [row["found"] for arm in arms for row in arm["needles"].get(mode, ()) if row["length"] == length]
    return sum(shares) / len(shares)


def retrofit_arms() -> str:
    """Each arm: what it was trained on, worst row of the panel, tasks, share of the cache that its gates leave."""
    columns = {
        "tokens": tokens,
        "minutes": lambda arm: f"{arm['seconds'] / 60:.1f}" if arm["seconds"] else "-",
        "loss at 4k-8k": lambda arm: loss(arm, 4096),
        "at 24k-32k": lambda arm: loss(arm, 24576),
        "at 96k-128k": lambda arm: loss(arm, 98304),
        "short tasks": mean_of_tasks,
        "worst panel row": worst_row,
        "cache left at 32k": lambda arm: cache_left(arm, 32768),
    }
    rows = [[label, *(of(arm) for of in columns.values())] for label, arm in arms_on_file().items()]
    return without_empty_columns(["arm", *columns], rows)


def retrofit_needles() -> str:
    """Needles found at each length, easy and standard."""
    rows = []
    for label, arm in arms_on_file().items():
        modes = [" / ".join(found(arm, length, mode) for length in LENGTHS) for mode in ("easy", "standard")]
        rows.append([label, prompts(arm), *modes])
    return table(["arm", "prompts a length", "easy at 1k / 4k / 8k / 16k / 32k, %", "standard"], rows)


def retrofit_loss() -> str:
    """Loss by position in six documents of 131072 tokens."""
    starts = {0: "0-512", 4096: "4k-8k", 16384: "16k-24k", 32768: "32k-48k", 65536: "64k-96k", 98304: "96k-128k"}
    rows = []
    for label, arm in arms_on_file().items():
        if buckets := arm.get("loss_128k"):
            by_start = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in buckets}
            rows.append([label, *(by_start[start] for start in starts)])
    return table(["arm", *starts.values()], rows)


def retrofit_panel() -> str:
    """Loss less the base's on each kind of unlike text, of the arms that the panel has read."""
    read_by = {label: panel_rows(arm) for label, arm in arms_on_file().items()}
    kinds = list(dict.fromkeys(kind for rows in read_by.values() for kind in rows))
    rows = [
        [label, *(f"{rows[kind]:+.3f}" if kind in rows else "-" for kind in kinds)]
        for label, rows in read_by.items()
        if rows
    ]
    return table(["arm", *kinds], rows) if rows else table(["arm", "worst row"], [["none read yet", "-"]])


def retrofit_live() -> str:
    """Share of attention operations and of the cache that the gates leave alive, of the arms where it is measured."""
    rows = [
        [label, f"{row['length']:,}", f"{row['ops']:.2f}", f"{row['cache']:.2f}"]
        for label, arm in arms_on_file().items()
        for row in (arm.get("live") or {}).get("lengths", ())
    ]
    return table(["arm", "tokens", "operations", "cache"], rows or [["none measured yet", "-", "-", "-"]])


def retrofit_untrained() -> str:
    """Baselines made of the base without training: easy needles by length, and loss."""
    arms = read("retrofit/arms.json")["arms"]
    rows = []
    for name, label in UNTRAINED.items():
        if name in arms:
            needles = " / ".join(found(arms[name], length) for length in LENGTHS)
            rows.append([label, needles, loss(arms[name], 4096), loss(arms[name], 24576)])
    return table(["base with", "easy needles at 1k / 4k / 8k / 16k / 32k, %", "loss at 4k-8k", "at 24k-32k"], rows)


LENGTHS = (1024, 4096, 8192, 16384, 32768)


def tokens(arm: Arm) -> str:
    return f"{arm['tokens'] / 1e6:.0f}M" if arm["tokens"] else "-"


def found(arm: Arm, length: int, mode: str = "easy") -> str:
    """Needles found at a length, per cent, or a dash."""
    rows = arm["needles"].get(mode, ())
    return next((f"{100 * row['found']:.0f}" for row in rows if row["length"] == length), "-")


def prompts(arm: Arm) -> str:
    return next((str(row["prompts"]) for row in arm["needles"].get("easy", ())), "-")


def loss(arm: Arm, start: int, digits: int = 3) -> str:
    """Mean loss of the positions from `start` on; beyond 32k of the documents of 131072 tokens."""
    buckets = arm["loss"] if start < 32768 else arm.get("loss_128k") or ()
    return next((f"{bucket['mean']:.{digits}f}" for bucket in buckets if bucket["from"] == start), "-")


def mean_of_tasks(arm: Arm) -> str:
    """Mean accuracy over the short tasks, per cent, or a dash."""
    scores = arm.get("tasks") or {}
    return f"{100 * sum(score['accuracy'] for score in scores.values()) / len(scores):.1f}" if scores else "-"


def panel_rows(arm: Arm) -> dict[str, float]:
    """By kind of text the largest mean difference in loss to the base over the spans of positions, in nats."""
    panel = arm.get("panel") or {}
    if "rows" in panel:
        return {row["name"]: row["difference"] for row in panel["rows"]}
    kinds = panel.get("kinds", {})
    return {
        kind: max(span["difference"]["mean"] for span in summary["spans"] if span["difference"]["mean"] is not None)
        for kind, summary in kinds.items()
    }


def worst_row(arm: Arm) -> str:
    rows = panel_rows(arm)
    worst = max(rows, key=rows.__getitem__, default=None)
    return f"{rows[worst]:+.3f} ({worst})" if worst else "-"


def cache_left(arm: Arm, length: int) -> str:
    """Share of the cache that the gates leave alive after so many tokens, per cent, or a dash."""
    rows = (arm.get("live") or {}).get("lengths", ())
    return next((f"{100 * row['cache']:.0f}" for row in rows if row["length"] == length), "-")


README_COLUMNS = {
    "training tokens": tokens,
    "needles at 8k, %": lambda arm: found(arm, 8192),
    "needles at 32k, %": lambda arm: found(arm, 32768),
    "loss at 24k-32k": lambda arm: loss(arm, 24576, 2),
    "loss at 96k-128k": lambda arm: loss(arm, 98304, 2),
    "short tasks, %": mean_of_tasks,
    "worst panel row": worst_row,
    "cache left at 32k, %": lambda arm: cache_left(arm, 32768),
}
