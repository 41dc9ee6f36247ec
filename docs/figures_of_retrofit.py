"""Tables of the arms in benchmarks/retrofit/arms.json. See figures.py."""

from __future__ import annotations

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
"""Names and labels; an arm that is not on file yet has no row."""
UNTRAINED = {
    "yarn:4": "base, YaRN x 4",
    "window:4096": "base, window of 4096",
    "streaming:4096,4": "base, StreamingLLM 4096 + 4",
    "drope": "base, no RoPE",
}


def retrofit_arms() -> str:
    """Each arm: needles, losses, worst row of the panel, tasks, cache left at 32k; a dash where not measured."""
    arms = read("retrofit/arms.json")["arms"]
    rows = [[label, *cells(arms[name])] for name, label in ARMS.items() if name in arms]
    header = ["arm", "needles at 8k", "at 32k", "loss at 24k-32k", "at 96k-128k"]
    return table([*header, "worst panel row", "tasks", "cache left at 32k"], rows)


def cells(arm: dict[str, Any]) -> list[str]:
    """Easy / standard needles at 8k and 32k in per cent, two losses, worst panel row in nats, tasks, cache.

    `panel` is {"rows": [{"name", "difference"}]}, the loss less the base's; `live` is what
    `retrofox.evaluation.live_share` returns: {"lengths": [{"length", "cache"}]}.
    """
    needles = [" / ".join(found(arm, length, mode) for mode in ("easy", "standard")) for length in (8192, 32768)]
    loss = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in arm["loss"]}
    far = f"{arm['loss_128k'][-1]['mean']:.3f}" if arm.get("loss_128k") else "-"
    worst = max((arm.get("panel") or {}).get("rows", ()), key=lambda row: row["difference"], default=None)
    panel = f"{worst['difference']:+.3f} ({worst['name']})" if worst else "-"
    live = {row["length"]: f"{row['cache']:.0%}" for row in (arm.get("live") or {}).get("lengths", ())}
    return [*needles, loss.get(24576, "-"), far, panel, mean_of_tasks(arm), live.get(32768, "-")]


def found(arm: dict[str, Any], length: int, mode: str = "easy") -> str:
    """Needles found at a length, per cent, or a dash."""
    rows = arm["needles"].get(mode, ())
    return next((f"{100 * row['found']:.0f}" for row in rows if row["length"] == length), "-")


def mean_of_tasks(arm: dict[str, Any]) -> str:
    """Mean accuracy over the short tasks, per cent, or a dash."""
    scores = arm.get("tasks") or {}
    return f"{100 * sum(score['accuracy'] for score in scores.values()) / len(scores):.1f}" if scores else "-"


def retrofit_loss() -> str:
    """Loss by position in six documents of 131072 tokens."""
    arms = read("retrofit/arms.json")["arms"]
    starts = {0: "0-512", 4096: "4k-8k", 16384: "16k-24k", 32768: "32k-48k", 65536: "64k-96k", 98304: "96k-128k"}
    rows = []
    for name, label in ARMS.items():
        if buckets := arms.get(name, {}).get("loss_128k"):
            loss = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in buckets}
            rows.append([label, *(loss[start] for start in starts)])
    return table(["arm", *starts.values()], rows)


def retrofit_untrained() -> str:
    """Baselines made of the base without training: easy needles by length, and loss."""
    arms = read("retrofit/arms.json")["arms"]
    lengths = (1024, 4096, 8192, 16384, 32768)
    rows = []
    for name, label in UNTRAINED.items():
        loss = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in arms[name]["loss"]}
        needles = " / ".join(found(arms[name], length) for length in lengths)
        rows.append([label, needles, loss[4096], loss[24576]])
    return table(["arm", "easy needles at 1k / 4k / 8k / 16k / 32k", "loss at 4k-8k", "at 24k-32k"], rows)
