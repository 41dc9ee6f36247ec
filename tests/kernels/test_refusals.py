"""What the operators refuse, and why: one wrong argument beside right ones. On any machine."""

from typing import Any

import pytest
import torch
from fox_kernels import decode_attention, forgetting_attention


def problem() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [*(torch.randn(1, 6, heads, 16) for heads in (4, 2, 2)), -torch.rand(1, 6, 4)]


BAD: dict[str, dict[str, Any]] = {
    "4 dimensions": {"q": torch.zeros(1, 2, 3)},
    "one shape": {"v": torch.zeros(1, 5, 2, 8)},
    "v's heads may be narrower": {"v": torch.zeros(1, 4, 2, 9)},
    "multiple of the key/value heads": {"q": torch.zeros(1, 4, 3, 8), "log_f": torch.zeros(1, 4, 3)},
    "T <= S": {"q": torch.zeros(1, 5, 4, 8)},
    "log_f must be \\(B, S, H\\)": {"log_f": torch.zeros(1, 4, 2)},
    "log_f must be float32, got bfloat16": {"log_f": torch.zeros(1, 4, 4, dtype=torch.bfloat16)},
    "share one floating dtype": {"k": torch.zeros(1, 4, 2, 8, dtype=torch.float64)},
    "batch must be 1": {"B": 2, "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)},
    "must rise from 0 to S": {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)},
    "must rise from 0 to S = 4, got \\[1, 4\\]": {"cu_seqlens": torch.tensor([1, 4], dtype=torch.int32)},
    "must rise from 0 to S = 4, got \\[0, 3, 2, 4\\]": {"cu_seqlens": torch.tensor([0, 3, 2, 4], dtype=torch.int32)},
    "cu_seqlens must be on cpu": {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")},
    "seq_start must be \\(1,\\) int32": {"seq_start": torch.zeros(3, dtype=torch.int32)},
    "seq_start must lie between 0 and S = 4": {"seq_start": torch.tensor([-1], dtype=torch.int32)},
    "cu_seqlens must be .*, got \\[0, 4\\]": {"cu_seqlens": [0, 4]},
    "seq_start must be .*, got 0": {"seq_start": 0},
    "log_f must be <= 0": {"log_f": torch.full((1, 4, 4), 0.5)},
    "on one device": {"log_f": torch.zeros(1, 4, 4, device="meta")},
    "k must be \\(B, S, Hkv, D\\)": {name: torch.zeros(1, 4, 2, 16) for name in "kv"},
    "window must be": {"window": 0},
    "sink must be": {"sink": -1},
    "softcap must be": {"softcap": 0.0},
    "horizon must be a finite float > 0": {"horizon": 0.0},
    "scale must be": {"scale": float("nan")},
    "scale ": {"scale": 10**400},
    "backend must be one of": {"backend": "cuda"},
    "can't run": {"backend": "triton"},
    r"16 bits or more, got torch\.float8_e4m3fn": {
        name: torch.zeros(1, 4, heads, 8).to(torch.float8_e4m3fn) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_with_the_reason(message):
    changes: dict[str, Any] = dict(BAD[message])
    B = changes.pop("B", 1)
    arguments: dict[str, Any] = {"q": torch.zeros(B, 4, 4, 8), "log_f": torch.zeros(B, 4, 4)}
    arguments |= {name: torch.zeros(B, 4, 2, 8) for name in "kv"}
    with pytest.raises(ValueError, match=message):
        forgetting_attention(**(arguments | changes))


def test_scores_need_a_scale_and_a_softcap_that_their_dtype_holds():
    q, k, v, log_f = problem()
    for option in ({"scale": -1e39}, {"softcap": 1e39}, {"softcap": 1e-46}):
        with pytest.raises(ValueError, match=r"a finite float .*that torch\.float32 holds, or None"):
            forgetting_attention(q, k, v, log_f, **option)
        o = forgetting_attention(q.double(), k.double(), v.double(), log_f, **option)
        assert bool(o.isfinite().all())


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_window_and_sinks_may_be_longer_than_any_document(backend, compiled):
    def run(*inputs, **options):
        return forgetting_attention(*inputs, backend=backend, **options)

    inputs = problem()
    far = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    assert torch.equal(far(*inputs, window=10**30, sink=10**30), run(*inputs, window=6, sink=6))


B, S, H, HKV, D = 2, 300, 4, 2, 16
q, k, v = (torch.randn(B, n, heads, D) for n, heads in ((1, H), (S, HKV), (S, HKV)))
hi, lo = (torch.zeros(B, H, S + 36)[..., :S] for _ in range(2))
start = torch.tensor([0, 17])
TENSORS = {"q": q, "k": k, "v": v, "hi": hi, "lo": lo}
RIGHT = {"seq_start": start, "window": 1, "sink": 1, "softcap": 1.0, "horizon": 9.0, "scale": 1.0}
REFUSED = (
    ("seq_start must lie", {}, {"seq_start": start + 290}),
    ("seq_start must be", {}, {"seq_start": start.float()}),
    ("c_hi and c_lo must be", {"hi": hi[:, :, 1:]}, {}),
    ("c_hi and c_lo must be", {"lo": lo[:, :, 1:]}, {}),
    ("must be float32", {"lo": lo.double()}, {}),
    ("same strides", {"lo": lo.contiguous()}, {}),
    ("the last 1", {name: x.mT.contiguous().mT for name, x in (("hi", hi), ("lo", lo))}, {}),
    ("on one device", {"lo": torch.empty_strided(lo.shape, lo.stride(), device="meta")}, {}),
    ("one shape", {"v": v[:, 1:]}, {}),
    ("one floating dtype", {"v": v.double()}, {}),
    ("multiple of", {"q": q[:, :, :3], "hi": hi[:, :3], "lo": lo[:, :3]}, {}),
    ("T <= S", {"k": k[:, :0], "v": v[:, :0], "hi": hi[:, :, :0], "lo": lo[:, :, :0]}, {}),
    ("tokens, heads, head_dim", {"k": k[0]}, {}),
)


@pytest.mark.parametrize(("message", "arguments", "options"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_argument_of_decoding_is_refused_by_name(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        decode_attention(*(TENSORS | arguments).values(), **RIGHT | options)
