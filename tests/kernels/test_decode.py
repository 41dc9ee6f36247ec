"""Decoding: a few queries against a cache that keeps the gates' sums, in Triton's interpreter and on a GPU."""

import math
import random

import pytest
import torch
from cases import broken, gates
from fox_kernels import decode_attention, decodes, reference
from twins import cumulative_torch

pytest.importorskip("triton", reason="Triton is not installed here")
from fox_kernels.decoding import append, elementwise, fixed, planner
from fox_kernels.layer.rotary import rotary

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 300)
GATES = ("open", "mixed", "short", "shut", "zeros", "unequal")
ROUNDING = {torch.float32: 4e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
CASES = 36
STEPS = 24


def kept(q, k, v, log_f, room: int = 0):
    """Return k, v and both floats of c as a cache holds them: slices of longer buffers, heads before tokens."""
    hi, lo = cumulative_torch(log_f)
    sums = torch.nn.functional.pad(torch.cat((hi, lo), 1), (0, room), value=float("nan"))
    k, v = (torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, room), value=float("nan")) for x in (k, v))
    S, H = log_f.shape[1:]
    return *(x[:, :, :S].transpose(1, 2) for x in (k, v)), *sums[..., :S].split(H, 1)


def any_problem(n: int, lengths=LENGTHS) -> dict:
    """Return the n-th problem of a fixed sequence that takes every option, with every other, sooner or later."""
    draw = random.Random(n)
    group, T = draw.choice([(1, 1), (1, 8), (3, 1), (3, 3), (8, 1), (8, 8), (2, 5), (7, 2)])
    S = draw.choice([x for x in lengths if x >= T])
    B = draw.randint(1, 3)
    starts = [draw.choice([0, 0, 1, S // 2, S - 1, S]) for _ in range(B)]
    options = {
        "scale": draw.choice([None, None, -0.3, 0.0]),
        "window": draw.choice([None, None, 1, 3, S // 2 + 1, 2 * S]),
        "sink": draw.choice([0, 0, 1, 4, 70, 10**10]),
        "softcap": draw.choice([None, None, 2.0, 30.0]),
        "horizon": draw.choice([None, None, 0.5, 8.0]),
    }
    return {
        "shape": (B, T, S, draw.choice([1, 2]) * group, group, draw.choice([16, 32, 64, 80, 96, 128, 192, 256])),
        "gate": draw.choice(GATES),
        "dtype": draw.choice([torch.float32, torch.float16]),
        "starts": draw.choice([None, starts]),
        "spread": draw.choice([1.0, 1.0, 6.0]),
        "options": options,
        "narrower": draw.choice([0, 0, 3]),
        "shared": draw.choice([False, True]),  # a gate for the query heads of a kv head
    }


def failure(problem: dict, device: str = "cpu") -> str | None:
    """Return what is wrong with a problem's output; None if its error is at most twice eager's in the same dtype.

    Also at a length on the device, in a room for more; then with a horizon as each way finds it.
    """
    B, T, S, H, group, D = problem["shape"]
    dtype, options = problem["dtype"], dict(problem["options"])
    if problem["starts"] is not None:
        options["seq_start"] = torch.tensor(problem["starts"], dtype=torch.int32, device=device)
    q, k, v = (
        (torch.randn(B, n, heads, D, device=device) * size).to(dtype)
        for n, heads, size in ((T, H, problem["spread"]), (S, H // group, 1), (S, H // group, 1))
    )
    v = v[..., : D - problem["narrower"]]
    shared = group if problem["shared"] else 1
    log_f = gates(problem["gate"], B, S, H // shared, device=device).repeat_interleave(shared, -1)
    exact = reference.forgetting_attention(q.double(), k.double(), v.double(), log_f.double(), **options)
    eager = reference.forgetting_attention(q, k, v, log_f, **options)
    k, v, hi, lo = kept(q, k, v, log_f[..., ::shared], room=37)
    o = decode_attention(q, k, v, hi, lo, **options)
    room = -S % 64 + 64 * random.Random(S).randint(0, 7)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, room), value=float("nan")) for x in (k, v))
    hi, lo = (torch.nn.functional.pad(x, (0, room), value=float("nan")) for x in (hi, lo))
    length = torch.tensor([S - T], dtype=torch.int32, device=device)
    planner.decoder_for.cache_clear()
    first = torch.zeros(B * H // group, dtype=torch.int32, device=device)
    with torch.no_grad():  # a search anew, all keys, and from where that call has moved on to
        at_length = [fixed.decode_at(q, k, v, hi, lo, length, first=x, **options) for x in (None, first, first)]
    allowed = 2 * (eager - exact).norm() + ROUNDING[dtype] * exact.norm().clamp_min(exact.numel() ** 0.5 / 10)
    found = [(x.double() - exact).norm() for x in (o, *at_length)]
    return None if max(found) <= allowed else f"errors {found}, allowed {allowed:.2e}: {problem}"


def check_any_problem(device: str) -> None:
    for n in range(CASES):
        torch.manual_seed(n)
        with pytest.MonkeyPatch.context() as patch:
            if n % 6 == 0:  # as with very many sequences, whose stretches are not shared out
                patch.setattr(planner, "MAX_SHARED", 0)
            assert failure(any_problem(n), device) is None


def check_horizon(device: str) -> None:
    """No key is read that every query head of its kv head has left behind, but for the rest of a block of 64."""
    torch.manual_seed(0)
    B, T, S, H, Hkv, D = 2, 2, 450, 4, 2, 32
    q, k, v = (torch.randn(B, n, heads, D).to(device) for n, heads in ((T, H), (S, Hkv), (S, Hkv)))
    log_f = -torch.tensor([1.0, 0.05, 0.1, 0.01]).to(device).expand(B, S, H)
    exact = reference.forgetting_attention(q, k, v, log_f, horizon=8.0)
    _, _, hi, lo = kept(q, k, v, log_f)
    first = torch.zeros(B * Hkv, dtype=torch.int32, device=device)
    at = {"length": torch.tensor([S - T], dtype=torch.int32, device=device), "first": first, "horizon": 8.0}
    with torch.no_grad():
        fixed.decode_at(q, k, v, hi, lo, **at)
        for head, seen in enumerate((S - 2 - 160, 0)):  # 8 / 0.05 tokens before the first query; 8 / 0.01 are over S
            k[:, : max(seen - 64, 0), head] = torch.nan
            v[:, : max(seen - 64, 0), head] = torch.nan
        for o in (fixed.decode_at(q, k, v, hi, lo, **at), decode_attention(q, k, v, hi, lo, horizon=8.0)):
            assert (o - exact).abs().max() < 1e-5


def check_steps(device: str) -> None:
    """A text goes on, and one call begins where the one before left off, also beyond a gate that shuts all off."""
    torch.manual_seed(0)
    B, S, H, Hkv, D = 2, 700, 4, 2, 32
    q, k, v = (torch.randn(B, S, heads, D, device=device) for heads in (H, Hkv, Hkv))
    log_f = -torch.tensor([0.2, 0.05, 0.1, 0.01], device=device).repeat(B, S, 1)
    log_f[0, 550] = -20.0
    _, _, hi, lo = kept(q, k, v, log_f)
    first = torch.zeros(B * Hkv, dtype=torch.int32, device=device)
    for n in (300, 301, 302, 364, 449, 549, 550, 551, 640, 699):
        length = torch.tensor([n], dtype=torch.int32, device=device)
        with torch.no_grad():
            o = fixed.decode_at(q[:, n : n + 1], k, v, hi, lo, length, first=first, sink=1, horizon=8.0)
        shown = (x[:, : n + 1] for x in (k, v, log_f))
        exact = reference.forgetting_attention(q[:, n : n + 1], *shown, sink=1, horizon=8.0)
        assert (o - exact).abs().max() < 1e-5
    assert first.tolist() == [512, 512, 512, 0]  # 8 / 0.05 tokens before 699, after 550, ..., 8 / 0.01 are over S


def check_append(device: str) -> None:
    """A launch adds to a cache what torch would: keys, values and sums; at a length on the device as on the host."""
    for dtype, carried, T in ((torch.float32, 0, 1), (torch.float16, 24, 3), (torch.float16, 0, 16)):
        torch.manual_seed(T)
        B, H, Hkv, D, first = 2, 6, 2, 24, 40
        S = first + 5 * T
        # as projections leave them: tokens before heads
        k, v = (torch.randn(B, S, Hkv, w, device=device).to(dtype).transpose(1, 2) for w in (D + carried, D))
        log_f = -torch.rand(B, S, H, device=device) * torch.tensor([0, 1e-4, 0.1, 3, 1e3, math.inf], device=device)
        sums = torch.cat(cumulative_torch(log_f), 1)[..., None]
        for on_device in (False, True):
            buffers = [torch.nn.functional.pad(x[:, :, :first], (0, 0, 0, 128)).contiguous() for x in (k, v, sums)]
            for n in range(first, S, T):
                length = torch.tensor([n], dtype=torch.int32, device=device) if on_device else n
                append.append(buffers, length, k[:, :, n : n + T], v[:, :, n : n + T], log_f[:, n : n + T])
            assert torch.equal(buffers[0][:, :, :S], k)
            assert torch.equal(buffers[1][:, :, :S], v)
            c, exact = (x[..., 0].double().unflatten(1, (2, H)).sum(1) for x in (buffers[2][:, :, :S], sums))
            torch.testing.assert_close(c, exact, atol=1e-9, rtol=1e-13)


def shared(buffers, Hkv: int):
    """Return the buffers of sequences and kv heads one behind another, as one that they share."""
    sums = buffers[2].unflatten(1, (2, Hkv, -1)).permute(1, 3, 0, 2, 4, 5).flatten(2, 4).flatten(0, 1)
    return *(x.reshape(1, 1, -1, x.shape[-1]) for x in buffers[:2]), sums[None, ..., None]


@torch.no_grad()
def check_append_step(device: str) -> None:
    """One kernel leaves the bits of five: gates, bounds, copies for query heads, turned queries and keys, append."""
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device != "cpu")
    for n in range(STEPS):
        draw = random.Random(n)
        torch.manual_seed(n)
        B, T, D = draw.choice([1, 3]), draw.choice([1, 1, 4]), draw.choice([2, 24, 64, 80, 256])
        Hkv, group = draw.choice([1, 3]), draw.choice([1, 2, 8])
        H, gates = Hkv * group, draw.choice([Hkv, Hkv * group])
        kept = draw.choice([gates, H])
        K, VW, P = draw.choice([32, 576, 1500, 4096]), draw.choice([D, D, 16]), draw.choice([0, 1, D // 2, D // 2])
        dtype = draw.choice(dtypes)
        x, q, k, v = (torch.randn(B, T, w, device=device).to(dtype) for w in (K, H * D, Hkv * D, Hkv * VW))
        weight, bias = torch.randn(gates, K, device=device) / K**0.5, 9 * torch.randn(gates, device=device)
        bounds = draw.choice([None, torch.rand(gates, device=device)])
        cos, sin = torch.randn(2, draw.choice([1, B]), T, P + 3, device=device).to(draw.choice(dtypes))[..., :P]
        buffers = [torch.randn(B, Hkv, 70, w, device=device).to(dtype) for w in (D, VW)]
        buffers.append(torch.randn(B, 2 * kept, 70, 1, device=device))
        length = torch.full((1,), draw.choice([0, 1, 37]), dtype=torch.int32, device=device)
        wanted = [y.clone() for y in buffers]
        assert append.appends_step(buffers, x, weight, bias)
        offset = 70 * torch.arange(B * Hkv, device=device, dtype=torch.int32)
        alike, given = [y.clone() for y in shared(buffers, Hkv)], (x, q, k, v, weight, bias, cos, sin, bounds)
        append.append_step(alike, length, *given, offset=offset)
        ours = append.append_step(buffers, length, *given)
        heads = [y.unflatten(-1, (-1, w)).transpose(1, 2) for y, w in ((q, D), (k, D), (v, VW))]
        if P:
            heads[:2] = rotary(*heads[:2], cos, sin)
        log_f = elementwise.gate_rows(x, weight, bias)
        log_f = log_f if bounds is None else log_f - bounds
        append.append(wanted, length, *heads[1:], log_f.repeat_interleave(kept // gates, -1))
        assert torch.equal(ours, heads[0].transpose(1, 2).flatten(2))
        assert all(map(torch.equal, buffers, wanted)), n
        assert all(map(torch.equal, alike, shared(wanted, Hkv))), n
        assert (ours is q) == (P == 0)


def check_shared_buffers(device: str) -> None:
    """Rows of unlike lengths in buffers that they share, all else being NaN: appended to and attended as alone."""
    for options in ({"sink": 3, "horizon": 8.0}, {"window": 100, "softcap": 20.0}, {"horizon": 8.0}):
        torch.manual_seed(0)
        held, S, new, G, D = [5, 300, 129, 640], 640, 70, 2, 32
        q, k, v = (torch.randn(4, S + new, heads, D, device=device) for heads in (G, 1, 1))
        log_f = -torch.tensor([[0.21, 0.051], [0.001, 0.0], [3.0, 0.53], [0.11, 0.041]], device=device)
        log_f = log_f[:, None].repeat(1, S + new, 1)
        start = torch.tensor([S - n for n in held], dtype=torch.int32, device=device)
        room = torch.arange(4, device=device, dtype=torch.int32) * 1024 + 128
        offset = room + start % 128 - start
        hi, lo = cumulative_torch(log_f)
        buffers = [torch.full((1, n, 4224, w), torch.nan, device=device) for n, w in ((1, D), (1, D), (2 * G, 1))]
        for row, n in enumerate(held):
            at = slice(int(offset[row]) + S - n, int(offset[row]) + S)
            for x, old in zip(buffers, (k, v, torch.cat((hi, lo), 1)[..., None].transpose(1, 2)), strict=True):
                x[0, :, at] = old[row, S - n : S].transpose(0, 1)
        first = start.clone()
        k_all, v_all = (x[:, 0].expand(4, -1, -1)[:, :, None] for x in buffers[:2])
        c_hi, c_lo = buffers[2][..., 0].expand(4, -1, -1).split(G, 1)
        for n in range(S, S + new):
            length = torch.tensor([n], dtype=torch.int32, device=device)
            *new, gate = (x[:, n].view(2, 2, 1, -1) for x in (k, v, log_f))  # two rows of two kv heads
            append.append(buffers, length, *new, gate.transpose(1, 2).flatten(2), offset=offset)
            if n > S + 1 and n % 23:
                continue
            at = {"length": length, "seq_start": start, "first": first, "offset": offset}
            with torch.no_grad():
                o = fixed.decode_at(q[:, n : n + 1], k_all, v_all, c_hi, c_lo, **at, **options)
            shown = (x[:, : n + 1] for x in (k, v, log_f))
            exact = reference.forgetting_attention(q[:, n : n + 1], *shown, seq_start=start, **options)
            assert (o - exact).abs().max() < 1e-5
        with pytest.raises(ValueError, match="need first"), torch.no_grad():
            fixed.decode_at(q[:, :1], k_all, v_all, c_hi, c_lo, length, offset=offset)


def check_refusals(device: str) -> None:
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    q, k, c = (torch.randn(1, *shape, device=device) for shape in ((40, 4, 16), (300, 2, 16), (4, 300)))
    with torch.no_grad(), pytest.raises(ValueError, match="length must be"):
        fixed.decode_at(q[:, :1], k, k, c, c, wrong)
    with pytest.raises(ValueError, match="use decode_attention"):  # gradients are recorded
        fixed.decode_at(q[:, :1], k, k, c, c, wrong.int())

    with pytest.raises(ValueError, match="decoding takes"):
        decode_attention(q, k, k, c, c)
    with pytest.raises(ValueError, match="no gradient"):
        decode_attention(q[:, :1].requires_grad_(), k, k, c, c)


CHECKS = {
    "any problem": check_any_problem, "horizon": check_horizon, "steps": check_steps, "append": check_append,
    "append step": check_append_step, "shared buffers": check_shared_buffers,
    "refusals": check_refusals,
}  # fmt: skip


def in_interpreter() -> dict[str, str]:
    return broken(CHECKS, "cpu")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert not report[check]


def test_without_triton_it_says_what_to_do():
    q, k, c = torch.randn(1, 1, 4, 16), torch.randn(1, 300, 2, 16), torch.zeros(1, 4, 300)
    assert not decodes(q, k, k)
    with pytest.raises(ValueError, match="use forgetting_attention"):
        decode_attention(q, k, k, c, c)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check, monkeypatch):
    # as many as in the interpreter: a GPU has a program for each block of texts so short, and searches nothing
    monkeypatch.setattr(planner, "processors", lambda device: 8)
    planner.decoder_for.cache_clear()
    CHECKS[check]("cuda")
    planner.decoder_for.cache_clear()


@pytest.mark.gpu
def test_bfloat16_at_real_lengths_on_a_gpu():
    for n in range(12):
        torch.manual_seed(n)
        problem = any_problem(n, (2000, 5000, 8191)) | {"dtype": torch.bfloat16}
        assert failure(problem, "cuda") is None
