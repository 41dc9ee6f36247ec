"""Forgetting Attention side by side with its peers, in one process on one GPU: time, memory and error.

    python kernels/bench.py --official PATH --out benchmarks/kernels.json --chart benchmarks/kernels.png
    python kernels/bench.py --draw benchmarks/kernels.json --chart benchmarks/kernels.png      (no GPU)

Contenders: ours as it is chosen, ours with pruning, ours in plain Triton, fla-core (PyPI), the official kernel (a file,
--official), FlexAttention in the one form that trains, and SDPA (FlashAttention-2, cuDNN), which know no gates.
Counting: forward FLOPs = 4 B H T T D / 2, backward 2.5 times that; pruned pairs, and pairs of two documents, count as
well, so both show as a higher rate. Times are medians of CUDA events (`triton.testing.do_bench`), the L2 cache flushed.
The error is against `fox_kernels.reference` in float64, on 2048 tokens, the shape's head dim and at most 4 kv heads.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Problem(NamedTuple):
    """B x T tokens, H query heads on Hkv kv heads of D channels, with a kind of gates, packed in documents or not."""

    B: int
    T: int
    H: int
    Hkv: int
    D: int
    gates: str = "short"
    document: int = 0

    @property
    def name(self) -> str:
        packed = f", documents of {self.document}" if self.document else ""
        return f"{self.B},{self.T},{self.H},{self.Hkv},{self.D} {self.gates}{packed}"

    @property
    def flops(self) -> float:
        return 2.0 * self.B * self.H * self.T * self.T * self.D


TABLE = [
    Problem(8, 2048, 16, 16, 64),
    Problem(2, 8192, 16, 16, 64),
    Problem(1, 32768, 16, 16, 64),
    Problem(2, 8192, 16, 16, 128),
    Problem(1, 32768, 16, 16, 128),
    Problem(1, 16384, 32, 8, 128),
]
FURTHER = [
    *(Problem(2, 8192, 16, 16, D, gates) for D in (64, 128) for gates in ("open", "mixed")),
    *(Problem(2, 8192, 16, 16, D) for D in (80, 96)),
    Problem(2, 8192, 8, 8, 256),
    *(Problem(1, 16384, 16, 16, D, document=2048) for D in (64, 128)),
]
DECODE = [(batch, cache) for batch in (1, 16) for cache in (4096, 32768, 131072)]


def draw_gates(kind: str, B: int, T: int, H: int) -> torch.Tensor:
    """Return log_f (B, T, H): open (none forgets), short (some 20 tokens), mixed (heads from short to none)."""
    logits = torch.randn(B, T, H, device="cuda")
    if kind == "open":
        return torch.zeros_like(logits)
    shift = 4 if kind == "short" else torch.linspace(2, 14, H, device="cuda")
    return F.logsigmoid(logits + shift)


def tensors(p: Problem, dtype=torch.bfloat16) -> dict:
    """Return q, k, v, do and log_f, and cu_seqlens for packed documents, fresh and random."""
    q, do = (torch.randn(p.B, p.T, p.H, p.D, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(p.B, p.T, p.Hkv, p.D, device="cuda", dtype=dtype) for _ in range(2))
    log_f = draw_gates(p.gates, p.B, p.T, p.H)
    x: dict = {"q": q, "k": k, "v": v, "do": do, "log_f": log_f, "cu_seqlens": None}
    if p.document:
        x["cu_seqlens"] = torch.arange(0, p.T + 1, p.document, device="cuda", dtype=torch.int32)
    return x


def ours(x, **options):
    import fox_kernels

    inputs = [x[n].requires_grad_() for n in ("q", "k", "v", "log_f")]
    options["cu_seqlens"] = x["cu_seqlens"]
    return inputs, x["do"], lambda: fox_kernels.forgetting_attention(*inputs, **options)


def fla(x):
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    inputs = [x[n].requires_grad_() for n in ("q", "k", "v", "log_f")]
    return inputs, x["do"], lambda: parallel_forgetting_attn(*inputs, cu_seqlens=x["cu_seqlens"])


def heads_first(x, repeat=False):
    q, k, v, do = (x[n].detach().transpose(1, 2) for n in ("q", "k", "v", "do"))
    if repeat:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return [t.contiguous().requires_grad_() for t in (q, k, v)], do.contiguous()


def official(x, module, threshold=None):
    if x["cu_seqlens"] is not None or x["q"].shape[-1] not in (16, 32, 64, 128):
        raise NotImplementedError("it has neither packed documents nor this head dim")
    inputs, do = heads_first(x, repeat=True)
    inputs.append(x["log_f"].detach().transpose(1, 2).contiguous().requires_grad_())
    return inputs, do, lambda: module.forgetting_attention(*inputs, head_first=True, adaptive_threshold=threshold)


def sdpa(x, backend):
    if x["cu_seqlens"] is not None:
        raise NotImplementedError("SDPA has no packed documents")
    inputs, do = heads_first(x)
    grouped = inputs[0].shape[1] != inputs[1].shape[1]

    def run():
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

    return inputs, do, run


def flex(x):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if x["cu_seqlens"] is not None:
        raise NotImplementedError("measured without packed documents")
    inputs, do = heads_first(x)
    c = x["log_f"].detach().transpose(1, 2).cumsum(-1).contiguous().requires_grad_()
    T = inputs[0].shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = inputs[0].shape[1] != inputs[1].shape[1]

    def run():
        return compiled(
            *inputs, score_mod=lambda s, b, h, i, j: s - c[b, h, j], block_mask=mask, enable_gqa=grouped
        )  # c_i cancels in the softmax

    return [*inputs, c], do, run


def contenders(path: str | None) -> dict[str, Callable]:
    """Return name -> how to set it up on a problem's tensors, the ones of most interest first."""
    table: dict[str, Callable] = {
        "ours": ours,
        "cuDNN, no gate": lambda x: sdpa(x, torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
        "ours, pruned": lambda x: ours(x, prune=-10.0),
    }
    if path:
        spec = importlib.util.spec_from_file_location("official_forgetting_attention", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--official {path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        table["official"] = lambda x: official(x, module)
        table["official, pruned"] = lambda x: official(x, module, "auto")
    if importlib.util.find_spec("fla"):
        table["fla"] = fla
    table["FlashAttention-2, no gate"] = lambda x: sdpa(x, torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    table["ours, plain Triton"] = lambda x: ours(x, backend="triton")
    return table


def median_ms(run, rep=50) -> float:
    from triton.testing import do_bench

    median: Any = do_bench(run, warmup=15, rep=rep, return_mode="median")
    return float(median)


def measure(setup: Callable, p: Problem) -> dict:
    """Return forward, backward and total milliseconds and rates, and peak memory beyond inputs and gradients of o."""
    inputs, do, run = setup(tensors(p))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = run()
    torch.autograd.grad(o, inputs, do, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    forward = median_ms(run)
    backward = median_ms(lambda: torch.autograd.grad(o, inputs, do, retain_graph=True))
    return {
        "forward_ms": forward, "backward_ms": backward, "total_ms": forward + backward,
        "forward_tflops": p.flops / forward / 1e9, "backward_tflops": 2.5 * p.flops / backward / 1e9,
        "peak_mb": peak / 1e6,
    }  # fmt: skip


def errors(table: dict[str, Callable], p: Problem) -> dict[str, dict]:
    """Return contender -> relative error of o, dq, dk, dv, dlog_f against float64, where gates are computed."""
    from fox_kernels import reference

    heads = min(p.Hkv, 4)
    small = p._replace(B=1, T=2048, H=heads * (p.H // p.Hkv), Hkv=heads, document=p.document and 512)
    x = tensors(small)
    exact = [x[n].detach().double().requires_grad_() for n in ("q", "k", "v", "log_f")]
    o = reference.forgetting_attention(*exact, cu_seqlens=x["cu_seqlens"])
    assert isinstance(o, torch.Tensor)
    truth = [o.detach(), *torch.autograd.grad(o, exact, x["do"].double())]
    found = {}
    for name, setup in table.items():
        if "no gate" in name:
            continue
        try:
            inputs, do, run = setup({n: t.detach().clone() if t is not None else None for n, t in x.items()})
        except NotImplementedError:
            continue
        result = run()
        values = [result, *torch.autograd.grad(result, inputs, do)]
        row = {}
        for label, value, true in zip(("o", "dq", "dk", "dv", "dlog_f"), values, truth, strict=True):
            value = value.double()
            if value.shape != true.shape:
                value = value.transpose(1, 2)
            if value.shape != true.shape:  # kv heads repeated: their gradients add up
                value = value.unflatten(2, (true.shape[2], -1)).sum(3)
            row[label] = ((value - true).norm() / true.norm()).item() if true.norm() > 0 else value.norm().item()
        found[name] = row
    return found


def decode_rows(copy_gb_s: float) -> list[dict]:
    """Measure one new token per sequence against caches of 4k to 128k: bytes of the live cache over time."""
    from fox_kernels import cumsum, decode

    rows = []
    for batch, cache in DECODE:
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, cache, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = cumsum.cumulative(draw_gates("open", batch, cache, 32) - 1e-5)
        ms = median_ms(lambda q=q, k=k, v=v, c=c: decode.launch_decode(q, k, v, *c, scale=128**-0.5), rep=30)
        gb_s = (2 * k.numel() * 2 + 2 * c[0].numel() * 4) / ms / 1e6
        rows.append({"batch": batch, "cache": cache, "ms": ms, "gb_s": gb_s, "of_copy": gb_s / copy_gb_s})
    return rows


def machine() -> dict:
    """Return the GPU, its clocks as read now, and the versions that matter."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split("\n")[0].split(", ")
    versions = {}
    for name in ("torch", "triton", "fla-core"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["cudnn"] = torch.backends.cudnn.version()
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"when": when, "versions": versions, **dict(zip(fields.split(","), values, strict=True))}


def ceilings() -> dict:
    """Return the rate of a bf16 matrix product of 8192 and of a device copy: what the chip gives in this run."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / median_ms(lambda: target.copy_(source)) / 1e6
    return {"matmul_tflops": matmul, "copy_gb_s": copy}


def print_row(problem: str, name: str, row: dict) -> None:
    print(
        f"{problem:36} {name:26} {row['forward_tflops']:6.0f} {row['backward_tflops']:6.0f} "
        f"{row['total_ms']:8.3f} ms {row['peak_mb']:7.0f} MB",
        flush=True,
    )


def attempt(table: dict[str, Callable], p: Problem, name: str, result: dict, until: float) -> None:
    """Measure a contender on a problem; what it can't do, or what the time doesn't allow, is recorded as skipped."""
    if time.monotonic() > until:
        result["skipped"].append([p.name, name, "the time given was up"])
        return
    try:
        row = measure(table[name], p)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        result["skipped"].append([p.name, name, str(error).split("\n")[0][:200]])
        torch.cuda.empty_cache()
        return
    result["rows"].append({"problem": p.name, "contender": name, **row})
    print_row(p.name, name, row)


def run(arguments) -> dict:
    started = time.monotonic()
    torch.manual_seed(0)
    table = contenders(arguments.official)
    result = {"machine": machine(), **ceilings(), "rows": [], "errors": [], "decode": [], "skipped": []}
    print(json.dumps(result["machine"]), flush=True)
    print(f"matmul {result['matmul_tflops']:.0f} TFLOP/s, copy {result['copy_gb_s']:.0f} GB/s")
    print(f"{'B,T,H,Hkv,D gates':36} {'':26} {'fwd':>6} {'bwd':>6} (TFLOP/s)", flush=True)
    plan = [(p, name) for p in TABLE for name in table]
    more = [(p, name) for p in FURTHER for name in table if name in ("ours", "ours, pruned", "cuDNN, no gate")]
    if arguments.flex:
        table["FlexAttention"] = flex
        more += [(p, "FlexAttention") for p in TABLE if p.T == 8192]
    for p, name in plan:
        attempt(table, p, name, result, started + arguments.seconds)
    if not arguments.only_speed:
        for D in (64, 128):
            p = next(q for q in TABLE if q.D == D)
            for name, row in errors({n: s for n, s in table.items() if "pruned" not in n}, p).items():
                result["errors"].append({"D": D, "contender": name, **row})
        result["decode"] = decode_rows(result["copy_gb_s"])
    for p, name in more:
        attempt(table, p, name, result, started + arguments.seconds)
    result["machine_after"] = machine()
    return result


def ratios(result: dict) -> list[tuple[str, dict[str, float]]]:
    """Return per shape of the table our total time over each peer's."""
    found = []
    for p in TABLE:
        total = {r["contender"]: r["total_ms"] for r in result["rows"] if r["problem"] == p.name}
        mine = total.get("ours", math.nan)
        row = {n: mine / t for n, t in total.items() if n not in ("ours", "ours, pruned", "official, pruned")}
        if "official, pruned" in total and "ours, pruned" in total:
            row["pruned, both"] = total["ours, pruned"] / total["official, pruned"]
        found.append((p.name, row))
    return found


def report(result: dict) -> None:
    print("\nour time (forward + backward) over theirs")
    for problem, row in ratios(result):
        print(f"{problem:30}", "  ".join(f"{n} {v:.2f}" for n, v in row.items()))
    for row in result["decode"]:
        rate = f"{row['ms']:.3f} ms {row['gb_s']:.0f} GB/s, {row['of_copy']:.0%} of a copy"
        print(f"decode {row['batch']} x {row['cache']}: {rate}")
    for row in result["errors"]:
        print("error", json.dumps({k: v if isinstance(v, (str, int)) else float(f"{v:.2e}") for k, v in row.items()}))
    for skipped in result["skipped"]:
        print("skipped", *skipped, sep=" | ")


def draw(result: dict, path: str) -> None:
    """Draw forward + backward TFLOP/s per shape and contender."""
    import matplotlib.pyplot as plt

    names = dict.fromkeys(r["contender"] for r in result["rows"] if r["problem"] == TABLE[0].name)
    names = [n for n in names if "pruned" not in n]
    shapes = [p for p in TABLE if any(r["problem"] == p.name for r in result["rows"])]
    colours = {"ours": "#c2410c", "ours, plain Triton": "#fdba74", "cuDNN, no gate": "#334155"}
    greys = iter(("#64748b", "#94a3b8", "#cbd5e1"))
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        times = {r["problem"]: r["total_ms"] for r in result["rows"] if r["contender"] == name}
        rates = [3.5 * p.flops / times[p.name] / 1e9 if p.name in times else 0 for p in shapes]
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(shapes))]
        bars = axis.bar(places, rates, width, label=name, color=colours.get(name) or next(greys))
        axis.bar_label(bars, [f"{r:.0f}" if r else "" for r in rates], fontsize=6.5, rotation=90, padding=2)
    axis.set_xticks(range(len(shapes)), [f"{p.B}x{p.T}\nheads {p.H}/{p.Hkv}, D {p.D}" for p in shapes], fontsize=8)
    axis.set_ylabel("TFLOP/s, forward + backward")
    axis.set_title(f"Forgetting Attention on {result['machine']['name']}, bf16, causal", fontsize=10)
    axis.margins(y=0.16)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=3, frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--official", help="path of the official kernel's forgetting_attention.py")
    parser.add_argument("--out", help="write the results here, as JSON")
    parser.add_argument("--chart", help="draw the chart into this PNG")
    parser.add_argument("--draw", help="draw from this JSON instead of measuring")
    parser.add_argument("--flex", action="store_true", help="measure FlexAttention too (it compiles for a while)")
    parser.add_argument("--only-speed", action="store_true", help="no decoding and no errors")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no measurement after this time")
    arguments = parser.parse_args(argv)
    if arguments.draw:
        result = json.loads(Path(arguments.draw).read_text())
    elif torch.cuda.is_available():
        result = run(arguments)
        report(result)
    else:
        print("no CUDA device: nothing to measure (--draw draws a chart from saved results)", file=sys.stderr)
        return 2
    if arguments.out:
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.chart:
        draw(result, arguments.chart)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
