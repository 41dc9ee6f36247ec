"""What the measurements mean: ratios to the peers of the same run, targets met or missed, a table and a chart."""

from pathlib import Path
from typing import Any

from bench_problems import CONTENDERS, HORIZON, TABLE, UNORDERED, Problem

OUTPUTS = ("o", "dq", "dk", "dv", "dlog_f")
# (what, who, to whom, at most by head dim): ratios of the total time, forward and backward
TARGETS = (
    ("official", "ours", "official", {64: 0.50, 128: 0.75}),
    ("fla", "ours", "fla", {64: 0.40, 128: 0.62}),
    ("FA2, no gate", "ours", "FlashAttention-2, no gate", {64: 0.75, 128: 0.75}),
    ("cuDNN, no gate", "ours", "cuDNN, no gate", {64: 1.0, 128: 1.0}),
    ("dq in any order / cuDNN", UNORDERED, "cuDNN, no gate", {64: 1.0, 128: 1.0}),
    ("plain Triton / official", "plain Triton", "official", {64: 0.85, 128: 0.85}),
    ("horizon / official, pruned", HORIZON, "official, pruned", {64: 0.75, 128: 0.75}),
)
ON_OFF = "horizon on / off"  # with gates open it hides nothing: what it may cost
COST_AT_MOST = 1.03
COPY_AT_LEAST = 0.70  # of the measured copy bandwidth, decoding at 32k and 128k


def totals(result: dict, p: Problem, kind: str = "total_ms") -> dict[str, float]:
    return {r["contender"]: r[kind] for r in result["rows"] if r["problem"] == p.name}


def target(what: str, where: str, value: float, limit: float, met: bool) -> dict:
    return {"what": what, "where": where, "value": value, "target": limit, "met": met}


def ratio_target(result: dict, what: str, p: Problem, mine: str, other: str, limit: float) -> list[dict]:
    """Return the target on a ratio of total times, with the ratio of the queued ones, if both were measured."""
    times, queued = totals(result, p), totals(result, p, "queued_ms")
    if mine not in times or other not in times:
        return []
    ratio = times[mine] / times[other]
    found = target(what, p.name, ratio, limit, ratio <= limit)
    return [{**found, "queued_value": queued[mine] / queued[other]}]


def targets(result: dict) -> list[dict]:
    """Return every target for which both sides were measured: what, where, value, target, met."""
    found = []
    for p in TABLE:
        for what, mine, other, limits in TARGETS:
            found += ratio_target(result, what, p, mine, other, limits[p.D])
        found += ratio_target(result, ON_OFF, p._replace(gates="open"), HORIZON, "ours", COST_AT_MOST)
    for row in result["decode"]:
        if row["T"] >= 32768:
            for what, rate in (("decode / copy", "of_copy"), ("decode / copy, L2 clean", "clean_of_copy")):
                if rate in row:  # results of before 2026-11-22 know one flush only
                    found.append(target(what, row["problem"], row[rate], COPY_AT_LEAST, row[rate] >= COPY_AT_LEAST))
    for problem in dict.fromkeys(r["problem"] for r in result["errors"]):
        rows = {r["contender"]: r for r in result["errors"] if r["problem"] == problem}
        for mine in ("ours", "plain Triton"):
            if mine in rows and "official" in rows:
                for n in OUTPUTS:
                    ratio = rows[mine][n] / rows["official"][n]
                    what = f"error of {n}, {mine} / official"
                    found.append(target(what, problem, ratio, 1.0, ratio <= 1.0))
    return found


def row_line(row: dict) -> str:
    """Return one measurement of the table or the extras as a line."""
    return (
        f"{row['problem']:36} {row['contender']:26} {row['forward_tflops']:6.0f} {row['backward_tflops']:6.0f} "
        f"{row['total_ms']:9.3f} ms (queued {row['queued_ms']:.3f}) {row['peak_mb']:7.0f} MB  +-{row['spread']:.1%}"
    )


def decode_line(row: dict) -> str:
    clean = f"; L2 clean {row['clean_of_copy']:.0%}, {row['clean_graph_of_copy']:.0%}" if "clean_ms" in row else ""
    same = f"; a copy as short {row['same_of_copy']:.0%}, {row['clean_same_of_copy']:.0%}" if "same_ms" in row else ""
    return (
        f"decode {row['problem']:24} {row['ms']:8.4f} ms {row['gb_s']:6.0f} GB/s, {row['of_copy']:.0%} of a copy, "
        f"as a graph {row['graph_of_copy']:.0%}{clean}{same}; live {row['live']:.0%}"
    )


def error_line(row: dict) -> str:
    return f"error {row['problem']:26} {row['contender']:14} " + "  ".join(f"{n} {row[n]:.2e}" for n in OUTPUTS)


def cell(found: dict | None) -> str:
    return "-" if found is None else f"{found['value']:.2f}{'' if found['met'] else ' (missed)'}"


def markdown(result: dict) -> str:
    """Return the summary: total times and ratios per shape, a horizon's cost, decoding, and the targets missed."""
    reached = targets(result)
    at = {(t["what"], t["where"]): t for t in reached}
    names = [what for what, *_ in TARGETS]
    lines = [
        f"| B,T,H,Hkv,D | ours, ms | {' | '.join(names)} | {ON_OFF} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for p in TABLE:
        times = totals(result, p)
        if "ours" in times:
            cells = [cell(at.get((what, p.name))) for what in names]
            cells.append(cell(at.get((ON_OFF, p._replace(gates="open").name))))
            lines.append(f"| {p.name.split(' ')[0]} | {times['ours']:.3f} | {' | '.join(cells)} |")
    lines.append("")
    lines += [*(decode_line(row) for row in result["decode"]), ""]
    missed = [t for t in reached if not t["met"]]
    lines.append(
        f"{len(reached) - len(missed)} of {len(reached)} targets met; missed:" if missed else "all targets met"
    )
    for t in missed:
        if "error" not in t["what"]:
            queued = f" (GPU time alone {t['queued_value']:.3f})" if "queued_value" in t else ""
            lines.append(f"  {t['what']} at {t['where']}: {t['value']:.3f}{queued}, target {t['target']:.2f}")
    for what in dict.fromkeys(t["what"] for t in missed if "error" in t["what"]):
        ratios = [t["value"] for t in reached if t["what"] == what]
        above = sum(t["what"] == what for t in missed)
        lines.append(f"  {what}: {min(ratios):.4f} to {max(ratios):.4f}, above 1 in {above} of {len(ratios)}")
    return "\n".join(lines)


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


FIELDS = {
    "rows": {"problem", "contender", "forward_tflops", "backward_tflops", "total_ms", "queued_ms", "peak_mb", "spread"},
    "decode": {"problem", "contender", "T", "ms", "gb_s", "of_copy", "graph_of_copy", "live"},
    "errors": {"problem", "contender", *OUTPUTS},
}


def check(result: dict) -> dict:
    """Return a result read from a file. Raises ValueError where it isn't one of the benchmark's."""
    wanted = ("machine", *FIELDS, "skipped")
    missing = [n for n in wanted if n not in result] if isinstance(result, dict) else list(wanted)
    for kind in () if missing else FIELDS:
        for row in result[kind]:
            missing += sorted(f"{kind}.{n}" for n in FIELDS[kind] - set(row))
    if missing:
        some = ", ".join(list(dict.fromkeys(missing))[:5])
        raise ValueError(f"it has no {some}: give a file that kernels/bench.py --out wrote")
    unknown = {r.get("contender") for r in result["rows"]} - set(CONTENDERS)
    if unknown:
        raise ValueError(f"unknown contenders {sorted(map(str, unknown))}; known are {CONTENDERS}")
    return result
