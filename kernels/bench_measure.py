"""Time and error of contenders on one problem, and what the machine is."""

import datetime
import importlib.metadata
import random
import statistics
import subprocess
from collections.abc import Callable

import torch
from bench_contenders import decoding, tensors
from bench_problems import OUTPUTS, Decode, Problem

ROUNDS = 8  # over all contenders of a problem, in a new order each: clocks and the power limit meet all alike
FLOPS = {"forward": 1.0, "backward": 2.5, "total": 3.5}  # in units of the forward's


def failures() -> tuple[type[Exception], ...]:
    """What a contender raises where it can't run a problem."""
    from triton.errors import TritonError

    return (NotImplementedError, RuntimeError, ValueError, AssertionError, TritonError)


class Clock:
    """CUDA events around a call, launches included; calls queue up, each after a write that flushes the L2."""

    def __init__(self, budget_ms: float = 30.0):
        self.budget_ms = budget_ms
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def sample(self, run: Callable, repeats: int, flushes: int = 1) -> list[float]:
        """Return the milliseconds of each of `repeats` calls; many flushes keep the GPU busy until all is launched."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        self.flush.zero_()  # the first call is launched behind two
        for start, end in events:
            for _ in range(flushes):
                self.flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def repeats(self, run: Callable) -> int:
        """Warm up, and return how many calls fit the budget of milliseconds: 2 to 30."""
        self.sample(run, 1)
        return max(2, min(30, int(self.budget_ms / statistics.median(self.sample(run, 3)))))

    def median(self, run: Callable) -> float:
        return statistics.median(self.sample(run, self.repeats(run)))


def set_up(name: str, setup: Callable, x: dict) -> dict:
    """Run a contender once, forward and backward, and return its calls to be timed."""
    inputs, do, run = setup(x)

    def step():
        torch.autograd.grad(run(), inputs, do)

    step()
    o = run()
    calls = {
        "forward": run,
        "backward": lambda: torch.autograd.grad(o, inputs, do, retain_graph=True),
        "total": step,
    }
    return {"name": name, "calls": calls}


def take_turns(ready: list[dict], clock: Clock) -> None:
    """Time the calls of all contenders, a few each in turn, round after round."""
    for turn in range(ROUNDS):
        order = random.Random(turn).sample(ready, len(ready))
        for n in FLOPS:
            for entry in order:
                entry["samples"][n] += clock.sample(entry["calls"][n], entry["repeats"][n])


def measure(table: dict[str, Callable], p: Problem, clock: Clock) -> tuple[list[dict], list[tuple[str, str]]]:
    """Return rows of contenders on a problem, in ms and TFLOP/s, and (contender, why) of those that can't run it."""
    x = tensors(p)
    ready, skipped = [], []
    for name, setup in table.items():
        try:
            entry = set_up(name, setup, x)
            entry["repeats"] = {n: clock.repeats(call) for n, call in entry["calls"].items()}
            entry["samples"] = {n: [] for n in entry["calls"]}
            ready.append(entry)
        except failures() as error:
            skipped.append((name, reason(error)))
    take_turns(ready, clock)
    rows = []
    for entry in ready:
        ms = {n: statistics.median(samples) for n, samples in entry["samples"].items()}
        rates = {f"{n}_tflops": FLOPS[n] * p.forward_flops / ms[n] / 1e9 for n in FLOPS}
        times = {f"{n}_ms": ms[n] for n in ms}
        rows.append({"contender": entry["name"], **times, **rates})
    return rows, skipped


def reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


def errors(table: dict[str, Callable], p: Problem) -> tuple[list[dict], list[tuple[str, str]]]:
    """Return per contender the relative RMS error of o, dq, dk, dv, dlog_f against float64 on the same inputs."""
    from fox_kernels import reference

    x = tensors(p)
    exact = [x[n].detach().double().requires_grad_() for n in ("q", "k", "v", "log_f")]
    o = reference.forgetting_attention(*exact, cu_seqlens=x["cu_seqlens"])
    assert isinstance(o, torch.Tensor)
    truth = [o.detach(), *torch.autograd.grad(o, exact, x["do"].double())]
    rows, skipped = [], []
    for name, setup in table.items():
        try:
            inputs, do, run = setup(x)
            result = run()
            values = [result.detach(), *torch.autograd.grad(result, inputs, do)]
        except failures() as error:
            skipped.append((name, reason(error)))
            continue
        pairs = zip(OUTPUTS, values, truth, strict=True)
        rows.append({"contender": name, **{n: relative_error(value, true) for n, value, true in pairs}})
    return rows, skipped


def relative_error(value: torch.Tensor, true: torch.Tensor) -> float:
    """|value - true| / |true|; value may have heads before tokens, and kv heads repeated, whose gradients add up."""
    value = value.double()
    if value.shape != true.shape:
        value = value.transpose(1, 2)
    if value.shape != true.shape:
        value = value.unflatten(2, (true.shape[2], -1)).sum(3)
    return ((value - true).norm() / true.norm()).item()


def decode(p: Decode, clock: Clock, copy_gb_s: float) -> tuple[list[dict], list[tuple[str, str]]]:
    """Return a decoding step's time and its rate over the live cache, launched and replayed from a CUDA graph."""
    try:
        step, live_bytes, live = decoding(p)
        repeats = clock.repeats(step)
    except failures() as error:
        return [], [("ours", reason(error))]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    samples: dict[str, list[float]] = {"": [], "graph_": []}
    for _ in range(ROUNDS):
        samples[""] += clock.sample(step, repeats)
        samples["graph_"] += clock.sample(graph.replay, repeats)
    row = {"contender": "ours", "live": live, "live_mb": live_bytes / 1e6}
    for how, times in samples.items():
        ms = statistics.median(times)
        row |= {f"{how}ms": ms, f"{how}of_copy": live_bytes / ms / 1e6 / copy_gb_s}
    return [{**row, "gb_s": live_bytes / row["ms"] / 1e6}], []


def machine() -> dict:
    """Return the GPU, its clocks as read now, and the versions that matter."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    query = ["nvidia-smi", f"--query-gpu=uuid,{fields}", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split("\n")
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    values = next((line for line in lines if uuid in line), lines[0]).split(", ")[1:]
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    versions = {name: installed.get(name) for name in ("torch", "triton", "fla-core")}
    versions |= {"cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"when": when, "versions": versions, **dict(zip(fields.split(","), values, strict=True))}


def copy_rate(clock: Clock) -> float:
    """Return the GB/s of a device copy: what the memory gives in this run."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / clock.median(lambda: target.copy_(source)) / 1e6
