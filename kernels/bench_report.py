"""Measurements as lines of text and as a chart."""

from pathlib import Path
from typing import Any

from bench_problems import HORIZON, OUTPUTS, TABLE, Problem


def totals(result: dict, p: Problem) -> dict[str, float]:
    """Return contender -> milliseconds of forward and backward on a problem."""
    return {r["contender"]: r["total_ms"] for r in result["rows"] if r["problem"] == p.name}


def row_line(row: dict) -> str:
    """Return one measurement of the table or the extras as a line."""
    return (
        f"{row['problem']:36} {row['contender']:26} {row['forward_tflops']:6.0f} {row['backward_tflops']:6.0f} "
        f"{row['total_ms']:9.3f} ms {row['peak_mb']:7.0f} MB"
    )


def decode_line(row: dict) -> str:
    return (
        f"decode {row['problem']:24} {row['ms']:8.4f} ms {row['gb_s']:6.0f} GB/s, {row['of_copy']:.0%} of a copy, "
        f"as a graph {row['graph_of_copy']:.0%}; live {row['live']:.0%}"
    )


def error_line(row: dict) -> str:
    return f"error {row['problem']:26} {row['contender']:14} " + "  ".join(f"{n} {row[n]:.2e}" for n in OUTPUTS)


COLOURS = {
    "ours": "#c2410c", HORIZON: "#7c2d12", "plain Triton": "#fdba74", "cuDNN, no gate": "#334155",
    "FlashAttention-2, no gate": "#64748b", "official": "#94a3b8", "fla": "#cbd5e1", "official, pruned": "#b6c2d1",
}  # fmt: skip


def draw(result: dict, path: Path) -> None:
    """Draw the rates of forward + backward per shape of the table: dense above, sparse below; PNG and SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    shapes = [p for p in TABLE if totals(result, p)]
    if not shapes:
        raise ValueError("the chart shows the table's shapes, and none of them was measured")
    dense = ("ours", "cuDNN, no gate", "plain Triton", "FlashAttention-2, no gate", "official", "fla")
    panels = {"dense": dense, "a horizon of 16 nats, short gates": (HORIZON, "official, pruned")}
    measured = {n for p in shapes for n in totals(result, p)}
    shown = {title: names for title, of in panels.items() if (names := [n for n in of if n in measured])}
    figure = Figure(figsize=(11, 2.4 * len(shown) + 2), layout="tight")
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axis, (title, names) in zip(axes, shown.items(), strict=True):
        bars(axis, result, shapes, names)
        axis.set_title(title, fontsize=10, loc="left")
    gpu = result["machine"]["name"]
    axes[0].set_title(f"Forgetting Attention, forward + backward, bf16, causal, one {gpu}", fontsize=10, loc="right")
    with matplotlib.rc_context({"svg.hashsalt": "kernels"}):  # the same results, the same bytes
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=160)


def bars(axis: Any, result: dict, shapes: list[Problem], names: list[str]) -> None:
    """One group of bars per shape, one bar per contender, labelled with its rate."""
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        times = [totals(result, p).get(name) for p in shapes]
        rates = [3.5 * p.forward_flops / t / 1e9 if t else 0.0 for p, t in zip(shapes, times, strict=True)]
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(shapes))]
        drawn = axis.bar(places, rates, width, label=name, color=COLOURS[name])
        axis.bar_label(drawn, [f"{r:.0f}" if r else "" for r in rates], fontsize=6.5, rotation=90, padding=2)
    axis.set_xticks(range(len(shapes)), [f"{p.B} x {p.T}\nheads {p.H}/{p.Hkv}, D {p.D}" for p in shapes], fontsize=8)
    axis.set_ylabel("TFLOP/s")
    axis.margins(y=0.35)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=3, frameon=False, loc="upper left")
