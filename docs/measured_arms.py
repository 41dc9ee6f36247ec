"""The arms in benchmarks/retrofit/arms.json: their names on the pages, and measures of one as cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from figures import read
from figures_of_use import of_base

LABELS = {
    "base": "base",
    "control": "control",
    "yarn8": "YaRN x 8, 5M at 6e-4",
    "yarn16": "YaRN x 16, 5M at 6e-4",
    "theta5M": "theta 5M, 5M at 6e-4",
    "no-gates": "stretch without gates, 5M at 6e-4",
    "horizon": "gates",
    "horizon-kv": "a gate for each kv head",
    "horizon-12": "12 heads open, others to 1024 tokens",
    "horizon-random": "10 random heads open",
    "pressed": "no head open, all pressed alike",
    "pressed-start": "measured start, no pressure",
    "pressed-equal": "all heads alike",
    "pressed-hinge": "a hinge",
    "pressed-cost": "by cost",
    "stretch": "untaught, seven sentences",
    "yarn8-facts": "YaRN x 8, untaught",
    "yarn8-12M": "YaRN x 8",
    "yarn8-24M": "YaRN x 8, 24M",
    "stretch-facts": "untaught",
    "windows-32k": "untaught, windows of 32768",
    "self-chat": "untaught, 10 % own chat",
    "taught": "taught, no own chat",
    "half-lives-512": "starts to 512",
    "unbounded-budget": "unbounded, with its budget",
    "unbounded-share15": "unbounded, `share: 0.15`",
    "unbounded-24M": "unbounded, `share: 0.15`, 24M",
    "default": "**default**",
    "default-mean-of-seeds": "mean of two seeds' weights",
    "default-quarter-base": "a quarter of the base's weights",
    "unbounded": "unbounded",
    "unbounded-again": "unbounded, trained again",
    "no-sink": "no sink",
    "rope4": "RoPE x 4",
    "skips-64k": "skips to 64Ki",
    "skips-log": "log-uniform skips",
    "frozen-24M": "`share: 0.15`, 24M, open heads fixed",
    "broad-12M": "a fifth broad text",
    "unbounded-log8k": "`log_n` 8192",
    "ramp": "YaRN's frequencies",
    "ramp-log8k": "YaRN's frequencies, `log_n` 8192",
    "near-ramp": "YaRN's frequencies where no head is open",
    "early-ramp": "YaRN's frequencies in layers 7, 14, 17, 18",
    "yarn-layers-20": "YaRN's frequencies in layers 0 to 19",
    "late-step": "likewise, and a step at 32 turns in the others",
    "late-256": "likewise, and wavelengths up to 256 alone in layers 20, 21, 23",
    "step-32": "a step at 32 turns, no own chat",
    "step-8": "a step at 8 turns, no own chat",
    "step-8-chat": "a step at 8 turns",
    "step-8-x16": "a step at 8 turns, factor 16",
    "step-16": "a step at 16 turns",
    "step-16-again": "a step at 16 turns, trained again",
    "step-16-hot": "a step at 16 turns, YaRN's temperature",
    "step-16-far": "a step at 16 turns, facts told farther away",
    "yarn8-far": "YaRN x 8, facts told farther away",
    "step-16-x16": "a step at 16 turns, factor 16",
    "late-ramp": "YaRN's frequencies in layers 20, 21, 23",
    "mid4": "between the two",
    "mid4-teach8k": "between the two, taught in windows of 8192",
    "mid4-log8k": "between the two, `log_n` 8192",
    "no-gates-12M": "stretch without gates",
    "theta5M-12M": "theta 5M",
    "yarn16-12M": "YaRN x 16",
    "retention": "a retention for each key, 8M at 3e-4",
    "horizon-lora": "gates, LoRA, 5M",
    "yarn8-lora": "YaRN x 8, LoRA, 5M",
    "lora-12M": "unbounded, LoRA",
    "lora-12M-yarn8": "YaRN x 8, LoRA",
    "no-rope": "no RoPE, books and code alone",
    "no-rope-40M": "no RoPE",
    "no-rope-1024": "no RoPE, starts to 1024",
    "no-rope-38M": "no RoPE, 38M",
    "no-rope-mixed": "no RoPE, 30M, less chat",
    "yarn8-40M": "YaRN x 8, data of *no RoPE*",
    "yarn8-taught": "RoPE stretched 8 times, no gates, taught",
    "drope-taught": "DroPE: no RoPE, no gates, taught",
}
Arm = dict[str, Any]


def all_arms() -> dict[str, Arm]:
    """Key -> arm of all that are on file."""
    return read("retrofit/arms.json")["arms"]


def on_file(names: Sequence[str]) -> dict[str, list[Arm]]:
    """Label -> the seeds of each arm that is on file."""
    return {LABELS[name]: seeds for name in names if (seeds := seeds_of(name))}


def seeds_of(name: str) -> list[Arm]:
    """An arm and its further seeds, where they are on file."""
    arms = all_arms()
    return [arms[key] for key in (name, f"{name}-seed1", f"{name}-seed2") if key in arms]


def by_seed(of: Callable[[Arm], str], seeds: Sequence[Arm]) -> str:
    """A measure of each seed to the last that has one, with commas between; one where all agree."""
    cells = [of(arm) for arm in seeds]
    while len(cells) > 1 and cells[-1] == "-":
        cells.pop()
    return cells[0] if len(set(cells)) == 1 else ", ".join(cells)


def above_all(name: str, length: int) -> bool:
    """Whether the lower ends of an arm's intervals lie above what every arm without gates finds."""
    arms = all_arms()

    def rows(arm: Arm) -> list[dict[str, Any]]:
        return [row for row in arm["needles"].get("easy", ()) if row["length"] == length]

    mine = [row["interval"][0] for arm in seeds_of(name) for row in rows(arm)]
    gated = {
        key for key, arm in arms.items() if ((arm.get("recipe") or {}).get("fox") or {}).get("gate", "none") != "none"
    }
    others = [row["found"] for key, arm in arms.items() if key not in gated for row in rows(arm)]
    return bool(mine) and name in gated and min(mine) > max(others)


def tokens(arm: Arm) -> str:
    return f"{arm['tokens'] / 1e6:.0f}M" if arm["tokens"] else "-"


def found(arm: Arm, length: int, mode: str = "easy") -> str:
    """Needles found at a length, per cent, or a dash."""
    rows = arm["needles"].get(mode, ())
    return next((f"{100 * row['found']:.0f}" for row in rows if row["length"] == length), "-")


def found_back(arm: Arm, length: int, quarters: int) -> str:
    """Standard needles found that stand so many quarters of the text back, per cent, or a dash."""
    rows = arm["needles"].get("standard", ())
    return next((f"{100 * row['by_depth'][4 - quarters]:.0f}" for row in rows if row["length"] == length), "-")


def prompts(arm: Arm) -> str:
    """Prompts a length up to 32k; the fewest and the most where lengths differ."""
    counts = {row["prompts"] for row in arm["needles"].get("easy", ()) if row["length"] <= 32768}
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "-"


def loss(arm: Arm, start: int, digits: int = 3, of: str = "") -> str:
    """Mean loss of the positions from `start` on; beyond 32k, or if `of` says so, of the documents of 131072 tokens."""
    buckets = arm.get(of or ("loss" if start < 32768 else "loss_128k")) or ()
    return next((f"{bucket['mean']:.{digits}f}" for bucket in buckets if bucket["from"] == start), "-")


def mean_of_tasks(arm: Arm) -> str:
    """Mean accuracy over the short tasks, per cent, or a dash."""
    scores = arm.get("tasks") or {}
    return f"{100 * sum(score['accuracy'] for score in scores.values()) / len(scores):.1f}" if scores else "-"


PANEL = 12
"""Kinds of a whole panel; arms that read fewer have no worst row."""


def panel_of(arm: Arm) -> Any:
    """The arm's panel, the later one where it read two; none without any."""
    return arm.get("panel_again") or arm.get("panel") or {}


def panel_rows(panel: Any) -> dict[str, float]:
    """By kind of text the largest mean difference in loss to the base over the spans of positions, in nats."""
    kinds = panel.get("kinds", {})
    return {
        kind: max(span["difference"]["mean"] for span in summary["spans"] if span["difference"]["mean"] is not None)
        for kind, summary in kinds.items()
    }


def worst_row(arm: Arm) -> str:
    rows = panel_rows(panel_of(arm))
    worst = max(rows, key=rows.__getitem__, default=None)
    return f"{rows[worst]:+.2f} ({worst})" if worst and len(rows) >= PANEL else "-"


def own_answers(arm: Arm) -> str:
    """Loss on the answers that the base gives itself."""
    measured = panel_of(arm).get("instructions")
    return f"{measured['loss']['mean']:.2f}" if measured else "-"


def instructions_followed(arm: Arm) -> str:
    """Instructions followed whose answers a program checks, per cent."""
    measured = panel_of(arm).get("instructions")
    return f"{100 * measured['followed']['model']:.0f}" if measured else "-"


def ruler_mean(arm: Arm, length: int) -> str:
    """Mean of RULER's tasks, per cent."""
    return next((f"{100 * row['mean']:.0f}" for row in arm.get("ruler", ()) if row["length"] == length), "-")


def live_shares(arm: Arm, of: str) -> str:
    """Operations or cache that the gates leave alive at 8k, 32k and 128k, per cent."""
    return " / ".join(f"{100 * row[of]:.0f}" for row in (arm.get("live") or {}).get("lengths", ())) or "-"


def cache_left(arm: Arm, length: int) -> str:
    """Share of the cache that the gates leave alive after so many tokens, per cent, or a dash."""
    rows = (arm.get("live") or {}).get("lengths", ())
    return next((f"{100 * row['cache']:.0f}" for row in rows if row["length"] == length), "-")


def decoding_ms(arm: Arm) -> str:
    """Milliseconds of the GPU for a token of 16 rows after 32k tokens; without gates all decode alike."""
    recipe = arm.get("recipe")
    fox = recipe["fox"] if recipe else None
    if recipe and (not fox or fox["gate"] == "none"):
        return "same"
    if fox and not (fox.get("gate_heads") == "kv" and fox["rope"] == "interpolate"):
        return "-"
    cell = read("generate-horizon.json")["cells"]["16 x 32768"]
    return f"{cell['fox']['gpu_ms'] if fox else min(of_base(cell)):.1f}"
