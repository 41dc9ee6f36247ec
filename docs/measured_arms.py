"""The arms in benchmarks/retrofit/arms.json: their names on the pages, and measures of one as cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import read
from figures_of_use import of_base

LABELS = {
    "base": "base",
    "control": "control",
    "yarn8": "YaRN x 8, 5M at 6e-4",
    "yarn8-seed1": "YaRN x 8, 5M at 6e-4, seed 1",
    "yarn16": "YaRN x 16, 5M at 6e-4",
    "yarn16-seed1": "YaRN x 16, 5M at 6e-4, seed 1",
    "theta5M": "theta 5M, 5M at 6e-4",
    "theta5M-seed1": "theta 5M, 5M at 6e-4, seed 1",
    "no-gates": "stretch without gates, 5M at 6e-4",
    "horizon": "gates",
    "horizon-seed1": "gates, seed 1",
    "horizon-kv": "a gate for each kv head",
    "horizon-12": "12 heads open, others to 1024 tokens",
    "horizon-random": "10 random heads open",
    "pressed": "no head open, all pressed alike",
    "pressed-start": "measured start, no pressure",
    "pressed-equal": "all heads alike",
    "pressed-hinge": "a hinge",
    "pressed-cost": "by cost",
    "horizon-3e-4": "gates, 5M at 3e-4",
    "yarn8-3e-4": "YaRN x 8, 5M at 3e-4",
    "yarn8-8M": "YaRN x 8, untaught, seven sentences",
    "yarn8-8M-seed1": "YaRN x 8, untaught, seven sentences, seed 1",
    "stretch": "untaught, seven sentences",
    "stretch-seed1": "untaught, seven sentences, seed 1",
    "yarn8-facts": "YaRN x 8, untaught",
    "yarn8-12M": "YaRN x 8",
    "yarn8-12M-seed1": "YaRN x 8, seed 1",
    "yarn8-24M": "YaRN x 8, 24M",
    "yarn8-24M-seed1": "YaRN x 8, 24M, seed 1",
    "stretch-facts": "untaught",
    "windows-32k": "untaught, windows of 32768",
    "self-chat": "untaught, 10 % own chat",
    "taught": "taught, no own chat",
    "half-lives-512": "starts to 512",
    "unbounded-budget": "unbounded, with its budget",
    "unbounded-share15": "unbounded, `share: 0.15`",
    "unbounded-share15-seed1": "unbounded, `share: 0.15`, seed 1",
    "unbounded-24M": "unbounded, `share: 0.15`, 24M",
    "unbounded-24M-seed1": "unbounded, `share: 0.15`, 24M, seed 1",
    "half-lives-512-seed1": "starts to 512, seed 1",
    "default": "**default**",
    "default-seed1": "**default**, seed 1",
    "default-seed2": "**default**, seed 2",
    "unbounded": "unbounded",
    "unbounded-seed1": "unbounded, seed 1",
    "unbounded-seed2": "unbounded, seed 2",
    "unbounded-again": "unbounded, trained again",
    "no-sink": "no sink",
    "no-sink-seed1": "no sink, seed 1",
    "rope4": "RoPE x 4",
    "skips-64k": "skips to 64Ki",
    "skips-log": "log-uniform skips",
    "skips-log-seed1": "log-uniform skips, seed 1",
    "frozen-24M": "`share: 0.15`, 24M, open heads fixed",
    "broad-12M": "a fifth broad text",
    "broad-12M-seed1": "a fifth broad text, seed 1",
    "unbounded-log8k": "`log_n` 8192",
    "ramp": "YaRN's frequencies",
    "ramp-seed1": "YaRN's frequencies, seed 1",
    "ramp-log8k": "YaRN's frequencies, `log_n` 8192",
    "ramp-log8k-seed1": "YaRN's frequencies, `log_n` 8192, seed 1",
    "near-ramp": "YaRN's frequencies where no head is open",
    "near-ramp-seed1": "YaRN's frequencies where no head is open, seed 1",
    "early-ramp": "YaRN's frequencies in layers 7, 14, 17, 18",
    "early-ramp-seed1": "YaRN's frequencies in layers 7, 14, 17, 18, seed 1",
    "yarn-layers-20": "YaRN's frequencies in layers 0 to 19",
    "yarn-layers-20-seed1": "YaRN's frequencies in layers 0 to 19, seed 1",
    "late-step": "likewise, and a step at 32 turns in the others",
    "late-256": "likewise, and wavelengths up to 256 alone in layers 20, 21, 23",
    "step-32": "a step at 32 turns, no own chat",
    "step-8": "a step at 8 turns, no own chat",
    "step-8-chat": "a step at 8 turns",
    "step-8-chat-seed1": "a step at 8 turns, seed 1",
    "step-8-x16": "a step at 8 turns, factor 16",
    "step-8-x16-seed1": "a step at 8 turns, factor 16, seed 1",
    "step-16": "a step at 16 turns",
    "step-16-x16": "a step at 16 turns, factor 16",
    "late-ramp": "YaRN's frequencies in layers 20, 21, 23",
    "late-ramp-seed1": "YaRN's frequencies in layers 20, 21, 23, seed 1",
    "mid4": "between the two",
    "mid4-seed1": "between the two, seed 1",
    "mid4-teach8k": "between the two, taught in windows of 8192",
    "mid4-log8k": "between the two, `log_n` 8192",
    "no-gates-12M": "stretch without gates",
    "no-gates-12M-seed1": "stretch without gates, seed 1",
    "theta5M-12M": "theta 5M",
    "theta5M-12M-seed1": "theta 5M, seed 1",
    "yarn16-12M": "YaRN x 16",
    "yarn16-12M-seed1": "YaRN x 16, seed 1",
    "yarn8-codes": "YaRN x 8, untaught, codes",
    "stretch-codes": "untaught, codes",
    "stretch-bound": "untaught, codes, `max_half_life` 512",
    "stretch-2048": "untaught, codes, starts to 2048",
    "stretch-logn": "untaught, codes, `log_n` 2048",
    "gates-yarn8": "gates on YaRN x 8, codes",
    "no-gates-codes": "stretch without gates, codes",
    "retention": "a retention for each key, 8M at 3e-4",
    "horizon-lora": "gates, LoRA, 5M",
    "yarn8-lora": "YaRN x 8, LoRA, 5M",
    "lora-12M": "unbounded, LoRA",
    "lora-12M-yarn8": "YaRN x 8, LoRA",
    "no-rope": "no RoPE, books and code alone",
    "no-rope-40M": "no RoPE",
    "no-rope-40M-seed1": "no RoPE, seed 1",
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


def on_file(names: Sequence[str]) -> dict[str, Arm]:
    """Label -> arm of those that are on file, each with its further seeds."""
    arms = all_arms()
    return {
        LABELS[key]: arms[key] for name in names for key in (name, *(f"{name}-seed{n}" for n in (1, 2))) if key in arms
    }


def seeds_of(name: str) -> list[Arm]:
    """An arm and its second seed, where they are on file."""
    arms = all_arms()
    return [arms[key] for key in (name, f"{name}-seed1") if key in arms]


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


def prompts(arm: Arm) -> str:
    """Prompts a length up to 32k; two numbers where single lengths have more."""
    counts = {row["prompts"] for row in arm["needles"].get("easy", ()) if row["length"] <= 32768}
    return ", ".join(map(str, sorted(counts))) or "-"


def loss(arm: Arm, start: int, digits: int = 3) -> str:
    """Mean loss of the positions from `start` on; beyond 32k of the documents of 131072 tokens."""
    buckets = arm["loss"] if start < 32768 else arm.get("loss_128k") or ()
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
