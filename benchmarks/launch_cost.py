"""What a call of fox_kernels costs the host, in microseconds: the best of many repetitions.

    python benchmarks/launch_cost.py --label before     # at one commit
    python benchmarks/launch_cost.py --label after      # at another: the table shows both
    python benchmarks/launch_cost.py --without decoder_for --label "no decoder_for" --out cached.json

On a GPU the kernels run; the clock stops when the last call has returned, not when the GPU is done. Elsewhere nothing
runs: compiling and the launch in C are replaced by a function that does nothing, so that what is timed is the Python
of this package and torch's allocations. Needs Triton 3.6, whose launches are known. Results are added to
benchmarks/launch_cost.json under the label.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from fox_kernels import api, autograd, decode_attention, forgetting_attention
from fox_kernels.common import cumsum, pruning
from fox_kernels.decoding import planner
from fox_kernels.hopper import backward, forward
from fox_kernels.host import kinds, launch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction

OUT = Path(__file__).with_suffix(".json")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CACHES = ("_decoders", "decoder_for", "Decoder.compiled", "hopper.forward._plans", "hopper.backward._plans")


class Compiled(SimpleNamespace):
    """Stands in for a compiled kernel; Triton's own way to run it does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments: None


def compiled(descriptors: int) -> Compiled:
    """Return a kernel whose first arguments are so many tensors copied by TMA, and whose launch in C does nothing."""
    launcher = object.__new__(driver.CudaLauncher)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 12, "block_size": [1, 64, 1, 64], "fp4_padded": False}
    signature = dict.fromkeys(range(descriptors), "tensordesc<bf16[1, 64]>") | {99: "*fp32"}
    launcher.launch = driver.wrap_handle_tensordesc(lambda *arguments: None, signature, [meta] * descriptors)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.launch_pdl = launcher.launch_cooperative_grid = 0
    metadata = SimpleNamespace(tensordesc_meta=[meta] * descriptors)
    return Compiled(run=launcher, function=77, packed_metadata=(4, 1, 0), metadata=metadata)


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Everything up to the launch in C runs on a CPU as it does on a Hopper GPU."""

    known = {n: compiled(n) for n in range(16)}  # by tensors copied by TMA: as if compiled long ago

    def compile_and_run(self, grid):
        return lambda *arguments, **options: known[sum(isinstance(x, forward.Blocks) for x in arguments)]

    utils = SimpleNamespace(fill_tma_descriptor=lambda address, *how: 0)
    replaced = [
        (JITFunction, "__getitem__", compile_and_run),
        (forward.Blocks, "descriptor", lambda self: self),
        (triton.runtime.driver, "_active", SimpleNamespace(utils=utils)),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 5),
        (forward, "unsupported", lambda *tensors, **options: None),
        (backward, "unsupported", lambda *tensors, **options: None),
        (kinds, "on_current_gpu", lambda device: True),
        (api, "check_gates", lambda log_f: None),
        (api, "triton_unsupported", lambda q: None),
        (api, "gluon_unsupported", lambda *tensors, **options: None),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(where, name, stand_in, create=True))
        yield


class Forgetful(dict):
    """A cache that keeps nothing."""

    def __setitem__(self, key, value):
        pass


@contextlib.contextmanager
def without(cache: str | None) -> Iterator[None]:
    """One of the host's caches keeps nothing."""
    decoder = planner.Decoder.__init__

    def forgetful_decoder(self, *arguments, **options):
        decoder(self, *arguments, **options)
        self.compiled = Forgetful()

    caches = {
        "_decoders": (api, "_decoders", Forgetful()),
        "decoder_for": (planner, "decoder_for", planner.Decoder),
        "Decoder.compiled": (planner.Decoder, "__init__", forgetful_decoder),
        "hopper.forward._plans": (forward, "_plans", Forgetful()),
        "hopper.backward._plans": (backward, "_plans", Forgetful()),
    }
    if cache is None:
        yield
        return
    with mock.patch.object(*caches[cache]):
        yield


class Watch(TorchDispatchMode):
    """Makes the package call its torch operators, as torch.compile does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def problem(T: int, dtype=torch.bfloat16) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return q, k, v, log_f of 2 x T tokens, 4 heads on 2, D = 64, which want gradients, and the gradient of o."""
    q, k, v, do = (torch.randn(2, T, heads, 64, device=DEVICE).to(dtype) for heads in (4, 2, 2, 4))
    log_f = torch.nn.functional.logsigmoid(torch.randn(2, T, 4, device=DEVICE))
    return [x.requires_grad_() for x in (q, k, v, log_f)], do


def attention(backend: str, backwards: bool, new_lengths: bool = False, **options) -> Callable[[], object]:
    """Return a call of forgetting_attention; new_lengths: no two of the same length, so none is run from a tape."""
    problems = [problem(192 + 8 * n) for n in range(64 if new_lengths else 1)]
    turn = itertools.cycle(problems)

    def call():
        inputs, do = next(turn)
        if new_lengths:
            api.calls.clear()
        if not backwards:
            with torch.no_grad():
                return forgetting_attention(*inputs, backend=backend, **options)
        out = forgetting_attention(*inputs, backend=backend, **options)
        if isinstance(out, tuple):
            return torch.autograd.grad(out, inputs, (do, do[..., 0].float()))
        return torch.autograd.grad(out, inputs, do)

    return call


def decoding(operator: bool = False, **options) -> Callable[[], object]:
    """Return a call of decode_attention on a cache that is one token longer each time."""
    room, start = 4096, 1000
    q = torch.randn(2, 1, 4, 64, device=DEVICE).bfloat16()
    k, v = (torch.randn(2, room, 2, 64, device=DEVICE).bfloat16() for _ in range(2))
    c_hi, c_lo = torch.zeros(2, 2, 4, room, device=DEVICE).unbind()
    lengths = itertools.cycle(range(start, room))
    if "prune" in options:
        options["k_bound"] = torch.ones(2, 2, device=DEVICE)

    def call():
        S = next(lengths)
        with torch.no_grad(), Watch() if operator else contextlib.nullcontext():
            return decode_attention(q, k[:, :S], v[:, :S], c_hi[..., :S], c_lo[..., :S], **options)

    return call


def one_query() -> Callable[[], object]:
    """Return a call of forgetting_attention with one query, the keys one more each time: c is summed anew."""
    (q, k, v, log_f), _ = problem(4096)
    lengths = itertools.cycle(range(1000, 4096))

    def call():
        S = next(lengths)
        with torch.no_grad():
            return forgetting_attention(q[:, :1], k[:, :S], v[:, :S], log_f[:, :S], backend="triton")

    return call


def operator(backend: str) -> Callable[[], object]:
    call = attention(backend, False)

    def watched():
        with Watch():
            return call()

    return watched


def sums() -> Callable[[], object]:
    (*_, log_f), _ = problem(192)
    return lambda: cumsum.cumulative(log_f.detach())


def cases(backends: list[str]) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by name."""
    found = {"one kernel (cumsum)": sums()}
    for backend in backends:
        found |= {
            f"{backend}, forward": attention(backend, False),
            f"{backend}, forward and backward": attention(backend, True),
            f"{backend}, forward and backward, pruned": attention(backend, True, prune=-10.0),
            f"{backend}, forward and backward, lse too (no tape)": attention(backend, True, return_lse=True),
            f"{backend}, forward and backward, first of their kind": attention(backend, True, new_lengths=True),
            f"{backend}, forward as torch operator": operator(backend),
        }
    return found | {
        "decode_attention, a growing cache": decoding(),
        "decode_attention, a growing cache, pruned": decoding(prune=-10.0),
        "decode_attention as torch operator": decoding(operator=True),
        "one query, gates not summed, growing": one_query(),
    }


def microseconds(call: Callable[[], object], repeats: int, calls: int = 5) -> float:
    """Return the least time per call over the repetitions; the GPU's queue is emptied between them."""
    for _ in range(70):  # compiles, and records tapes
        call()
    best, clock = float("inf"), time.perf_counter if GPU else time.process_time  # other processes don't count
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        if GPU:
            torch.cuda.synchronize()
        start = clock()
        for _ in range(calls):
            call()
        best = min(best, (clock() - start) / calls)
    gc.enable()
    return round(1e6 * best, 1)


def measure(repeats: int, cache: str | None) -> dict[str, float]:
    pruning.WORTH = 0  # problems of this size are pruned too
    hopper = not GPU or torch.cuda.get_device_capability() == (9, 0)
    with contextlib.nullcontext() if GPU else without_a_gpu(), without(cache):
        named = cases(["gluon", "triton"] if hopper else ["triton"])
        return {name: microseconds(call, repeats) for name, call in named.items()}


def table(runs: dict[str, dict]) -> str:
    """Return the runs as a Markdown table, a column for each label."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run["us"]))
    lines = ["| us per call | " + " | ".join(runs) + " |", "|---|" + "---|" * len(runs)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(str(run["us"].get(name, "")) for run in runs.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="the column of the table that this run fills")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--without", choices=CACHES, help="let this cache of the host keep nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if not launch.PROVEN:
        parser.error(f"needs Triton 3.6, got {triton.__version__}")
    assert autograd.calls is api.calls  # the tapes that new_lengths forgets
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=OUT.parent, check=False
    ).stdout.strip()
    machine = torch.cuda.get_device_name() if GPU else f"no GPU: launches replaced; {platform.processor()}"
    runs = json.loads(given.out.read_text()) if given.out.exists() else {}
    runs[given.label] = {
        "commit": commit, "machine": machine, "cpus": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "triton": triton.__version__, "us": measure(given.repeats, given.without),
    }  # fmt: skip
    given.out.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
