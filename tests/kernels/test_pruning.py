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


def falling_once(own: float, old: float, first_block: float, fall: float, S: int = 400):
    """Return q, k, v, log_f, eps = e^-6: a query scores `own` with keys from 200 on, `old` with those of the first 128,
    `first_block` more with the first 64. No gate forgets, but for one, at 199, by `fall` nats."""
    import torch

    q, k = torch.zeros(1, S, 2, 16), torch.zeros(1, S, 1, 16)
    q[..., 0] = 4.0
    k[:, 200:, 0, 0] = own / 4
    k[:, :128, 0, 0] = old / 4
    k[:, :64, 0, 0] += first_block / 4
    k[:, 128:200, 0, 1] = 1e-3  # orthogonal: they score 0, and hold nothing beside the rest
    log_f = torch.zeros(1, S, 2)
    log_f[:, 199] = -fall
    return q, k, log_f


def pruned_and_lost(q, k, log_f, prune: float = -6.0) -> tuple[int, float]:
    """Return how many keys the last tile of queries leaves out, and the greatest weight that any query loses."""
    import torch
    from fox_kernels.common import cumsum, pruning
    from fox_kernels.options import Options

    T, S = q.shape[1], k.shape[1]
    first = pruning.loop_bounds(q, k, *cumsum.cumulative(log_f), Options(1.0, prune=prune))[0]
    before = torch.arange(S) < first.repeat_interleave(64, 1)[:, :T, None]
    return int(first[:, -1].max()), (weights(q, k, log_f, None) * before).sum(-1).max().item()


def check_many_keys_that_hold_less_than_eps_each_may_hold_more_together() -> None:
    """The rule divides eps by how many keys there are: 128 keys of e^-8 each beside one of e^0."""
    q, k, log_f = falling_once(own=-20.0, old=0.0, first_block=0.0, fall=8.0)
    k[:, -1] = 0.0
    for fall, kept in ((8.0, True), (25.0, False)):
        log_f[:, 199] = -fall
        first, lost = pruned_and_lost(q[:, -1:], k, log_f)
        assert (first == 0) == kept, (fall, first)
        assert lost <= math.exp(-6.0), (fall, lost)


def check_a_query_that_scores_its_own_key_low_keeps_more() -> None:
    """What a key holds is judged beside the query's own key, not beside a score of 0."""
    for fall, kept in ((15.0, True), (30.0, False)):
        first, lost = pruned_and_lost(*falling_once(own=-12.0, old=1.0, first_block=0.0, fall=fall))
        assert (first == 0) == kept, (fall, first)
        assert lost <= math.exp(-6.0), (fall, lost)


def check_a_long_key_is_kept_with_all_that_come_after_it() -> None:
    """Behind keys whose scores may be 20, short ones that could go alone stay: what is left out is a prefix."""
    for fall, kept in ((15.0, True), (40.0, False)):
        first, lost = pruned_and_lost(*falling_once(own=0.0, old=0.0, first_block=20.0, fall=fall))
        assert (first == 0) == kept, (fall, first)
        assert lost <= math.exp(-6.0), (fall, lost)


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
