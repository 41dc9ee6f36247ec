"""Tables of the pages that are drawn from the results on file: each function returns Markdown.

The figures come out of benchmarks/, so a page can't disagree with what was measured.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned left, the others right."""
    marks = ["---" if column < left else "---:" for column in range(len(header))]
    lines = [header, marks, *[[str(cell).replace("|", "\\|") for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))


def positions(bucket: dict[str, Any]) -> str:
    return f"{bucket['from']:,} to {bucket['to']:,}"


def demo() -> str:
    """What `make demo` cost and what it did to the loss, from benchmarks/demo.json."""
    result = read("demo.json")
    steps = [[s["name"], f"{s['seconds']:.1f}", s["peak_mib"] or ""] for s in result["steps"]]
    losses = [
        [
            positions(row) if "from" in row else "all",
            *(f"{row[key]:.3f}" for key in ("original", "converted", "adapted")),
        ]
        for row in result["loss"]
    ]
    names = ("original", "converted", "adapted")
    needles = [
        [row["length"], row["prompts"], *(_share_of(row[name]) for name in names)] for row in result.get("needles", ())
    ]
    found = [table(["facts found again at, tokens", "asked", *names], needles)] if needles else []
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = result["machine"]
    note = f" {result['note']}" if "note" in result else ""
    where = f"{machine['processor']}, {machine['cores']} cores"
    return "\n\n".join(
        [
            f"`{result['command']}`: {result['seconds']:.0f} seconds on {where} ({versions}), {result['date']}.{note}",
            table(["step", "seconds", "peak memory, MiB"], steps),
            table(["positions of held-out books", "original", "converted", "adapted"], losses),
            *found,
        ]
    )


def _share_of(value: dict[str, Any]) -> str:
    low, high = value["interval"]
    return f"{100 * value['found']:.0f} % ({100 * low:.0f}-{100 * high:.0f})"


def training_speed() -> str:
    """Tokens per second of converted and unconverted models, from train-step.json."""
    rows = []
    for name in ("train-step.json",):
        result = read(name)
        for what, runs in (("packed documents", result["train"]), ("one document a row", result["profile"])):
            speed = {key: f"{run['tokens_per_second']:,.0f}" for key, run in runs.items()}
            cells = [speed.get(key, "") for key in ("unconverted", "converted", "deterministic")]
            rows.append([result["gpu"], what, *cells])
    header = ["GPU", "rows of 4096 tokens", "unconverted", "converted", "converted, deterministic"]
    return table(header, rows, left=2)


def training_windows() -> str:
    """Tokens per second in long windows of a trained model and its unconverted base, from train-windows.json."""
    rows = []
    for row in read("train-windows.json")["rows"]:
        cells = [format(row[key], f) if key in row else "-" for key, f in WINDOW_COLUMNS.items()]
        rows.append([f"{row['window']:,}", row["model"], *cells])
    return table(["window", "model", "tokens/s", "of the control's", "peak memory, GB"], rows, left=2)


WINDOW_COLUMNS = {"tokens_per_second": ",.0f", "of_control": ".2f", "peak_memory_gb": ".1f"}


def shapes() -> str:
    """Speed of larger models' shapes with random weights, from shapes.json."""
    by: dict[tuple[str, int], dict[bool, dict[str, Any]]] = defaultdict(dict)
    for row in read("shapes.json")["rows"]:
        by[row["shape"], row["length"]][row["converted"]] = row
    rows = []
    for (shape, length), pair in by.items():
        plain, fox = pair[False], pair[True]
        ratio = fox["tokens_per_second"] / plain["tokens_per_second"]
        speeds = (f"{run['tokens_per_second']:,.0f}" for run in (plain, fox))
        steps = "one step, not warmed up" if fox["steps"] == 1 else f"{fox['steps']} steps"
        rows.append([f"{shape}, {fox['trains']}", fox["device"], f"{length:,}", steps, *speeds, f"{ratio:.2f}"])
    header = ["shape, what trains", "GPU", "tokens in a row", "timed", "unconverted", "converted", "ratio"]
    return table(header, rows, left=4)


def long_training() -> str:
    """Whole models' shapes in the longest rows that were trained, from long-training.json."""
    record = read("long-training.json")
    rows = []
    for run in (record, *record["earlier"]):
        for row in run["rows"]:
            whole = row["layers"] > 4 and row["length"] > 65536
            if whole and not any(row["shape"] == other[0] for other in rows):  # the newest run comes first
                memory = f"{row['peak_memory_gb']:.1f} ({row['planned_gb']:.1f})"
                cells = [
                    row["shape"],
                    row["trains"],
                    run["device"],
                    f"{row['length']:,}",
                    f"{row['tokens_per_second']:,.0f}",
                ]
                rows.append([*cells, memory, f"{row['speed_ratio']:.2f}"])
    header = ["shape", "what trains", "GPU", "tokens in a row", "tokens/s", "memory (planned), GB"]
    return table([*header, "speed per operation, over rows of 64k"], rows, left=3)


def context_parallel() -> str:
    """A row on two GPUs beside one alone, from context_parallel.json."""
    what = {"attention": "one layer's attention", "step": "the whole model"}
    documents = {"dense": "one, gates open", "packed": "several", "gates": "one, half-lives of 16 tokens to a row"}
    rows = [
        [
            what[row["kind"]],
            documents[row["case"]],
            *(f"{row[k]:.3f}" for k in ("seconds_alone", "seconds")),
            f"{row['ratio']:.2f}",
        ]
        for row in read("context_parallel.json")["rows"]
        if row["kind"] in what
    ]
    header = ["forward and backward of", "documents in the row", "one GPU alone, seconds", "two GPUs, seconds", "ratio"]
    return table(header, rows, left=2)


def several_gpus() -> str:
    """Speed of a GPU of two, over that of one alone, from fsdp.json."""
    names = {"ddp": "DDP", "step": "FSDP2", "kept": "FSDP2, kept"}
    rows = [
        [row["shape"], row["window"], names[row["variant"]], f"{row['ratio']:.2f}", f"{row['peak_memory_gb']:.1f}"]
        for row in read("fsdp.json")["rows"]
        if row["variant"] in names
    ]
    return table(["shape", "window", "way", "speed of one GPU alone", "peak memory, GB"], rows, left=3)


KERNELS = {
    "ours": "retrofox",
    "official": "official FoX kernel",
    "fla": "fla",
    "FlashAttention-2, no gate": "FlashAttention-2, no gates",
    "cuDNN, no gate": "cuDNN, no gates",
    "ours, horizon 16": "retrofox, horizon of 16 nats",
    "official, pruned": "official, pruned",
}
CUDNN = "cuDNN, no gate"


def kernel_times() -> dict[tuple[tuple[int, ...], str], dict[str, float]]:
    """((B, T, H, Hkv, D), gates) -> contender -> milliseconds of forward + backward; whole rows, no documents."""
    found: dict[tuple[tuple[int, ...], str], dict[str, float]] = defaultdict(dict)
    for row in read("kernels.json")["rows"]:
        if not row["document"] and row["stage"] != "flex":
            shape = tuple(row[key] for key in ("B", "T", "H", "Hkv", "D"))
            found[shape, row["gates"]][row["contender"]] = row["total_ms"]
    return found


SHAPE = ("rows", "tokens", "heads", "kv heads", "head dim")


def kernel_table() -> str:
    """Milliseconds of a step beside its peers, gates short; head dims 64 and 128 first."""
    short = [(shape, times) for (shape, gates), times in kernel_times().items() if gates == "short"]
    names = [name for name in KERNELS if any(name in times for _, times in short)]
    rows = [
        [*shape, *(f"{times[name]:.3g}" if name in times else "-" for name in names)]
        for shape, times in sorted(short, key=lambda row: row[0][-1] not in (64, 128))
    ]
    return table([*SHAPE, *(KERNELS[name] for name in names)], rows, left=0)


def kernel_ratios() -> str:
    """Time over cuDNN's without gates, gates short and open; the same cuDNN time under both."""
    times = kernel_times()
    rows = []
    for (shape, gates), short in times.items():
        if gates == "short" and CUDNN in short:
            opened = times.get((shape, "open"), {}).get("ours")
            rest = f"{opened / short[CUDNN]:.2f}" if opened else "-"
            two = short["ours"] / short["FlashAttention-2, no gate"]
            rows.append([*shape, f"{short['ours'] / short[CUDNN]:.2f}", rest, f"{two:.2f}"])
    rows.sort(key=lambda row: row[-2] == "-")
    header = [*SHAPE, "short gates / cuDNN", "open gates / cuDNN", "short gates / FlashAttention-2"]
    return table(header, rows, left=0)


def corpus() -> str:
    """Documents and tokens of each part of the measured corpus, from its manifest."""
    documents: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    with open(BENCHMARKS / "corpus" / "manifest.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            documents[row["file"], row["source"]] += 1
            tokens[row["file"], row["source"]] += row["tokens"]
    files = list(dict.fromkeys(file for file, _ in documents))
    rows = []
    for source in sorted({source for _, source in documents}, key=lambda s: -sum(tokens[f, s] for f in files)):
        cells = [
            f"{documents[f, source]} / {tokens[f, source] / 1e6:.2f}M" if documents[f, source] else "" for f in files
        ]
        rows.append([source, *cells])
    totals = [
        f"{sum(documents[f, s] for s in {s for _, s in documents})} / "
        f"{sum(tokens[f, s] for s in {s for _, s in documents}) / 1e6:.1f}M"
        for f in files
    ]
    return table(["source: documents / tokens", *files], [*rows, ["all", *totals]])
