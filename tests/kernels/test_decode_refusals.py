"""What `decode_attention` refuses, and why: one wrong argument beside right ones. On any machine."""

# Wrong types are the point:
# pyright: reportArgumentType=false, reportCallIssue=false

import pytest
import torch
from fox_kernels import decode_attention

B, S, H, HKV, D = 2, 300, 4, 2, 16
q, k, v = (torch.randn(B, n, heads, D) for n, heads in ((1, H), (S, HKV), (S, HKV)))
hi, lo = (torch.zeros(B, H, S + 36)[..., :S] for _ in range(2))
start = torch.tensor([0, 17])
TENSORS = {"q": q, "k": k, "v": v, "hi": hi, "lo": lo}
RIGHT = {"seq_start": start, "window": 1, "sink": 1, "softcap": 1.0, "horizon": 9.0, "scale": 1.0}
REFUSED = (
    ("window must be", {}, {"window": True}),
    ("window must be", {}, {"window": 1.0}),
    ("sink must be", {}, {"sink": True}),
    ("sink must be", {}, {"sink": [1]}),
    ("softcap must be", {}, {"softcap": True}),
    ("scale must be", {}, {"scale": True}),
    ("scale must be", {}, {"scale": float("nan")}),
    ("horizon must be", {}, {"horizon": -1.0}),
    ("seq_start must lie", {}, {"seq_start": start + 290}),
    ("seq_start must be", {}, {"seq_start": start.float()}),
    ("seq_start must be", {}, {"seq_start": start[:1]}),
    ("seq_start must be", {}, {"seq_start": [0, 17]}),
    ("seq_start must be on", {}, {"seq_start": start.to("meta")}),
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
)


@pytest.mark.parametrize(("message", "arguments", "options"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_argument_is_refused_by_name(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        decode_attention(*(TENSORS | arguments).values(), **RIGHT | options)
