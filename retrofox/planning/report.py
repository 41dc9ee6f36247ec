"""Printing a plan."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from retrofox.planning.live_share import shares_text
from retrofox.support.counts import size


def print_plan(report: dict[str, Any]) -> None:
    """Prints a plan: the run, a table per stage, what is left open."""
    console = Console(emoji=False)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"[bold]{escape(report['model'])}[/bold] -> {escape(report['output'])}")
    sharding = f", {report['sharding']}" if report["sharding"] else ""
    say(
        f"{report['parameters']:,} parameters, {report['parameters_added']:,} of them added by the retrofit; "
        f"{report['devices']} x {escape(report['device'])} with {report['device_memory_gb']:.0f} GB{sharding}"
    )
    disk, free = report["disk_gb"], report["disk_free_gb"]
    little = ": too little; keep fewer (checkpoint.keep)" if disk["total"] > free else ""
    total, each, here = (size(1e9 * gb) for gb in (disk["total"], disk["one_checkpoint"], free))
    say(f"disk: {total} at most, {each} a checkpoint, of {here} free here{little}")
    if report["self_chat"]:
        say("data.self_chat: the model makes conversations before stage 0, in time that is not counted here")
    if report["live_at_start"] is not None:
        say(f"keys alive at the start, operations/cache: {shares_text(report['live_at_start'])}")
    for number, stage in enumerate(report["stages"]):
        console.print(_table(f"stage {number}: {stage['objective']}", stage))
    if report["dollars"]:
        say(f"price: {_between(report['dollars'], '${:,.2f}')}")
    if report["recipes_that_fit"]:
        say(f"shipped recipes that fit this machine: {', '.join(report['recipes_that_fit'])}")
    for refusal in report["refusals"]:
        say(f"[red]refused:[/red] {escape(refusal)}")


def _table(title: str, stage: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    asked = "" if stage["tokens"] == stage["tokens_asked"] else f" ({stage['tokens_asked']:,} asked, whole steps)"
    table.add_row(
        "steps", f"{stage['steps']:,} of {stage['batch_tokens']:,} tokens = {stage['tokens']:,} tokens{asked}"
    )
    if stage["budget"] is not None:
        share, length = stage["budget"]["share"], stage["budget"]["length"]
        table.add_row("budget", f"until {share:.0%} of the keys are alive at {length:,} tokens")
    for group in stage["groups"]:
        table.add_row(group["role"], f"{group['parameters']:,} parameters at {group['learning_rate']:g}")
    for part, gigabytes in stage["memory_gb"].items():
        if gigabytes:
            table.add_row(part, size(1e9 * gigabytes))
    verdict = "fits" if stage["fits"] else f"DOES NOT FIT: {stage['change']}"
    table.add_row("memory", f"{size(1e9 * math.fsum(stage['memory_gb'].values()))} a device at its peak: {verdict}")
    if stage["cpu_memory_gb"]:
        parts = ", ".join(f"{size(1e9 * value)} of {key}" for key, value in stage["cpu_memory_gb"].items())
        table.add_row("CPU memory", f"{parts} a device, moved there")
    longest = stage["longest_sequence"]
    table.add_row("longest row", f"{longest:,} tokens, one to a micro-batch" if longest else "none fits")
    if "measured" in stage:
        found = stage["measured"]
        speed = f"{found['tokens_per_second']:,.0f} tok/s, {size(1e9 * found['peak_memory_gb'])}"
        table.add_row("measured", f"{speed}: {stage['hours'][0]:.2f} hours")
    elif stage["hours"]:
        where = f"at the shares of the peak that an H100 or H200 reached: benchmarks/{stage['hours_from']}"
        unit, each = ("hours", 1) if stage["hours"][1] >= 1 else ("minutes", 60)
        table.add_row(unit, f"{_between([each * hours for hours in stage['hours']], '{:.1f}')} ({where})")
    else:
        table.add_row("hours", "unknown for this device: name one with --gpu, or give --measure")
    return table


def _between(ends: list[float], form: str) -> str:
    low, high = (form.format(end) for end in ends)
    return low if low == high else f"{low} to {high}"
