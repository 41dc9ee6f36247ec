"""Output of `retrofox convert`: the plan, the parity proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from retrofox.conversion.card import described
from retrofox.fox_spec import FoxSpec
from retrofox.support.counts import size
from retrofox.surgery import Plan


def print_plan(plan: Plan, values: dict[str, Any]) -> None:
    """The plan as a table on stdout; `values` as `retrofox.conversion.convert.preview` gives them."""
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


def _table(title: str, plan: dict[str, Any]) -> None:
    kept, slowed = plan["rotary_pairs_kept"] or [0], max(plan["rotary_pairs_slowed"] or [0])
    rows = {"layers x heads": f"{plan['layers']} x {plan['heads']}"} | described(FoxSpec.from_dict(plan["spec"]))
    span = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
    rows["rotary pairs"] = f"{span} of {plan['rotary_pairs']} kept as they were"
    if slowed:
        rows["rotary pairs"] += f", {slowed} slower"
    rows["sink tokens"] = str(max(plan["exempt_tokens"], default=0) or "none")
    rows["added"] = f"{plan['tensors_added']} tensors, {plan['parameters_added']:,} parameters, "
    rows["added"] += size(plan["bytes_added"])
    if plan["settings_replaced"]:
        rows["config"] = ", ".join(f"{name} = {value}" for name, value in plan["settings_replaced"].items())
    if "weight_bytes" in plan:
        rows["weights"] = f"{plan['weight_files']} files, {size(plan['weight_bytes'])}, copied, never loaded"
    table = Table(title=escape(title), title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    Console(emoji=False).print(table)
