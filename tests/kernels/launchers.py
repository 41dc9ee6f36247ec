"""What the launchers promise beyond the public operator: parts that merge, caches that grow, helpers like their twins.

Needs Triton, real or interpreted, at import.
"""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
from cases import gates
from fox_kernels import chunked, cumsum
from fox_kernels.backward import launch_backward
from fox_kernels.decode import launch_decode
from fox_kernels.forward import launch_forward


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
    for prune in (None, -10.0):
        o, _ = launch_decode(
            q, k, v, padded[0][..., :S], padded[1][..., :S], scale=D**-0.5, seq_start=start, sink=4, prune=prune
        )
        assert (o - exact).norm() < tolerance * exact.norm()


def check_helpers(device: str, S: int) -> None:
    """Each fused helper equals its eager twin."""
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
