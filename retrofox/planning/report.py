"""Printing a plan."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from retrofox.support.counts import size
from retrofox.training.switches import named


def print_plan(report: dict[str, Any]) -> None:
    """Prints a plan: the run, a table per stage, the refusals."""
    console = Console(emoji=False)
    console.print(f"[bold]{escape(report['model'])}[/bold] -> {escape(report['output'])}", highlight=False)
    if "parameters" in report:
        console.print(
            f"{report['parameters']:,} parameters, {report['parameters_added']:,} of them added by the retrofit; "
            f"{report['devices']} x {report['device']} with {report['device_memory_gb']:.1f} GB",
            highlight=False,
            soft_wrap=True,
        )
    if report["stages"]:
        disk = report["disk_gb"]
        parts = ", ".join(f"{k} {size(1e9 * v)}" for k, v in disk.items() if v and k not in ("total", "one_checkpoint"))
        console.print(
            f"disk: {size(1e9 * disk['total'])} at most ({parts}) of {size(1e9 * report['disk_free_gb'])} free",
            highlight=False,
            soft_wrap=True,
        )
    for number, stage in enumerate(report["stages"]):
        table = Table(title=f"stage {number}: {stage['objective']}", title_justify="left", show_header=False)
        asked = "" if stage["tokens"] == stage["tokens_asked"] else f" ({stage['tokens_asked']:,} asked, whole steps)"
        table.add_row(
            "steps", f"{stage['steps']:,} of {stage['batch_tokens']:,} tokens = {stage['tokens']:,} tokens{asked}"
        )
        for group in stage["groups"]:
            table.add_row(group["role"], f"{group['parameters']:,} parameters at {group['learning_rate']:g}")
        if stage["adapter_parameters"]:
            table.add_row("adapters", f"{stage['adapter_parameters']:,} of the parameters above")
        if stage["frozen_parameters"]:
            table.add_row("frozen", f"{stage['frozen_parameters']:,} parameters")
        for component, gigabytes in stage["memory_gb"].items():
            if gigabytes:
                table.add_row(component, size(1e9 * gigabytes))
        table.add_row(
            "memory", f"{size(1e9 * math.fsum(stage['memory_gb'].values()))} a device at its peak: {_verdict(stage)}"
        )
        if stage["cpu_memory_gb"]:
            parts = ", ".join(f"{size(1e9 * value)} of {key}" for key, value in stage["cpu_memory_gb"].items())
            table.add_row("CPU memory", f"{parts} a device, moved there")
        if stage["untiled_layers"]:
            table.add_row("tiled_mlp", f"{stage['untiled_layers']} layers are not tiled: they have experts")
        table.add_row("longest row", f"{stage['longest_sequence']:,} tokens, one to a micro-batch")
        if stage["hours"] is not None:
            table.add_row("hours", f"{stage['hours']:.2f} ({stage['hours_from']})")
        else:
            table.add_row("hours", "unknown for this device: run with --measure")
        if "measured" in stage:
            found = stage["measured"]
            table.add_row("measured", f"{found['tokens_per_second']:,.0f} tok/s, {size(1e9 * found['peak_memory_gb'])}")
        console.print(table)
    for refusal in report["refusals"]:
        console.print(f"[red]refused:[/red] {escape(refusal)}", highlight=False)


def _verdict(stage: dict[str, Any]) -> str:
    """Whether a stage fits, or the cheapest switches with which it does."""
    if stage["fits"]:
        return "fits"
    if stage["switches"] is None:
        return "DOES NOT FIT, with any switch: lower sequence_length, or share rows (parallel: {context: N})"
    return f"DOES NOT FIT: set {named(stage['switches'])}"
