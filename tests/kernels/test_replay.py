"""Calls run again from a tape: the same launches with other addresses, and no tape of what can't be repeated."""

# pyright: reportAttributeAccessIssue=false

import contextlib
import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import fox_kernels
from fox_kernels import api, autograd, calls
from fox_kernels.hopper import backward as hopper_backward
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.host import kinds, launch, replay

N = 96
proven = pytest.mark.skipif(not launch.PROVEN, reason="the short way is taken with Triton 3.6 only")


def floats(address: int, n: int = N) -> np.ndarray:
    """The memory at an address, which kernels are given."""
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))


class Kernel:
    """A kernel in Python that takes addresses as one in C does; copied is a first argument by descriptor."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *arguments, copied=None):
        def go(stream, *addresses):
            assert stream == 5
            self.run(*addresses)

        flat, described = [0, *arguments], []
        if copied is not None:
            flat.insert(1, None)
            described = [(1, copied, (lambda address, more: address + more, (0,)))]
        self.launched = replay.Launched(go, flat, 0, described)
        replay.note(self, (1,), (), arguments)
        given = arguments if copied is None else (copied, *arguments)
        self.run(*launch.pointers(given))

    def written_out(self, grid, copied, arguments):
        return self.launched


def add(a, b, out, factor):
    floats(out)[:] = floats(a) + factor * floats(b)


def both(a, twice, more):
    floats(twice)[:], floats(more, N // 2)[:] = 2 * floats(a), floats(a, N // 2) + 1


def compute(a, b):
    """2 (a + 3 b), nothing, the first half of a + 3 b + 1, and 2 (a + 3 b) + a: by way of scratch memory."""
    scratch, o, more = torch.empty(2, N).unbind()[1], torch.empty(N), torch.empty(N // 2)
    total = torch.empty_like(o)
    Kernel(add)(a, b, scratch, 3)
    Kernel(both)(o, more, copied=scratch)
    Kernel(add)(o, a, total, 1)
    return o, None, more, total


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)


def taped(function, *inputs, apart=1) -> Any:
    with replay.Tape() as tape:
        results = function(*inputs)
    return replay.recorded(tape, inputs, results, apart)


def test_a_tape_repeats_the_launches_for_other_tensors(stream):
    first = torch.randn(2, N)
    again = taped(compute, *first.unbind())
    for _ in range(2):
        a, b = torch.randn(N), torch.randn(3, N)[1]
        o, kept = again(a, b)
        wanted = a + 3 * b
        none, more, total = again.parts(kept)
        assert none is None
        for got, expected in ((o, 2 * wanted), (more, wanted[: N // 2] + 1), (total, 2 * wanted + a)):
            torch.testing.assert_close(got, expected)
    alone = taped(compute, *first.unbind(), apart=4)
    assert [x.shape for x in alone(a, b)] == [(N,), (N // 2,), (N,)]


def test_parts_of_a_given_tensor_are_found_again(stream):
    def halves(whole):
        o = torch.empty(N)
        Kernel(add)(whole[:N], whole[N:], o, 1)
        return (o,)

    again = taped(halves, torch.randn(2 * N))
    x = torch.randn(2 * N)
    torch.testing.assert_close(again(x)[0], x[:N] + x[N:])


@pytest.mark.parametrize("what", ["operator", "foreign", "unknown", "view", "input", "twice"])
def test_what_cannot_be_repeated_has_no_tape(what):
    elsewhere = torch.randn(N)

    def call(a, b):
        o = torch.empty(2, N)[0] if what == "view" else torch.empty(N)
        second = elsewhere if what == "foreign" else b + 0 if what == "operator" else b
        Kernel(add)(a, second, o, 1)
        if what == "unknown":
            replay.note(None, (1,), (), None)
        return (a if what == "input" else o, o if what == "twice" else None)

    inputs = torch.randn(N), torch.randn(N)
    assert taped(call, *inputs) is None


def test_a_tape_sees_its_own_thread_only(stream):
    x, o = torch.randn(N), torch.empty(N)

    def elsewhere():
        Kernel(add)(x, x, o, 1)

    with replay.Tape() as tape:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert tape.launches == []
    Kernel(add)(x, x, o, 1)
    assert tape.launches == []


@pytest.fixture
def driven(monkeypatch):
    """The Hopper path on a CPU: nothing runs, and every launch in C leaves its arguments here."""
    from triton.backends.nvidia import driver
    from triton.runtime.jit import JITFunction

    launches = []

    class Compiled(SimpleNamespace):
        def __getitem__(self, grid):  # Triton's own way
            return lambda *arguments: None

    def compiled(descriptors):
        launcher = object.__new__(driver.CudaLauncher)
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 12, "block_size": [1, 64, 1, 64], "fp4_padded": False}
        signature = dict.fromkeys(range(descriptors), "tensordesc<bf16[1, 64]>") | {99: "*fp32"}
        launcher.launch = driver.wrap_handle_tensordesc(
            lambda *arguments: launches.append(arguments), signature, [meta] * descriptors
        )
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.launch_pdl = launcher.launch_cooperative_grid = 0
        metadata = SimpleNamespace(tensordesc_meta=[meta] * descriptors)
        return Compiled(run=launcher, function=77, packed_metadata=(4, 1, 0), metadata=metadata)

    def launched(self, grid):
        return lambda *arguments, **options: compiled(sum(isinstance(x, hopper_forward.Blocks) for x in arguments))

    monkeypatch.setattr(JITFunction, "__getitem__", launched)
    monkeypatch.setattr(hopper_forward.Blocks, "descriptor", lambda self: self)
    utils = SimpleNamespace(fill_tma_descriptor=lambda address, *how: ("descriptor", address, how))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "unsupported", lambda *tensors, **options: None)
        monkeypatch.setattr(module, "processors", lambda device: 132)
        monkeypatch.setattr(module, "_plans", {})
    known = {}
    for module in (replay, api, autograd, calls):
        monkeypatch.setattr(module, "calls", known)
    monkeypatch.setattr(launch, "_runners", {})
    monkeypatch.setattr(kinds, "on_current_gpu", lambda device: True)
    monkeypatch.setattr(api, "check_gates", lambda log_f: None)
    return launches, known


def problem(B: int = 2) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs that want gradients, and the gradient of o."""
    q, k, v, do = (torch.randn(B, 192, heads, 64).bfloat16() for heads in (4, 2, 2, 4))
    log_f = torch.nn.functional.logsigmoid(torch.randn(B, 192, 4))
    return [x.requires_grad_() for x in (q, k, v, log_f)], do


def split(arguments):
    """The addresses among a launch's arguments, and the rest: no other number here is as large."""
    addresses, rest = [], []
    for x in arguments:
        if isinstance(x, tuple) and x[:1] == ("descriptor",):
            addresses.append(x[1])
            rest.append(x[2])
        elif isinstance(x, int) and x > 1 << 22:
            addresses.append(x)
        else:
            rest.append(x)
    return addresses, rest


@proven
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink": 3, "scale": 0.3},
        {"prune": -5.0},
        {"window": 50},
        {"seq_start": [3, 100]},
        {"cu_seqlens": [0, 7, 192]},
    ],
    ids=str,
)
@pytest.mark.parametrize(("backend", "kernels"), [("gluon", (2, 4)), ("triton", (3, 4))])
def test_a_replayed_step_hands_the_driver_what_the_first_did(driven, monkeypatch, backend, kernels, options):
    launches, known = driven
    monkeypatch.setattr(api, "choose", lambda *tensors, **options: (backend, "a test"))
    B = 1 if "cu_seqlens" in options else 2
    started = not options.keys().isdisjoint({"cu_seqlens", "seq_start", *(["window"] if backend == "gluon" else [])})
    options = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for name, x in options.items()}
    inputs, do = problem(B)
    q = inputs[0]
    alive, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: alive.append(empty(*size, **how)) or alive[-1])

    def step():
        launches.clear()
        o = fox_kernels.forgetting_attention(*inputs, **options)
        first = len(launches)
        gradients = torch.autograd.grad(o, inputs, do)
        return o, gradients, [split(x) for x in launches[:first]], [split(x) for x in launches[first:]]

    step()  # compiles
    known.clear()
    _, _, *usual = step()
    step()  # the forward is replayed, the backward taped
    o, gradients, *again = step()
    (call,) = known.values()
    assert list(call.backwards.values()) != [None]
    assert (o.shape, o.dtype, o.is_contiguous()) == (q.shape, q.dtype, True)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]
    more = 2 if "prune" in options else 0
    whole = options.keys().isdisjoint({"cu_seqlens", "seq_start", "window"})  # what its first weights lose is found
    more_backward = whole + (backend == "gluon" and "prune" in options)
    assert [len(x) for x in again] == [kernels[0] + more + started, kernels[1] + more_backward]
    fixed = {x.data_ptr() for x in (*inputs, do, *(x for x in options.values() if isinstance(x, torch.Tensor)))}
    for before, after in zip(usual, again, strict=True):
        assert [rest for _, rest in before] == [rest for _, rest in after]
        moved = {}
        for old, new in zip(before, after, strict=True):
            for x, y in zip(old[0], new[0], strict=True):
                assert moved.setdefault(x, y) == y
                assert x not in fixed or x == y
                assert (x - y) % 16 == 0
        assert len(set(moved.values())) == len(moved)
    after = {x for addresses, _ in again[1] for x in addresses}
    assert after.issuperset(x.data_ptr() for x in (*inputs[:3], o, *gradients))


@proven
def test_checkpoints_compare_what_a_first_call_saves_with_what_later_ones_do(driven, monkeypatch):
    _, known = driven
    monkeypatch.setattr(api, "choose", lambda *tensors, **options: ("gluon", "a test"))
    inputs, do = problem()
    hooks = launch.knobs.runtime.launch_enter_hook
    for watching in (False, True):
        o = checkpoint(fox_kernels.forgetting_attention, *inputs, use_reentrant=False)
        if watching:
            monkeypatch.setattr(hooks, "calls", [print])
        torch.autograd.grad(o, inputs, do)
    assert len(known) == 1
    known.clear()
    torch.autograd.grad(fox_kernels.forgetting_attention(*inputs), inputs, do)
    assert known == {}  # nothing is recorded while somebody watches


@proven
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"prune": -5.0}], ids=str)
def test_what_hooks_turn_and_move_is_put_in_order(driven, monkeypatch, options):
    launches, known = driven
    monkeypatch.setattr(api, "choose", lambda *tensors, **options: ("gluon", "a test"))
    inputs, do = problem()
    given = {x.data_ptr() for x in inputs}

    def turned(x):
        if x.data_ptr() in given:
            return x
        room = torch.empty(2 * x.numel() + 3, dtype=x.dtype)[3:]
        return room.as_strided(x.shape, [2 * n for n in x.stride()]).copy_(x)

    def step(hooks):
        with hooks:
            o = fox_kernels.forgetting_attention(*inputs, **options)
        launches.clear()
        torch.autograd.grad(o, inputs, do)
        return [split(x) for x in launches]

    step(contextlib.nullcontext())
    usual = step(contextlib.nullcontext())
    (call,) = known.values()
    backwards = dict(call.backwards)
    moved = step(torch.autograd.graph.saved_tensors_hooks(turned, lambda x: x))
    assert call.backwards == backwards  # such gradients have no tape
    assert [rest for _, rest in moved] == [rest for _, rest in usual]
    assert all(x % 16 == 0 for addresses, _ in moved for x in addresses)


def test_tapes_of_two_threads_leave_torch_as_it_was(stream):
    """Whether a dispatch mode is on torch notes in the process: modes that don't end in turn would leave it so."""
    inside, go_on = threading.Event(), threading.Event()
    found = []

    def elsewhere():
        def slowly(a, b):
            inside.set()
            go_on.wait()
            return compute(a, b)

        found.append(taped(slowly, *torch.randn(2, N).unbind()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait()
    assert not is_in_torch_dispatch_mode()
    with replay.Tape():
        go_on.set()
        thread.join()
    assert not is_in_torch_dispatch_mode()
    a, b = torch.randn(2, N).unbind()
    torch.testing.assert_close(found[0](a, b)[0], 2 * (a + 3 * b))


def test_a_tape_in_another_hides_its_launches_from_it(stream):
    def call(a, b):
        taped(compute, b, a)
        return compute(a, b)

    again = taped(call, *torch.randn(2, N).unbind())
    assert len(again.launches) == 3
    a, b = torch.randn(2, N).unbind()
    torch.testing.assert_close(again(a, b)[0], 2 * (a + 3 * b))


def test_work_without_results_is_taped_for_inputs_that_share_an_allocation(stream):
    tapes, ran = {}, []

    def work(whole, fixed, extra=0):
        a, b, out = whole.split(N)

        def body():
            ran.append(len(whole))
            scratch = torch.empty(N)
            Kernel(add)(a[: N // 2], b[: N // 2], scratch, extra)  # a view of what is not the allocation's start, too
            Kernel(add)(a, b, scratch, 3)
            Kernel(add)(scratch, fixed, out, 1)
            if extra:
                scratch += extra

        replay.taped(tapes, (extra,), (a, b, out, fixed), 3, body)
        return a + 3 * b + fixed, out

    fixed = torch.randn(N)
    for _ in range(3):
        wanted, out = work(torch.randn(3 * N), fixed)
        torch.testing.assert_close(out, wanted)
    assert ran == [3 * N]
    layers = torch.randn(9 * N)  # at other places in one allocation, as the layers of an engine's cache may lie
    for start in (0, 3 * N, 5 * N):
        wanted, out = work(layers[start : start + 3 * N], fixed)
        torch.testing.assert_close(out, wanted)
    assert ran == [3 * N]
    wanted, out = work(layers[1 : 1 + 3 * N], fixed)  # kernels are specialised on addresses that 16 divides
    torch.testing.assert_close(out, wanted)
    assert len(ran) == 2
    for _ in range(2):  # more than launches: done anew each time
        wanted, out = work(torch.randn(3 * N), fixed, extra=1)
        torch.testing.assert_close(out, wanted)
    assert len(ran) == 4
    assert [tape is not None for tape in tapes.values()] == [True, True, False]


def test_recording_does_not_import_torchs_compiler():
    program = "import sys, torch\nfrom fox_kernels.host import replay\nwith replay.Tape() as tape: torch.empty(3)\n"
    program += "assert tape.made and 'torch._dynamo' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
