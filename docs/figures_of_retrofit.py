"""Tables of the arms in benchmarks/retrofit/arms.json: needles, loss, recall, tasks. See figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import positions, read, table

ARMS = {
    "base": "base",
    "control": "control",
    "control-asked": "control, facts asked for",
    "control-8k": "control, 8k windows",
    "yarn": "YaRN x 4",
    "yarn-seed1": "YaRN x 4, another seed",
    "theta": "theta 500,000",
    "theta-gates": "theta 500,000, gates, skips",
    "drope-trained": "DroPE",
    "partial": "**partial**",
    "partial-seed1": "**partial**, another seed",
    "partial-near": "partial, no skips",
    "partial-open": "partial, no gates",
    "lora": "**lora**",
    "lora-seed1": "**lora**, another seed",
    "lora-skips": "lora with skips",
    "keep": "keep",
    "keep-seed1": "keep, another seed",
    "fox": "**fox**",
    "fox-seed1": "**fox**, another seed",
    "fox-88M": "fox, 88M tokens",
    "fox-pro": "**fox-pro**",
    "fox-pro-seed1": "**fox-pro**, another seed",
    "fox-pro-118M": "fox-pro, 118M tokens",
    "calibrated": "calibrated",
    "calibrated-fastest": "calibrated, fastest pairs",
    "yarn:4": "base, YaRN x 4",
    "window:4096": "base, window of 4096",
    "streaming:4096,4": "base, StreamingLLM",
}
FACTS = {
    "control": ("control", "control-asked"),
    "control, 8k windows": ("control-8k-told", "control-8k"),
    "YaRN x 4": ("yarn-told", "yarn"),
    "partial, no skips": ("partial-told", "partial-told-seed1", "partial-near"),
    "fox": ("fox-told", "fox-88M", "fox"),
    "fox-pro": ("fox-pro-told", "fox-pro-118M", "fox-pro"),
}
"""Recipes that ran on documents with other shares of facts."""
LENGTHS = (1024, 4096, 8192, 16384, 32768)
SHORT = {
    "len-4096": "windows of 4096",
    "len-8192": "windows of 8192",
    "len-16384": "windows of 16384",
    "len-32768": "windows of 32768",
    "removed": "half of the pairs removed, windows of 8192",
    "anneal": "the same pairs removed one by one over 3M tokens",
}
"""Runs of 5M tokens, of benchmarks/retrofit/windows.json."""
OTHERS = {
    "base": "base",
    "yarn:4": "base, YaRN x 4",
    "window:4096": "base, window of 4096",
    "streaming:4096,4": "base, StreamingLLM 4096 + 4",
    "drope": "base, no RoPE (DroPE)",
    "fox": "**fox**",
    "fox-43M": "fox taught by the base, 43M",
    "fox-pro": "**fox-pro**",
    "fox-pro-43M": "fox-pro with both norms, taught by the base, 43M",
}


def retrofit_glance() -> str:
    """Each arm beside the control: the largest shortfalls and excesses, and what is found beyond the trained length."""
    arms = read("retrofit/arms.json")["arms"]
    control = arms["control"]
    rows = []
    for name, label in ARMS.items():
        arm = arms[name]
        if name == "control" or not arm["loss"]:
            continue
        inside = _mean(arm["loss"], 0, 8192) - _mean(control["loss"], 0, 8192)
        rise = _mean(arm["loss"], 24576, 32768) - _mean(arm["loss"], 4096, 8192)
        far = arm.get("loss_128k")
        rise_far = f"{_mean(far, 65536, 131072) - _mean(far, 4096, 8192):+.3f}" if far else ""
        short = [
            f"{min(_found(arm, length, mode) - _found(control, length, mode) for length in (1024, 4096, 8192)):+.0f}"
            for mode in arm["needles"]
        ]
        beyond = [f"{_found(arm, length):.0f}" for length in (16384, 32768)]
        excess = [
            mine["loss"]["mean"] - its["loss"]["mean"]
            for mine, its in zip(arm.get("recall") or [], control["recall"], strict=False)
            if its["to"] <= 8192
        ]
        tasks = f"{_accuracy(arm) - _accuracy(control):+.1f}" if arm.get("tasks") else ""
        recall = f"{max(excess):+.3f}" if excess else ""
        rows.append(
            [label, f"{inside:+.3f}", f"{rise:+.3f}", rise_far, " / ".join(short), " / ".join(beyond), recall, tasks]
        )
    header = [
        "arm",
        "loss, 0-8k",
        "loss at 24k-32k over its own 4k-8k",
        "64k-128k over its own 4k-8k",
        "needles to 8k, easy / standard, at worst",
        "easy needles at 16k / 32k",
        "recall to 8k, at worst",
        "short tasks",
    ]
    return table(header, rows)


def _mean(buckets: Sequence[dict[str, Any]], start: int, stop: int) -> float:
    """Mean loss over the positions from `start` to `stop`."""
    chosen = [bucket for bucket in buckets if start <= bucket["from"] and bucket["to"] <= stop]
    return sum(bucket["mean"] * bucket["tokens"] for bucket in chosen) / sum(bucket["tokens"] for bucket in chosen)


def _accuracy(arm: dict[str, Any]) -> float:
    """Mean accuracy over the short tasks, per cent."""
    return 100 * sum(score["accuracy"] for score in arm["tasks"].values()) / len(arm["tasks"])


def retrofit_needles() -> str:
    """Easy and standard needles found by every arm, at each length."""
    arms = read("retrofit/arms.json")["arms"]
    rows = []
    for name, label in ARMS.items():
        for mode, found in arms[name]["needles"].items():
            rows.append([label, mode, found[0]["prompts"], *(f"{100 * row['found']:.0f}" for row in found)])
    return table(["arm", "mode", "prompts a length", "1k", "4k", "8k", "16k", "32k"], rows, left=2)


def retrofit_facts() -> str:
    """The same recipe on documents with few facts that are told again, and with many, half of them asked for."""
    arms = read("retrofit/arms.json")["arms"]
    rows = []
    for label, names in FACTS.items():
        for arm in (arms[name] for name in names):
            modes = ("easy", "standard")
            found = [" / ".join(f"{_found(arm, length, mode):.0f}" for length in LENGTHS) for mode in modes]
            loss = [f"{_mean(arm['loss'], start, stop):.3f}" for start, stop in ((0, 8192), (24576, 32768))]
            facts = f"{100 * arm['facts']['recall']:.0f} / {100 * arm['facts']['questions']:.0f}"
            tasks = f"{_accuracy(arm):.1f}" if arm.get("tasks") else ""
            rows.append([label, facts, f"{arm['tokens'] / 1e6:.0f}M", *found, *loss, tasks])
    lengths = " / ".join(f"{length // 1024}k" for length in LENGTHS)
    facts = "documents with facts / of these asked for, %"
    columns = ["recipe", facts, "tokens", f"easy needles at {lengths}", "standard ones", "loss, 0-8k", "24k-32k"]
    return table([*columns, "short tasks"], rows, left=1)


def retrofit_loss() -> str:
    """Loss by position of every arm, to 32k and, where it was measured, to 128k."""
    arms = read("retrofit/arms.json")["arms"]
    tables = []
    for key in ("loss", "loss_128k"):
        measured = {label: arms[name][key] for name, label in ARMS.items() if arms[name].get(key)}
        columns = [positions(bucket) for bucket in next(iter(measured.values()))]
        rows = [[label, *(f"{bucket['mean']:.3f}" for bucket in buckets)] for label, buckets in measured.items()]
        tables.append(table(["arm", *columns], rows))
    return "\n\n".join(tables)


def retrofit_windows() -> str:
    """Short runs of the same tokens in windows of other lengths, and two ways to remove pairs."""
    arms, control = read("retrofit/windows.json")["arms"], read("retrofit/arms.json")["arms"]["control"]
    level = _mean(control["loss"], 0, 8192)
    rows = []
    for name, label in SHORT.items():
        found = " / ".join(f"{_found(arms[name], length):.0f}" for length in LENGTHS)
        loss = arms[name]["loss"]
        rows.append([label, found, f"{_mean(loss, 0, 8192) - level:+.3f}", f"{_mean(loss, 24576, 32768):.3f}"])
    columns = ["5M tokens", "easy needles at 1k / 4k / 8k / 16k / 32k", "loss, 0-8k, less the control's", "24k-32k"]
    return table(columns, rows, left=1)


def retrofit_others() -> str:
    """Baselines made of the base without training, and recipes that were given up: needles and loss by length."""
    arms = read("retrofit/arms.json")["arms"]
    rows = []
    for name, label in OTHERS.items():
        found = {row["length"]: f"{100 * row['found']:.0f}" for row in arms[name]["needles"]["easy"]}
        loss = {bucket["from"]: f"{bucket['mean']:.3f}" for bucket in arms[name]["loss"]}
        needles = [found[length] for length in LENGTHS]
        rows.append([label, " / ".join(needles), *(loss[start] for start in (0, 4096, 8192, 24576))])
    columns = ["arm", "easy needles at 1k / 4k / 8k / 16k / 32k", "loss at 0-512", "4k-8k", "8k-16k", "24k-32k"]
    return table(columns, rows)


def retrofit_recall() -> str:
    """Loss on repeated words by the distance to their earlier occurrence, and what cutting that out costs."""
    arms = read("retrofit/arms.json")["arms"]
    measured = {label: arms[name]["recall"] for name, label in ARMS.items() if arms[name].get("recall")}
    octaves = next(iter(measured.values()))
    columns = [f"{octave['from']:,} to {octave['to']:,}" for octave in octaves]
    rows = [
        [label, *(f"{octave['loss']['mean']:.3f} ({octave['recalled']['mean']:+.2f})" for octave in found)]
        for label, found in measured.items()
    ]
    rows.append(["tokens", *(f"{octave['tokens']:,}" for octave in octaves)])
    return table(["arm", *columns], rows)


def retrofit_tasks() -> str:
    """Accuracy on short tasks of every arm that was asked, per cent, and the mean over tasks."""
    arms = read("retrofit/arms.json")["arms"]
    measured = {label: arms[name]["tasks"] for name, label in ARMS.items() if arms[name].get("tasks")}
    names = [task.removeprefix("local_") for task in next(iter(measured.values()))]
    rows = []
    for label, found in measured.items():
        shares = [100 * score["accuracy"] for score in found.values()]
        rows.append([label, f"**{sum(shares) / len(shares):.1f}**", *(f"{share:.1f}" for share in shares)])
    return table(["arm", "**mean**", *names], rows)


def leaderboard() -> str:
    """Arms by tokens: whether loss at 4 times the trained length and needles at 8k are as good as they have to be."""
    arms = read("retrofit/arms.json")["arms"] | read("retrofit/windows.json")["arms"]
    wanted = _found(arms["control"], 8192)
    rows = []
    labels = ARMS | {name: f"partial, no skips, {label}" for name, label in SHORT.items()}
    for name, label in sorted(labels.items(), key=lambda pair: arms[pair[0]]["tokens"]):
        arm = arms[name]
        if not arm["loss"]:
            continue
        loss = {bucket["from"]: bucket["mean"] for bucket in arm["loss"]}
        rise, behind = loss[24576] - loss[4096], _found(arm, 8192) - wanted
        reached = "yes" if rise <= 0 and behind >= -5 else "no"
        minutes = f"{arm['seconds'] / 60:.1f}" if arm["tokens"] else ""
        rows.append([label, f"{arm['tokens'] / 1e6:.0f}M", minutes, f"{rise:+.3f}", f"{behind:+.0f}", reached])
    header = [
        "arm",
        "tokens",
        "minutes, as run",
        "loss at 24k-32k less at 4k-8k",
        "needles at 8k less the control's",
        "both",
    ]
    return table(header, rows)


def _found(arm: dict[str, Any], length: int, mode: str = "easy") -> float:
    """Needles found at a length, per cent."""
    return next(100 * row["found"] for row in arm["needles"][mode] if row["length"] == length)
