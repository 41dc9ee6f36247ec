"""Calls of decode_attention of one kind are checked and planned once: what differs from call to call stays right.

The interpreter has to be on before the kernels are imported, so one subprocess runs everything and reports as JSON.
"""

# Wrong types are the point, and the operator returns o or (o, lse):
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import json
import sys
import traceback
from pathlib import Path

import pytest
import torch
from fox_kernels import api, decode_attention, reference

pytest.importorskip("triton", reason="Triton is not installed here")

B, H, HKV, D = 2, 4, 2, 16


def problem(S: int, dtype=torch.float32, layout: str = "room", T: int = 1):
    """Return q, k, v, log_f and both floats of c; k and v slices of a buffer, or with strides that change with S."""
    from twins import cumulative_torch

    q, k, v = (torch.randn(B, n, heads, D).to(dtype) for n, heads in ((T, H), (S, HKV), (S, HKV)))
    log_f = -0.1 * torch.rand(B, S, H)
    hi, lo = cumulative_torch(log_f)
    if layout == "heads before tokens":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    if layout == "room":
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 40), value=float("nan"))[:, :S] for x in (k, v))
        hi, lo = (torch.nn.functional.pad(x, (0, 336 - S), value=float("nan"))[..., :S] for x in (hi, lo))
    return q, k, v, log_f, hi, lo


def check_every_length() -> None:
    """With any length and layout, in any order, o is that of the reference; lengths and layouts make no new kind."""
    from fox_kernels.decoding.search import key_bound

    for options in ({}, {"window": 290, "sink": 10**10}, {"prune": -20.0, "softcap": 20, "scale": -0.2}):
        before = len(api._decoders)
        for S, layout in ((280, "room"), (281, "room"), (300, "tokens"), (301, "heads before tokens"), (257, "room")):
            q, k, v, log_f, *c = problem(S, layout=layout)
            bound = {"k_bound": key_bound(k)} if "prune" in options else {}
            o = decode_attention(q, k, v, *c, **options, **bound)
            torch.testing.assert_close(o, reference.forgetting_attention(q, k, v, log_f, **options))
        assert len(api._decoders) == before + 1


def check_other_options() -> None:
    """After one call another with other options, dtype, padding or number of queries isn't answered with its kind."""
    q, k, v, log_f, *c = problem(300)
    start = torch.tensor([0, 17], dtype=torch.int32)
    for options in ({}, {"window": 5}, {"window": 6}, {"scale": 0.5}, {"sink": 3}, {"softcap": 1.0}, {"softcap": 1}):
        for padding in ({}, {"seq_start": start}, {"seq_start": start.long() + 1}):
            o = decode_attention(q, k, v, *c, **options, **padding)
            torch.testing.assert_close(o, reference.forgetting_attention(q, k, v, log_f, **options, **padding))
    for dtype, T in ((torch.float16, 1), (torch.float32, 3), (torch.float32, 1)):
        q, k, v, log_f, *c = problem(300, dtype, T=T)
        o = decode_attention(q, k, v, *c)
        assert o.dtype == dtype
        torch.testing.assert_close(o, reference.forgetting_attention(q, k, v, log_f), atol=2e-3, rtol=2e-3)
    shifted = torch.randn(1 + q.numel())[1:].view(q.shape)  # not at a multiple of 16 bytes
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    for x in (shifted, turned, torch.nn.Parameter(q, requires_grad=False)):
        o = decode_attention(x, k, v, *c)
        torch.testing.assert_close(o, reference.forgetting_attention(x, k, v, log_f))


def check_refusals() -> None:
    """What is wrong is refused after right calls too, and what equals a right option is not taken for it."""
    q, k, v, _, hi, lo = problem(300)
    start, bound = torch.tensor([0, 17]), torch.full((B, HKV), 9.0)
    right = {"seq_start": start, "window": 1, "sink": 1, "softcap": 1.0, "prune": -1.0, "scale": 1.0, "k_bound": bound}
    tensors = {"q": q, "k": k, "v": v, "hi": hi, "lo": lo}
    decode_attention(*tensors.values(), **right)
    for message, arguments, options in (
        ("window must be", {}, {"window": True}),
        ("window must be", {}, {"window": 1.0}),
        ("sink must be", {}, {"sink": True}),
        ("sink must be", {}, {"sink": [1]}),
        ("softcap must be", {}, {"softcap": True}),
        ("scale must be", {}, {"scale": True}),
        ("scale must be", {}, {"scale": float("nan")}),
        ("prune is", {}, {"prune": 1.0}),
        ("seq_start must lie", {}, {"seq_start": start + 290}),
        ("seq_start must be", {}, {"seq_start": start.float()}),
        ("seq_start must be", {}, {"seq_start": start[:1]}),
        ("seq_start must be", {}, {"seq_start": [0, 17]}),
        ("seq_start must be on", {}, {"seq_start": start.to("meta")}),
        ("k_bound must be", {}, {"k_bound": bound.double()}),
        ("k_bound must be", {}, {"k_bound": bound[:1]}),
        ("k_bound must be", {}, {"k_bound": bound.to("meta")}),
        ("k_bound must be", {}, {"k_bound": 9.0}),
        ("c_hi and c_lo must be", {"hi": hi[:, :, 1:]}, {}),
        ("c_hi and c_lo must be", {"lo": lo[:, :, 1:]}, {}),
        ("must be float32", {"lo": lo.double()}, {}),
        ("same strides", {"lo": lo.contiguous()}, {}),
        ("on one device", {"lo": torch.empty_strided(lo.shape, lo.stride(), device="meta")}, {}),
        ("on one device", {"v": v.to("meta")}, {}),
        ("one shape", {"v": v[:, 1:]}, {}),
        ("one floating dtype", {"v": v.double()}, {}),
        ("multiple of", {"q": q[:, :, :3], "hi": hi[:, :3], "lo": lo[:, :3]}, {}),
        ("T <= S", {"k": k[:, :0], "v": v[:, :0], "hi": hi[:, :, :0], "lo": lo[:, :, :0]}, {}),
        ("tokens, heads, head_dim", {"k": k[0]}, {}),
        ("k must be a torch.Tensor", {"k": None}, {}),
        ("no gradient", {"q": q.clone().requires_grad_()}, {}),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(*(tensors | arguments).values(), **right | options)
    kinds = len(api._decoders)
    decode_attention(*tensors.values(), **right)
    assert len(api._decoders) == kinds


def check_memory() -> None:
    """Of kinds no more are kept than MAX_DECODERS; refused calls and searches by torch add none."""
    q, k, v, _, *c = problem(260)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_decoders", {})
        patch.setattr(api, "MAX_DECODERS", 3)
        for n in range(8):
            decode_attention(q, k, v, *c, scale=0.1 * n)
            assert len(api._decoders) == n % 3 + 1
        kept = dict(api._decoders)
        decode_attention(q, k, v, *c, prune=-10.0)
        with pytest.raises(ValueError, match="rows into a tile"):
            decode_attention(q.expand(B, 1, H, D).repeat(1, 40, 1, 1), k, v, *c)
        assert api._decoders == kept


CHECKS = ("every_length", "other_options", "refusals", "memory")


def run_all() -> dict[str, str]:
    """Return the traceback of each check that fails; runs in the subprocess, with the interpreter on."""
    torch.manual_seed(0)
    report = {}
    for check in CHECKS:
        try:
            globals()[f"check_{check}"]()
        except (AssertionError, pytest.fail.Exception):
            report[check] = traceback.format_exc()
    return report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert report.get(check) is None, report[check]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(run_all()))
