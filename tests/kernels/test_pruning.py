"""Pruning keeps its word where scores are large: the pruned keys hold at most eps of every query's weight.

An old key may outweigh all recent ones however far its gates have fallen, if its score is large: the bound on scores
must keep it. Here queries point at old keys, with scores up to hundreds. In Triton's interpreter.
"""

import json
import math
import traceback

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")


def problem(seed: int, T: int, S: int, score: float, half_life: float):
    """Return q, k (1, n, 2 or 1, 16), v and log_f; queries score about `score` with some of the first keys."""
    import torch

    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, n, heads, 16) / 4 for n, heads in ((T, 2), (S, 1), (S, 1)))
    side = math.sqrt(score)
    q[..., 0] = side
    old = (torch.rand(S) < 0.2) & (torch.arange(S) < (S - T) // 3)
    k[0, old, 0, 0] = side
    k[0, ~old, 0, 0] = 0.0
    fall = math.log(2) / half_life
    return q, k, v, -fall * 2 * torch.rand(1, S, 2)


def weights(q, k, log_f, softcap: float | None):
    """Return every key's weight (H, T, S) for every query, float64."""
    import torch

    T, S = q.shape[1], k.shape[1]
    s = torch.einsum("thd,sd->hts", q[0].double(), k[0, :, 0].double())
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    c = log_f[0].double().cumsum(0).T
    s = s + c[:, S - T :, None] - c[:, None, :]
    return s.masked_fill(torch.arange(S) > torch.arange(S - T, S)[:, None], -math.inf).softmax(-1)


def lost(T: int, S: int, score: float, half_life: float, prune: float, softcap: float | None, seed: int = 0):
    """Return how many keys are pruned and the greatest weight that they hold: in attention and in decoding."""
    import torch
    from fox_kernels.common import cumsum, pruning
    from fox_kernels.decoding import planner, search
    from fox_kernels.options import Options

    q, k, v, log_f = problem(seed, T, S, score, half_life)
    options, c = Options(1.0, softcap=softcap, prune=prune), cumsum.cumulative(log_f)
    p = weights(q, k, log_f, softcap)
    first = pruning.loop_bounds(q, k, *c, options)[0].repeat_interleave(64, 1)[:, :T]
    before = torch.arange(S) < first[..., None]
    found = [(int(first.max()), (p * before).sum(-1).max().item())]
    if T <= planner.MAX_ROWS // 2:
        o, _ = planner.launch_decode(q, k, v, *c, options, k_bound=search.key_bound(k))
        exact = torch.einsum("hts,sd->thd", p, v[0, :, 0].double())
        found.append((0, ((o[0].double() - exact).norm(dim=-1).max() / (2 * v.norm(dim=-1).max())).item()))
    return found


def check_properties() -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    @settings(
        max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow],
        phases=(Phase.generate,),  # shrinking would take minutes in the interpreter
    )  # fmt: skip
    @given(
        st.integers(1, 80), st.integers(0, 400), st.floats(0.0, 300.0), st.floats(0.5, 50.0), st.floats(-12.0, -2.0),
        st.one_of(st.none(), st.floats(5.0, 100.0)), st.integers(0, 9),
    )  # fmt: skip
    def check(T, more, score, half_life, prune, softcap, seed):
        for _, weight in lost(T, T + more, score, half_life, prune, softcap, seed):
            assert weight <= math.exp(prune) * 1.001 + 1e-6, weight

    check()


def check_an_old_key_with_all_the_weight_is_kept() -> None:
    """Half of its score is forgotten, which is far more than eps: by the gates alone it would be pruned."""
    for softcap in (None, 90.0):
        for T in (1, 20):
            for _, weight in lost(T, 400, 150.0, 3.0, -6.0, softcap):
                assert weight <= math.exp(-6.0), (softcap, T, weight)


def check_keys_are_pruned_nevertheless() -> None:
    """Once the gates have fallen by more than twice the greatest score, old keys go."""
    pruned, _ = lost(20, 800, 20.0, 1.0, -6.0, None)[0]
    assert pruned > 200


CHECKS = [name for name in dict(globals()) if name.startswith("check_")]


def run_all() -> dict[str, str]:
    """Return the traceback of each check that fails."""
    report = {}
    for check in CHECKS:
        try:
            globals()[check]()
        except AssertionError:
            report[check] = traceback.format_exc()
    return report


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert report.get(check) is None, report[check]


if __name__ == "__main__":
    print(json.dumps(run_all()))
