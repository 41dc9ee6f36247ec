"""Who is measured: each contender set up on a problem's tensors, as (inputs, gradient of the output, forward)."""

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from bench_problems import HORIZON, Decode, Problem


def draw_gates(kind: str, B: int, T: int, H: int) -> torch.Tensor:
    """Return log_f (B, T, H): open (none forgets), short (some 20 tokens), mixed (heads from short to none)."""
    logits = torch.randn(B, T, H, device="cuda")
    if kind == "open":
        return torch.zeros_like(logits)
    shift = 4 if kind == "short" else torch.linspace(2, 14, H, device="cuda")
    return F.logsigmoid(logits + shift)


def tensors(p: Problem, dtype=torch.bfloat16) -> dict:
    """Return q, k, v, do and log_f, and cu_seqlens for packed documents, fresh and random."""
    q, do = (torch.randn(p.B, p.T, p.H, p.D, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(p.B, p.T, p.Hkv, p.D, device="cuda", dtype=dtype) for _ in range(2))
    x: dict = {"q": q, "k": k, "v": v, "do": do, "log_f": draw_gates(p.gates, p.B, p.T, p.H), "cu_seqlens": None}
    if p.document:
        x["cu_seqlens"] = torch.arange(0, p.T + 1, p.document, device="cuda", dtype=torch.int32)
    return x


def leaves(x: dict) -> list[torch.Tensor]:
    return [x[n].detach().requires_grad_() for n in ("q", "k", "v", "log_f")]


def ours(x, **options):
    import fox_kernels

    inputs = leaves(x)
    return inputs, x["do"], lambda: fox_kernels.forgetting_attention(*inputs, cu_seqlens=x["cu_seqlens"], **options)


def fla(x):
    from fla.ops.forgetting_attn import parallel_forgetting_attn
    from fla.ops.utils import cumsum
    from triton.testing import do_bench

    # Its sums try 48 configurations in either direction, anew for every batch size and number of heads: 20 ms for each.
    cumsum.chunk_global_cumsum_scalar_kernel.fn._do_bench = partial(do_bench, warmup=5, rep=20)
    inputs = leaves(x)
    return inputs, x["do"], lambda: parallel_forgetting_attn(*inputs, cu_seqlens=x["cu_seqlens"])


def heads_first(x, repeat=False):
    """q, k, v as leaves and do in the layout (B, H, T, D), contiguous; with `repeat` a kv head for every query head."""
    q, k, v, do = (x[n].detach().transpose(1, 2) for n in ("q", "k", "v", "do"))
    if repeat:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return [t.contiguous().requires_grad_() for t in (q, k, v)], do.contiguous()


def official(x, module: ModuleType, threshold=None):
    inputs, do = heads_first(x, repeat=True)
    inputs.append(x["log_f"].detach().transpose(1, 2).contiguous().requires_grad_())
    return inputs, do, lambda: module.forgetting_attention(*inputs, head_first=True, adaptive_threshold=threshold)


def sdpa(x, backend):
    inputs, do = heads_first(x)
    grouped = inputs[0].shape[1] != inputs[1].shape[1]

    def run():
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

    return inputs, do, run


def load_official(path: str) -> ModuleType:
    """Return the official kernel's module from its file."""
    spec = importlib.util.spec_from_file_location("official_forgetting_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setups(official_path: str | None, names: tuple[str, ...]) -> dict[str, Callable]:
    """Return name -> what sets a contender up on `tensors`, for the names given."""
    backends = torch.nn.attention.SDPBackend
    table: dict[str, Callable] = {
        "ours": ours,
        HORIZON: lambda x: ours(x, horizon=16.0),
        "plain Triton": lambda x: ours(x, backend="triton"),
        "fla": fla,
        "FlashAttention-2, no gate": lambda x: sdpa(x, backends.FLASH_ATTENTION),
        "cuDNN, no gate": lambda x: sdpa(x, backends.CUDNN_ATTENTION),
    }
    if official_path and any(n.startswith("official") for n in names):
        module = load_official(official_path)
        table["official"] = lambda x: official(x, module)
        table["official, pruned"] = lambda x: official(x, module, "auto")
    return {n: setup for n, setup in table.items() if n in names}


def decoding(p: Decode):
    """Return (one decoding step, the bytes it has to read, what of the cache is live): K, V and both floats of c.

    The cache has heads before tokens, as a model's. Gates that forget come with a horizon of 16 nats.
    """
    from fox_kernels import decode_attention
    from fox_kernels.common import cumsum

    q = torch.randn(p.batch, 1, p.H, p.D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(p.batch, p.Hkv, p.T, p.D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    c = cumsum.cumulative(draw_gates(p.gates, p.batch, p.T, p.H))
    options: dict = {}
    live = p.batch * p.Hkv * p.T
    if p.gates != "open":
        options = {"horizon": 16.0}
        fall = (c[0][..., -1:] - c[0]).unflatten(1, (p.Hkv, -1)).amax(2)  # base 2, of the group's slowest head
        live = int((fall > -16.0 * math.log2(math.e)).sum())
    per_key = 2 * p.D * 2 + 2 * 4 * (p.H // p.Hkv)

    def step():
        return decode_attention(q, k, v, *c, **options)

    return step, live * per_key, live / (p.batch * p.Hkv * p.T)
