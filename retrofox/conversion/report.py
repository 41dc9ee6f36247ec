"""What `retrofox convert` shows: the plan, the copying, the parity proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from retrofox.conversion.card import exemption
from retrofox.support.counts import size
from retrofox.surgery import Plan


def print_plan(plan: Plan, values: dict[str, Any]) -> None:
    """The plan as a table on stdout; `values` as `retrofox.conversion.artefact.preview` gives them."""
    _table(f"plan: {plan.spec.base} -> fox_{plan.model_type}", values)
    shapes = {name.split(".", 3)[-1]: shape for name, shape in plan.tensors.items()}
    for name, shape in shapes.items():
        Console(soft_wrap=True, emoji=False).print(
            f"  + {name} {list(shape)} float32, in each of {plan.layers} layers", highlight=False, markup=False
        )


def print_conversion(report: dict[str, Any], out: Path) -> None:
    """The finished conversion as a table on stdout, ending with the parity proof."""
    _table(f"converted: {out}", report["plan"])
    console = Console(soft_wrap=True, emoji=False)
    console.print(f"weights {report['weights']}; {report['seconds']} s, peak memory {report['peak_memory_mib']} MiB")
    parity = report["parity"]
    if isinstance(parity, str):
        console.print(f"parity proof: {parity}", markup=False)
        return
    console.print(
        f"parity proof ({parity['tokens']} tokens of {escape(parity['text'])}, {parity['dtype']}, gates open + RoPE "
        f"kept against the base): logits differ by at most {parity['max_difference']:.1e}, "
        f"mean {parity['mean_difference']:.1e} (allowed {parity['tolerance']:.1e}): [bold green]equal[/]"
    )
    console.print(
        f"loss on them: base {parity['loss_base']:.4f}, parity form {parity['loss_gates_open_rope_kept']:.4f}, "
        f"as converted {parity['loss_converted']:.4f} (training brings this back)"
    )
    for part, cost in parity.get("parts", {}).items():
        console.print(f"  of that, {part} costs {cost['costs']:+.4f} ({cost['loss_without']:.4f} without it)")


def _table(title: str, plan: dict[str, Any]) -> None:
    spec, kept = plan["spec"], plan["rotary_pairs_kept"]
    table = Table(title=escape(title), title_justify="left", show_header=False)
    lives = plan["half_lives_tokens"]
    span = ""
    if spec["layer_pairs"]:
        span = ", chosen by layer"
    elif spec["rope"] == "partial":
        span = f" (wavelengths up to {spec['max_wavelength']:.0f} tokens)"
    slowed = max(plan.get("rotary_pairs_slowed") or [0])
    if slowed:
        span = f", {slowed} turn up to {spec['rope_factor']:g} times slower"
    pairs = "no rotary" if not kept else f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
    start = ", half-lives in tokens: " + ", ".join(f"{x:.0f}" for x in lives) if lives else ", as they were trained"
    if spec["init"] == "open":
        start = ", open (log f = 0)"
    elif spec["init"] == "measured":
        start = f", half-lives of {min(lives):.0f} to {max(lives):.0f} tokens by measured attention distance"
    opened = spec["open_heads"]
    if opened:
        start += f"; {opened if isinstance(opened, int) else len(opened)} kv heads start open"
    shared = ", one per kv head" if spec["gate_heads"] == "kv" else ""
    rows = {
        "layers x heads": f"{plan['layers']} x {plan['heads']}",
        "gates": spec["gate"] + (shared + start if spec["gate"] != "none" else ""),
        "RoPE": f"{spec['rope']}: {pairs} of {plan['rotary_pairs']} pairs kept{span}",
        "sink tokens": exemption(plan["exempt_tokens"]),
        "Pro parts": ", ".join(spec["pro"]) or "none",
        "horizon": "none" if spec["horizon"] is None else f"keys that decayed by {spec['horizon']:g} nats are masked",
        "added": f"{plan['tensors_added']} tensors, {plan['parameters_added']:,} parameters, "
        + size(plan["bytes_added"]),
    }
    if plan["settings_replaced"]:
        rows["config"] = ", ".join(f"{name} = {value}" for name, value in plan["settings_replaced"].items())
    if "weight_bytes" in plan:
        how = "hard-linked" if plan["weights_linked"] else "copied"
        rows["weights"] = f"{plan['weight_files']} files, {size(plan['weight_bytes'])}, {how}, never loaded"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    Console(emoji=False).print(table)


@contextmanager
def copying(quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with ETA for the bytes of the weights; gives the function to feed it with."""
    columns = (
        TextColumn("copying weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)  # until heads are measured
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)
