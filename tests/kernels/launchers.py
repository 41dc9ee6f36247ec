"""What the launchers promise beyond the public operator: parts that merge, caches that grow, helpers like their twins.

Needs Triton, real or interpreted, at import.
"""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import math
import warnings
from unittest import mock

import pytest
import torch
from cases import Case, draw, gates, results
from fox_kernels import autograd, backward, chunked, cumsum, decode, forgetting_attention, forward, prune, reference
from fox_kernels.backward import launch_backward
from fox_kernels.decode import launch_decode
from fox_kernels.forward import launch_forward
from fox_kernels.tiles import Tile


def check_merging(device: str, n: int, D: int) -> None:
    """Context parallelism: two shards of n keys, the first seen in full by later queries with an offset of c."""
    torch.manual_seed(0)
    B, H = 2, 2
    q, k, v, do = (torch.randn(B, 2 * n, H, D, device=device) for _ in range(4))
    log_f = gates("mixed", B, 2 * n, H, device=device) * 0.05
    hi, lo = cumsum.cumulative(log_f)
    args = {"scale": D**-0.5}
    o, lse = launch_forward(q, k, v, hi, lo, **args)
    dq, dk, dv, dc = launch_backward(do, None, q, k, v, o, lse, hi, lo, **args)
    late = slice(n, 2 * n)
    hi0, lo0 = (x.contiguous() for x in cumsum.cumulative(log_f[:, :n]))
    hi1, lo1 = (x.contiguous() for x in cumsum.cumulative(log_f[:, late]))
    # Queries of the second half against the first half's keys: c_i = c[n - 1] + offset + their own c, added per row.
    offset = torch.full((B, H), 0.25, device=device)
    o0, lse0 = launch_forward(
        q[:, late], k[:, :n], v[:, :n], hi0, lo0, q_offset=n, c_offset=offset, causal=False, **args
    )
    o1, lse1 = launch_forward(q[:, late], k[:, late], v[:, late], hi1, lo1, **args)
    row = hi1 - 0.25
    merged = torch.logaddexp2(lse0 + row, lse1)
    weights = [torch.exp2(x - merged).transpose(1, 2)[..., None] for x in (lse0 + row, lse1)]
    assert (merged - lse[:, :, late]).abs().max() < 1e-4
    o_late = o0 * weights[0] + o1 * weights[1]
    assert (o_late - o[:, late]).abs().max() < 1e-4
    # The backward of the first part with the merged lse gives its share of every gradient.
    part = launch_backward(
        do[:, late], None, q[:, late], k[:, :n], v[:, :n], o_late, merged - row, hi0, lo0, q_offset=n, c_offset=offset,
        causal=False, **args,
    )  # fmt: skip
    own = launch_backward(do[:, late], None, q[:, late], k[:, late], v[:, late], o_late, merged, hi1, lo1, **args)
    assert ((part[0] + own[0]) - dq[:, late]).norm() < 1e-4 * dq.norm()
    assert (own[1] - dk[:, late]).norm() < 1e-4 * dk.norm()
    early = launch_backward(do[:, :n], None, q[:, :n], k[:, :n], v[:, :n], o[:, :n], lse[:, :, :n], hi0, lo0, **args)
    assert ((part[1] + early[1]) - dk[:, :n]).norm() < 1e-4 * dk.norm()
    assert ((part[2] + early[2]) - dv[:, :n]).norm() < 1e-4 * dv.norm()
    assert ((part[3] + early[3])[..., : n - 1] - dc[..., : n - 1]).norm() < 1e-3 * dc.norm()


def check_decoding(device: str, S: int, dtype: torch.dtype, tolerance: float) -> None:
    """A padded batch from slices of buffers longer than the cache, with c appended rather than summed again."""
    torch.manual_seed(0)
    B, H, Hkv, D, room = 4, 8, 2, 96, S + 1000
    k, v = (torch.randn(B, room, Hkv, D, device=device, dtype=dtype)[:, :S] for _ in range(2))
    q = torch.randn(B, 1, H, D, device=device, dtype=dtype)
    log_f = gates("short", B, S, H, device=device)
    start = torch.tensor([0, 17, S // 2, S - 1], dtype=torch.int32, device=device)
    hi, lo = cumsum.append(*cumsum.cumulative(log_f[:, :-1]), log_f[:, -1:])
    padded = [torch.nn.functional.pad(x, (0, room - S)) for x in (hi, lo)]
    exact = chunked.forgetting_attention(q.double(), k.double(), v.double(), log_f, seq_start=start, sink=4)
    for log_eps in (None, -10.0):
        o, _ = launch_decode(
            q, k, v, padded[0][..., :S], padded[1][..., :S], scale=D**-0.5, seq_start=start, sink=4, prune=log_eps
        )
        assert (o - exact).norm() < tolerance * exact.norm()


def check_pruned_decoding(device: str, S: int, D: int) -> None:
    """What is left of a pruned cache, beside its sinks, is all that is read; at most eps of the weight is lost."""
    torch.manual_seed(0)
    B, H, Hkv, log_eps = 2, 4, 2, -5.0
    q, k, v = (torch.randn(B, n, heads, D, device=device) for n, heads in ((2, H), (S, Hkv), (S, Hkv)))
    log_f = gates("mixed", B, S, H, device=device)
    hi, lo = cumsum.cumulative(log_f)
    first = decode.skip_before(q, k, hi, lo, D**-0.5, None, log_eps)
    assert first.min() > S // 2
    for sink, start in ((0, None), (70, torch.tensor([3, S - 5], dtype=torch.int32, device=device))):
        exact = chunked.forgetting_attention(q.double(), k.double(), v.double(), log_f, seq_start=start, sink=sink)
        for end, given in ((int(first.min()), {"first": first}), (S // 4, {"k_bound": decode.key_bound(k)})):
            poisoned = k.clone()
            poisoned[:, 80:end] = float("nan")
            o, _ = launch_decode(
                q, poisoned, v, hi, lo, scale=D**-0.5, seq_start=start, sink=sink, prune=log_eps, **given
            )
            assert (o - exact).abs().max() <= 2 * math.exp(log_eps) * v.abs().max()


def check_search(device: str, S: int) -> None:
    """With a bound on the keys' norms, decoding reads all but the blocks of 64 keys that the rule of pruning allows."""
    torch.manual_seed(0)
    T, H, Hkv, D, log_eps = 2, 6, 2, 32, -4.0
    q, k, v = (torch.randn(1, n, heads, D, device=device) for n, heads in ((T, H), (S, Hkv), (S, Hkv)))
    log_f = 4 * gates("short", 1, S, H, device=device)
    hi, lo = cumsum.cumulative(log_f)
    options = {"scale": D**-0.5, "prune": log_eps, "k_bound": decode.key_bound(k)}
    first = decode.first_kept_torch(q, k, hi, lo, **options)[0]
    assert first.min() > 64
    for h in range(Hkv):
        for key, read in ((int(first[h]) - 1, False), (int(first[h]), True)):
            poisoned = k.clone()
            poisoned[0, key, h] = float("nan")
            o, _ = launch_decode(q, poisoned, v, hi, lo, **options)
            assert bool(o.isnan().any()) == read


def check_nan(device: str, backend: str = "triton") -> None:
    """NaN in a gate reaches what comes after it, o and lse, of its own head only; in decoding too."""
    torch.manual_seed(0)
    dtype = torch.float16 if backend == "gluon" else torch.float32
    for T, S in ((100, 100), (1, 300)):
        inputs, _, _ = draw(Case(B=1, T=T, S=S, H=2, Hkv=2, D=64, dtype=dtype), device)
        inputs[3] = inputs[3].detach().clone()
        inputs[3][:, S - 9, 0] = float("nan")
        with warnings.catch_warnings():  # the interpreter takes maxima by numpy, which warns of rows of nothing but NaN
            warnings.simplefilter("ignore", RuntimeWarning)
            o, lse = forgetting_attention(*[x.detach() for x in inputs], return_lse=True, backend=backend)
        for x in (o[0].isnan().any(-1), lse[0].isnan()):
            assert x[max(0, T - 9) :, 0].all()
            assert not x[: max(0, T - 9), 0].any()
            assert not x[:, 1].any()


def check_helpers(device: str, S: int) -> None:
    """Each fused helper equals its eager twin, whether a row is one block or several."""
    check_sums(device, S)
    usual = cumsum.LARGEST
    try:
        cumsum.LARGEST = 16
        check_sums(device, S)
    finally:
        cumsum.LARGEST = usual


def check_sums(device: str, S: int) -> None:
    torch.manual_seed(0)
    for dtype, kind in ((torch.float32, "mixed"), (torch.float64, "short"), (torch.float32, "zeros")):
        log_f = gates(kind, 2, S, 3, device=device).to(dtype)
        hi, lo = cumsum.cumulative(log_f)
        twin_hi, twin_lo = cumsum.cumulative_torch(log_f)
        exact = twin_hi.double() + twin_lo.double()
        assert (hi.double() + lo.double() - exact).abs().max() <= 1e-13 * exact.abs().max() + 1e-12
        dc = torch.randn(2, 3, S, device=device)
        gradient, twin = cumsum.gate_gradient(dc, log_f), cumsum.gate_gradient_torch(dc, log_f)
        assert (gradient - twin).abs().max() <= 1e-5
        assert gradient.dtype == dtype
        relative = cumsum.block_relative(hi, lo, 32)[..., :S]
        last = torch.arange(S, device=device).div(32, rounding_mode="floor").mul(32).add(31).clamp_max(S - 1).long()
        assert torch.allclose(relative.double(), exact[..., last] - exact, rtol=1e-6, atol=1e-6)


def check_operator(device: str, backend: str = "triton") -> None:
    """Eager mode, the operator and a compiled function give the same bits, decoding too; it passes torch's opcheck."""
    torch.manual_seed(0)
    options = {"window": 9, "sink": 1, "softcap": 5.0, "prune": -4.0}
    inputs, gradients, options = draw(Case(T=40, D=16, starts=[3, 40], options=options), device)
    arguments = (*inputs, 0.25, None, options["seq_start"], 9, 1, 5.0, -4.0, backend, True, True)
    for worth in (0, 10**11):  # pruned, and left whole
        with mock.patch.object(prune, "WORTH", worth):
            torch.library.opcheck(autograd.attention, arguments)

    def operator(*args, **kwargs):
        return forgetting_attention(*args, backend=backend, **kwargs)

    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    expected = results(operator, inputs, gradients, options)
    for way in (compiled, watched(operator)):
        for got, value in zip(results(way, inputs, gradients, options), expected, strict=True):
            assert torch.equal(got, value)
    decoded, _, _ = draw(Case(T=1, S=300, H=4, D=16), device)
    with torch.no_grad():
        assert torch.equal(compiled(*decoded, sink=2), operator(*decoded, sink=2))


def watched(operator):
    """Return the operator under a dispatch mode, which sees its calls: they then go through torch.library."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def run(*args, **kwargs):
        with Watch():
            return operator(*args, **kwargs)

    return run


def check_one_gradient(device: str, backend: str = "triton") -> None:
    """With one input that requires a gradient, it gets the one it gets beside the others; no second derivative."""
    torch.manual_seed(0)
    inputs, (do, _), _ = draw(Case(T=20, D=16), device)

    def gradients(*wanted, **kwargs):
        given = [x if any(x is y for y in wanted) else x.detach() for x in inputs]
        o = forgetting_attention(*given, backend=backend)
        return torch.autograd.grad((o * do).sum(), wanted, **kwargs)

    together = gradients(*inputs)
    for x, expected in zip(inputs, together, strict=True):
        assert torch.equal(gradients(x)[0], expected)
    with pytest.raises(ValueError, match="second derivative"):
        gradients(*inputs, create_graph=True)


def check_pruning(device: str, T: int, D: int, log_eps: float) -> None:
    """Pruning loses at most eps of any query's weight, so o moves by at most 2 eps max |v|; gradients as little.

    Judged by the float64 reference without pruning. Something must have been pruned, heads with open gates not.
    """
    torch.manual_seed(0)
    inputs, gradients, _ = draw(Case(B=1, T=T, H=3, Hkv=3, D=D, gate="short"), device)
    inputs[3] = (inputs[3].detach() * torch.tensor([0.0, 5.0, 40.0], device=device)).requires_grad_()
    eps = math.exp(log_eps)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    o, lse, *exact = results(reference.forgetting_attention, exact_inputs, gradients, {})

    def operator(*args, **kwargs):
        return forgetting_attention(*args, backend="triton", **kwargs)

    kept_o, kept_lse, *kept = results(operator, inputs, gradients, {"prune": log_eps})
    lost = 1 - (kept_lse - lse).exp()
    assert lost.max() <= eps + 1e-5
    assert (kept_o - o).abs().max() <= 2 * eps * inputs[2].abs().max() + 1e-4
    for x, y in zip(kept, exact, strict=True):
        assert (x - y).norm() <= (2 * eps + 1e-4) * y.norm()
    hi, lo = cumsum.cumulative(inputs[3].detach())
    first = prune.loop_bounds(inputs[0], inputs[1], hi, lo, D**-0.5, None, log_eps)
    assert first[:, 0].max() == 0
    assert first[:, 2].max() >= T // 3


def check_copies_by_tma() -> None:
    """In the interpreter, what TMA would copy comes from tensor descriptors: same results, for every choice of them."""
    torch.manual_seed(0)
    case = Case(T=45, S=77, H=4, Hkv=2, D=32, starts=[3, 60], options={"sink": 2})
    inputs, gradients, options = draw(case)

    def operator(*args, **kwargs):
        return forgetting_attention(*args, backend="triton", **kwargs)

    usual = (forward.describable, forward.tile_for)
    expected = results(operator, inputs, gradients, options)
    try:
        for tma in (1, 2, 3):
            forward.describable = backward.describable = lambda *tensors: True
            forward.tile_for = backward.tile_for = lambda *_, tma=tma: Tile(32, 32, 4, 1, tma)
            halves = [x.detach().half().requires_grad_() if n < 3 else x for n, x in enumerate(inputs)]
            for got, value in zip(results(operator, halves, gradients, options), expected, strict=True):
                assert (got.float() - value).norm() <= 4e-3 * value.norm()
    finally:
        forward.describable = backward.describable = usual[0]
        forward.tile_for = backward.tile_for = usual[1]
