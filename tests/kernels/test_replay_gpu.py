"""Later calls of a kind, run from a tape, give the bits of the first, on a GPU, whatever stands around them."""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import contextlib
import itertools

import pytest
import torch
from cases import Case, draw, poisoned
from fox_kernels import deterministic, forgetting_attention
from fox_kernels.host import launch, replay
from test_large_gpu import gluon
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not launch.PROVEN, reason="the short way is taken with Triton 3.6 only"),
]

BF16 = torch.bfloat16
CASES = [
    Case(T=600, D=64, dtype=BF16),
    Case(T=2048, H=4, Hkv=4, D=64, dtype=BF16),
    Case(T=515, H=6, Hkv=2, D=128, dtype=torch.float16),
    Case(T=300, S=900, H=4, Hkv=1, D=64, dtype=BF16, options={"sink": 3, "scale": 0.3}),
    Case(T=333, S=700, D=96, dtype=BF16, options={"sink": 100}),
    Case(T=700, D=128, dtype=BF16, gate="short", options={"prune": -10.0}),
    Case(T=700, D=64, dtype=BF16, gate="short", options={"prune": -10.0, "sink": 2, "softcap": 20.0}),
    Case(T=400, D=80, dtype=BF16),
    Case(T=300, D=256, dtype=BF16),
    Case(T=200, D=64, dtype=torch.float32),
    Case(T=500, D=64, dtype=BF16, layout="packed"),
    Case(T=500, D=64, dtype=BF16, layout="heads"),
    Case(T=500, S=801, D=64, dtype=BF16, options={"window": 70}),
    Case(B=1, T=600, H=4, Hkv=2, D=128, dtype=BF16, cuts=[1, 2, 300]),
    Case(B=1, T=701, D=64, dtype=BF16, cuts=[1, 2, 300], starts=[20], options={"window": 100}),
    Case(T=515, D=64, dtype=BF16, starts=[3, 515], options={"sink": 2, "prune": -8.0}),
]
COPIED = [Case(T=500, D=64, dtype=BF16, layout=layout) for layout in ("odd", "expanded")]  # mostly not from a tape


def step(inputs, do, options) -> list[torch.Tensor]:
    o = forgetting_attention(*inputs, **options)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def same(results, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def moved(inputs) -> list[torch.Tensor]:
    """The same values at other addresses, with the same strides."""
    copies = []
    for x in inputs:
        room = torch.empty(x.untyped_storage().nbytes() // x.element_size() + 64, dtype=x.dtype, device=x.device)
        copies.append(room[64:].as_strided(x.shape, x.stride(), 64).copy_(x.detach()).requires_grad_())
    return copies


@pytest.mark.parametrize("backend", ["triton", gluon])
@pytest.mark.parametrize("case", CASES + COPIED, ids=Case.name)
def test_later_calls_give_the_bits_of_the_first(case, backend):
    if backend == "gluon" and (case.dtype == torch.float32 or case.D == 256 or case.options.keys() & {"softcap"}):
        pytest.skip("not for the Hopper kernels")
    torch.manual_seed(0)
    replay.calls.clear()
    inputs, (do, _), options = draw(case, "cuda")
    options["backend"] = backend
    if backend == "gluon":
        options["sink"] = min(64, options.get("sink", 0))
    with poisoned():
        first = step(inputs, do, options)
        for _ in range(3):
            assert same(step(inputs, do, options), first)
        if case in CASES:
            (call,) = replay.calls.values()
            assert list(call.backwards.values()) != [None]
            if case.cuts is not None:  # of any number of documents
                more = [0, *case.cuts, case.T - 1, case.T]
                other = options | {"cu_seqlens": torch.tensor(more, dtype=torch.int32, device="cuda")}
                expected = forgetting_attention(*inputs, **other, return_lse=True)[0]
                assert torch.equal(forgetting_attention(*inputs, **other), expected)
            assert same(step(moved(inputs), moved([do])[0].detach(), options), first)
            assert len(replay.calls) == len(call.backwards) == 1
            o = forgetting_attention(*[x.detach() for x in inputs], **options)
            assert torch.equal(forgetting_attention(*[x.detach() for x in inputs], **options), o)
            assert torch.equal(o, first[0])


@pytest.fixture
def warm():
    """Inputs whose kind of call has run from tapes, their gradients, and what they give."""
    torch.manual_seed(0)
    inputs, (do, _), options = draw(Case(T=384, H=4, Hkv=2, D=64, dtype=BF16), "cuda")
    first = step(inputs, do, options)
    for _ in range(2):
        step(inputs, do, options)
    return inputs, do, first


def test_other_gradients_and_second_backwards(warm):
    inputs, do, first = warm
    o = forgetting_attention(*inputs)
    for gradient in (do, do.transpose(1, 2).contiguous().transpose(1, 2), do, do[..., :1].expand(do.shape)):
        expected = forgetting_attention(*inputs, return_lse=True)[0]  # never from a tape
        wanted = torch.autograd.grad(expected, inputs, gradient.contiguous())
        for _ in range(3):
            assert same(torch.autograd.grad(o, inputs, gradient, retain_graph=True), wanted)
    some = torch.autograd.grad(o, inputs[1:2], do)
    assert torch.equal(some[0], first[2])


def test_saved_tensors_may_come_back_from_elsewhere(warm):
    inputs, do, first = warm
    with torch.autograd.graph.save_on_cpu():
        assert same(step(inputs, do, {}), first)
    assert same(step(inputs, do, {}), first)

    def turned(x):  # comes back with other strides
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x

    def apart(x):  # and at an odd address
        room = torch.empty(2 * x.numel() + 3, dtype=x.dtype, device=x.device)
        return room[3::2].view(x.shape).copy_(x)

    for change in (turned, apart):
        with torch.autograd.graph.saved_tensors_hooks(change, lambda x: x):
            o = forgetting_attention(*inputs)
            got = torch.autograd.grad(o, inputs, do)
        for x, y in zip(got, first[1:], strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_in_the_backward(warm, reentrant):
    inputs, do, first = warm
    for forget in (lambda: None, replay.calls.clear):  # then what is recomputed is recorded first
        forget()
        inputs = [x.detach().requires_grad_() for x in inputs]
        o = checkpoint(forgetting_attention, *inputs, use_reentrant=reentrant)
        o.backward(do)
        assert same([o.detach(), *[x.grad for x in inputs]], first)


def test_streams_graphs_autocast_and_hooks(warm):
    inputs, do, first = warm
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = step(inputs, do, {})
    side.synchronize()
    assert same(other, first)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, do, {})
    for x in captured:
        x.zero_()
    graph.replay()
    assert same(captured, first)

    with torch.autocast("cuda", BF16):
        assert same(step(inputs, do, {}), first)
        halves = [x.detach().half().requires_grad_() for x in inputs[:3]]
        assert forgetting_attention(*halves, inputs[3]).dtype == BF16
    with torch.autocast("cuda", torch.float16):
        assert forgetting_attention(*inputs).dtype == torch.float16

    seen = []
    hooks = launch.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        assert same(step(inputs, do, {}), first)
    finally:
        hooks.remove(seen.append)
    assert len(seen) >= 6
    assert same(step(inputs, do, {}), first)


def test_what_changes_the_way_is_seen(warm):
    inputs, do, first = warm
    for context in (deterministic(False), poisoned(), torch.no_grad(), contextlib.nullcontext()):
        with context:
            for _ in range(3):
                assert torch.equal(forgetting_attention(*inputs), first[0])
    for scale, sink in itertools.product((0.125, 0.25, 1), (0, 2)):
        with_lse, _ = forgetting_attention(*inputs, scale=scale, sink=sink, return_lse=True)
        for _ in range(3):
            assert torch.equal(forgetting_attention(*inputs, scale=scale, sink=sink), with_lse)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(forgetting_attention(*inputs), inputs, do, create_graph=True)
    with pytest.raises(ValueError, match="sink must be"):
        forgetting_attention(*inputs, sink=False)
    one = inputs[1].detach().requires_grad_()  # k and v are one tensor
    q = inputs[0]
    both = forgetting_attention(q, one, one, inputs[3])
    assert torch.equal(both, forgetting_attention(q, one, one.detach().clone(), inputs[3]))
    assert same(step(inputs, do, {}), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["triton", gluon])
def test_each_gpu_has_its_own_whatever_the_current_one(backend):
    torch.manual_seed(0)
    case = Case(T=400, H=4, Hkv=2, D=64, dtype=BF16, starts=[3, 50])
    here, (do, _), options = draw(case, "cuda:0")
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    settings = {0: (here, do, options), 1: (there, do.to("cuda:1"), {k: v.to("cuda:1") for k, v in options.items()})}
    first = step(*settings[0][:2], options | {"backend": backend})
    for current, device in itertools.product((0, 1), (0, 1)):
        with torch.cuda.device(current):
            for _ in range(3):
                inputs, gradient, given = settings[device]
                found = step(inputs, gradient, given | {"backend": backend})
                assert all(x.device.index == device for x in found)
                assert same([x.to("cuda:0") for x in found], first)
