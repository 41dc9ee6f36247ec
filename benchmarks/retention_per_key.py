"""Trains and judges an arm whose keys forget one by one: the ceiling that forget gates are held against.

    python benchmarks/retention_per_key.py RUNS/retention --recipe RECIPE --dev dev.jsonl.xz
        --haystack haystack.jsonl.xz [--share 0.16] [--pressure 0.0] [--only train,needle-easy,...] [a.b=value ...]
    python benchmarks/retention_per_key.py --check       # the kernels against float32 on this GPU, in seconds

A forget gate at token u decays all keys before u alike. Here (as in TRIM-KV) the same module, fed by the same hidden
state, says how fast its own key fades, so that one head can keep a needle and drop its neighbours:

    s_ij = scale q_i . k_j + (i - j) log beta_j,    key j counts while (i - j) log beta_j > -horizon

with i - j in tokens of the document, also where positions skip, and beta = 1 for a document's first token. Constant
gates are the same model in both forms, so that from `init: measured` both arms start alike. Recipe, rows, optimizer
and evaluations are retrofox's own: only `attend` of its model code is replaced, in this process. `generate` is not
served, since the caches of retrofox free what a gate has forgotten.

A budget: once the cache left at 32k, mean over keys of min(1, horizon / |log beta| / 32768), exceeds `--share`, the
gradient of weight * mean (1 - e^-x) / x, x = 32768 |log beta| / horizon, is added; the weight starts at `--pressure`
and moves by a tenth of the excess in each step, the target from 1 to `--share` within half of the stage.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from transformers import AutoConfig

from retrofox.config.reading import load_recipe
from retrofox.data.windows import choose_windows
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.live_share import hear_gates
from retrofox.evaluation.needle import needle
from retrofox.loading.loaded_model import open_model
from retrofox.model import modeling_fox
from retrofox.planning.live_share import LENGTHS
from retrofox.support.files import write_json
from retrofox.training.train import train

Tensor = torch.Tensor
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
PARTS = ("needle-easy", "needle-standard", "eval", "eval-128k", "gates")
SPAN = 32768
"""Tokens of the text whose cache has the budget."""


@triton.jit
def _tile(q, k, log_beta, start, m, n, N, scale, horizon):
    """(logits in base 2, which of them are alive) of queries m and keys n."""
    age = (m[:, None] - n[None, :]).to(tl.float32)
    decay = age * log_beta[None, :]
    alive = (age >= 0) & (n[None, :] >= start[:, None]) & (decay > -horizon) & (m[:, None] < N)
    return (tl.dot(q, tl.trans(k)) * scale + decay) * LOG2_E, alive


@triton.jit
def _forward(Q, K, V, B, START, OUT, LSE, N, H, G, scale, horizon, D: tl.constexpr, SIZE: tl.constexpr):
    first, h, d = tl.program_id(0) * SIZE, tl.program_id(1), tl.arange(0, D)
    m = first + tl.arange(0, SIZE)
    begin = tl.load(START + m, mask=m < N, other=N)
    place = (m[:, None] * H + h) * D + d[None, :]
    q = tl.load(Q + place, mask=m[:, None] < N, other=0.0)
    top, total = tl.full([SIZE], -1e30, tl.float32), tl.zeros([SIZE], tl.float32)
    out = tl.zeros([SIZE, D], tl.float32)
    for left in range(tl.min(begin, 0) // SIZE * SIZE, tl.minimum(first + SIZE, N), SIZE):
        n = left + tl.arange(0, SIZE)
        log_beta = tl.load(B + (h // G) * N + n, mask=n < N, other=0.0)
        if tl.max(tl.maximum(first - n, 0).to(tl.float32) * log_beta, 0) > -horizon:
            source = (n[:, None] * (H // G) + h // G) * D + d[None, :]
            k = tl.load(K + source, mask=n[:, None] < N, other=0.0)
            v = tl.load(V + source, mask=n[:, None] < N, other=0.0)
            s, alive = _tile(q, k, log_beta, begin, m, n, N, scale, horizon)
            new = tl.maximum(top, tl.max(tl.where(alive, s, -1e30), 1))
            p = tl.where(alive, tl.exp2(s - new[:, None]), 0.0)
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            top = new
    total = tl.where(total > 0, total, 1.0)
    tl.store(OUT + place, (out / total[:, None]).to(q.dtype), mask=m[:, None] < N)
    tl.store(LSE + h * N + m, top + tl.log2(total), mask=m < N)


@triton.jit
def _d_query(
    Q, K, V, B, START, DO, LSE, DELTA, DQ, N, H, G, scale, horizon,
    D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first, h, d = tl.program_id(0) * SIZE, tl.program_id(1), tl.arange(0, D)
    m = first + tl.arange(0, SIZE)
    begin = tl.load(START + m, mask=m < N, other=N)
    place = (m[:, None] * H + h) * D + d[None, :]
    q = tl.load(Q + place, mask=m[:, None] < N, other=0.0)
    do = tl.load(DO + place, mask=m[:, None] < N, other=0.0)
    lse = tl.load(LSE + h * N + m, mask=m < N, other=0.0)
    delta = tl.load(DELTA + h * N + m, mask=m < N, other=0.0)
    dq = tl.zeros([SIZE, D], tl.float32)
    for left in range(tl.min(begin, 0) // SIZE * SIZE, tl.minimum(first + SIZE, N), SIZE):
        n = left + tl.arange(0, SIZE)
        log_beta = tl.load(B + (h // G) * N + n, mask=n < N, other=0.0)
        if tl.max(tl.maximum(first - n, 0).to(tl.float32) * log_beta, 0) > -horizon:
            source = (n[:, None] * (H // G) + h // G) * D + d[None, :]
            k = tl.load(K + source, mask=n[:, None] < N, other=0.0)
            v = tl.load(V + source, mask=n[:, None] < N, other=0.0)
            s, alive = _tile(q, k, log_beta, begin, m, n, N, scale, horizon)
            p = tl.where(alive, tl.exp2(s - lse[:, None]), 0.0)
            ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k)
    tl.store(DQ + place, (dq * scale).to(q.dtype), mask=m[:, None] < N)


@triton.jit
def _d_key(
    Q, K, V, B, START, DO, LSE, DELTA, END, DK, DV, DB, N, H, G, scale, horizon,
    D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first, kv, d = tl.program_id(0) * SIZE, tl.program_id(1), tl.arange(0, D)
    n = first + tl.arange(0, SIZE)
    source = (n[:, None] * (H // G) + kv) * D + d[None, :]
    k = tl.load(K + source, mask=n[:, None] < N, other=0.0)
    v = tl.load(V + source, mask=n[:, None] < N, other=0.0)
    log_beta = tl.load(B + kv * N + n, mask=n < N, other=-1e4)
    # queries beyond the document's end, or beyond what the longest-lived of these keys reaches, see none of them
    last = tl.minimum(n.to(tl.float32) + horizon / tl.maximum(-log_beta, 1e-7) + 1.0, 2e9).to(tl.int32)
    high = tl.max(tl.where(n < N, tl.minimum(tl.load(END + n, mask=n < N, other=0), last), 0), 0)
    dk, dv, db = tl.zeros([SIZE, D], tl.float32), tl.zeros([SIZE, D], tl.float32), tl.zeros([SIZE], tl.float32)
    for at in range(G):
        h = kv * G + at
        for low in range(first, high, SIZE):
            m = low + tl.arange(0, SIZE)
            if tl.max(tl.maximum(low - n, 0).to(tl.float32) * log_beta, 0) > -horizon:
                place = (m[:, None] * H + h) * D + d[None, :]
                q = tl.load(Q + place, mask=m[:, None] < N, other=0.0)
                do = tl.load(DO + place, mask=m[:, None] < N, other=0.0)
                lse = tl.load(LSE + h * N + m, mask=m < N, other=0.0)
                delta = tl.load(DELTA + h * N + m, mask=m < N, other=0.0)
                begin = tl.load(START + m, mask=m < N, other=N)
                # keys by queries: Triton 3.4 to 3.7 can miscompile a product of a transposed product on Hopper
                age = (m[None, :] - n[:, None]).to(tl.float32)
                decay = age * log_beta[:, None]
                alive = (age >= 0) & (n[:, None] >= begin[None, :]) & (decay > -horizon) & (m[None, :] < N)
                s = (tl.dot(k, tl.trans(q)) * scale + decay) * LOG2_E
                p = tl.where(alive, tl.exp2(s - lse[None, :]), 0.0)
                dv += tl.dot(p.to(do.dtype), do)
                ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
                dk += tl.dot(ds.to(q.dtype), q)
                db += tl.sum(ds * age, 1)
    tl.store(DK + source, (dk * scale).to(k.dtype), mask=n[:, None] < N)
    tl.store(DV + source, dv.to(k.dtype), mask=n[:, None] < N)
    tl.store(DB + kv * N + n, db, mask=n < N)


KERNELS: Any = (_forward, _d_query, _d_key)
SIZE = 64
"""Queries and keys of a tile: with head dimension 64 the largest without register spills on Hopper."""


class Retention(torch.autograd.Function):
    """The attention of N tokens that are documents one after the other, by the kernels above.

    q (N, H, D), k and v (N, Hkv, D), log_beta (Hkv, N) float32 <= 0, start and end (N,) int32 -> (N, H, D).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, start: Tensor, end: Tensor, *rest: float):
        q, k, v, log_beta = (x.contiguous() for x in (q, k, v, log_beta))
        (length, heads, dim), group = q.shape, q.shape[1] // k.shape[1]
        out, lse = torch.empty_like(q), q.new_empty(heads, length, dtype=torch.float32)
        grid = (triton.cdiv(length, SIZE), heads)
        KERNELS[0][grid](q, k, v, log_beta, start, out, lse, length, heads, group, *rest, D=dim, SIZE=SIZE)
        ctx.save_for_backward(q, k, v, log_beta, start, end, out, lse)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):  # type: ignore[override]
        q, k, v, log_beta, start, end, out, lse = ctx.saved_tensors
        (length, heads, dim), kv_heads = q.shape, k.shape[1]
        d_out = d_out.contiguous()
        delta = (d_out.float() * out.float()).sum(-1).T.contiguous()
        dq, dk, dv, db = (torch.empty_like(x) for x in (q, k, v, log_beta))
        sizes = (length, heads, heads // kv_heads, *ctx.rest)
        tiles = triton.cdiv(length, SIZE)
        given = (q, k, v, log_beta, start, d_out, lse, delta)
        KERNELS[1][tiles, heads](*given, dq, *sizes, D=dim, SIZE=SIZE)
        KERNELS[2][tiles, kv_heads](*given, end, dk, dv, db, *sizes, D=dim, SIZE=SIZE)
        return dq, dk, dv, db, *[None] * (2 + len(ctx.rest))


retention: Any = Retention.apply


def reference(q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, start: Tensor, scale: float, horizon: float) -> Tensor:
    """The same by one softmax, the queries being the last of the N tokens."""
    group, places = q.shape[1] // k.shape[1], torch.arange(k.shape[0], device=q.device)
    k, v, log_beta = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), log_beta.repeat_interleave(group, 0)
    age = places[len(places) - len(q) :, None] - places
    decay = age * log_beta[:, None]
    alive = (age >= 0) & (places >= start[:, None]) & (decay > -horizon)
    scores = torch.einsum("ihd,jhd->hij", q, k).float() * scale + decay
    weights = scores.masked_fill(~alive, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v)


by_softmax: Any = reference
gated = modeling_fox.attend


def attend(call: Any) -> Tensor:
    """`modeling_fox.attend` with the gates' log f taken for log beta of their own keys; shapes as in its `Call`."""
    options, (batch, heads, count, _), total = call.options, call.query.shape, call.key.shape[2]
    if options["horizon"] is None:  # the model in its base's form, in which heads are measured
        return gated(call)
    assert call.mask is None, "a mask"
    assert options["window"] is None, "a sliding window"
    assert options["softcap"] is None, "a softcap"
    assert call.seq_start is None, "left padding"
    log_beta = call.gates.log_f
    assert log_beta.shape[1] == total, "this cache has freed keys: call the model, not generate"
    bounds = call.cu_seqlens
    if bounds is None:
        bounds = torch.arange(0, (batch + 1) * total, total, device=log_beta.device)
    first, sizes = bounds[:-1].long(), bounds.diff().long()
    log_beta = log_beta[..., :: heads // call.key.shape[1]].float().clamp_min(-1e4)  # one for each kv head
    if options["sink"]:
        is_first = torch.zeros(batch * total, dtype=torch.bool, device=log_beta.device)
        is_first[first] = True
        log_beta = log_beta.masked_fill(is_first.view(batch, total, 1), 0.0)
    if PRESSURE is not None and log_beta.requires_grad:
        log_beta = PRESSURE.press(log_beta)
    start = first.repeat_interleave(sizes, output_size=batch * total)
    scale = call.query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    rest = (float(scale), float(options["horizon"]))
    rows = tuple(x.transpose(1, 2) for x in (call.query, call.key, call.value))
    if call.query.is_cuda and count == total:
        end = (first + sizes).repeat_interleave(sizes, output_size=batch * total)
        q, k, v = (x.flatten(0, 1) for x in rows)
        out = retention(q, k, v, log_beta.flatten(0, 1).T, start.int(), end.int(), *rest)
        return out.view(batch, total, heads, -1)  # type: ignore[union-attr]
    starts = (start.view(batch, total) - total * torch.arange(batch, device=start.device)[:, None])[:, -count:]
    return torch.stack([by_softmax(*x, b.T, s, *rest) for *x, b, s in zip(*rows, log_beta, starts, strict=True)])


class Pressure:
    """The budget's gradient, and the share and the weight of every step in `history`.

    Args:
        calls: of `attend` with gradients in one optimizer step; steps: of the stage.
    """

    def __init__(self, share: float, weight: float, horizon: float, calls: int, steps: int):
        self.share, self.horizon, self.calls, self.steps = share, horizon, calls, steps
        self.weight: Any = weight
        self.heard: list[Tensor] = []
        self.history: list[Tensor] = []

    def press(self, log_beta: Tensor) -> Tensor:
        found = log_beta.detach()
        self.heard.append((self.horizon / SPAN / found.abs().clamp_min(1e-9)).clamp_max(1.0).mean())
        if len(self.heard) == self.calls:
            share, self.heard = torch.stack(self.heard).mean(), []
            done = min(1.0, 2 * len(self.history) / self.steps)
            target = 1.0 - (1.0 - self.share) * done
            self.weight = torch.as_tensor(self.weight + 0.1 * (share - target)).clamp_min(0.0)
            self.history.append(torch.stack((share, self.weight)))
        x = (found * (-SPAN / self.horizon)).clamp_min(1e-3)
        slope = ((1 + x) * torch.exp(-x) - 1) / x.square() * (-SPAN / self.horizon)  # of (1 - e^-x) / x by log beta
        added = self.weight / (self.calls * found.numel()) * slope
        log_beta.register_hook(lambda grad: grad + added)
        return log_beta


PRESSURE: Pressure | None = None


def check(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, length: int = 512, seed: int = 0) -> float:
    """The largest error of output and gradients beside float32, by the largest value of each; exits where it is bad."""
    generator, worst = torch.Generator().manual_seed(seed), 0.0
    made = [torch.randn(length, heads, 64, generator=generator).to(device) for heads in (6, 2, 2, 6)]
    log_beta = -torch.exp(torch.empty(2, length).uniform_(-9, 0, generator=generator)).to(device)
    log_beta[:, ::5] = 0.0
    start = torch.zeros(length, dtype=torch.int32, device=device)
    cut = 3 * length // 8
    start[cut:], end = cut, torch.full_like(start, length)
    end[:cut] = cut
    found = []
    for exact in (False, True):
        q, k, v, d_out = (x.to(dtype) if not exact else x.to(dtype).float() for x in made)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_beta)]
        rest = (0.125, 8.0)
        given = (*leaves, start, *rest) if exact else (*leaves, start, end, *rest)
        out = (by_softmax if exact else retention)(*given)
        found.append([out, *torch.autograd.grad(out, leaves, d_out)])
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "d log beta"), *found, strict=True):
        error = float(((ours.float() - theirs).abs().max() / theirs.abs().max()).detach())
        print(f"{name}: {error:.1e} of the largest value", flush=True)
        worst = max(worst, error)
    if not worst < 0.03:
        raise SystemExit(f"the kernels are wrong by {worst:.1e}")
    return worst


def live(model: str, dev: str, horizon: float, longest: int) -> dict[str, Any]:
    """What is alive after texts of each length: operations, cache, and the cache of every kv head, layer by layer."""
    opened = open_model(model)
    windows = choose_windows(dev, opened.tokenizer, longest, min_tokens=longest, max_documents=3)
    rows, by_head = [], {}
    found: dict[int, list[tuple[Tensor, Tensor]]] = {length: [] for length in LENGTHS.values() if length <= longest}
    for gates in hear_gates(opened, windows, progress=False):
        for length, documents in found.items():
            log_beta = torch.stack([gates[layer][:length] for layer in sorted(gates)]).double()  # (layers, T, Hkv)
            log_beta[:, 0] = 0.0
            reach = torch.ceil(horizon / log_beta.abs().clamp_min(1e-12))
            seen = torch.arange(length, 0, -1, dtype=torch.float64)[:, None]  # queries that come at or after each key
            pairs = torch.minimum(reach, seen).sum(1).mean() / (length * (length + 1) / 2)
            documents.append((pairs, (reach >= seen).double().mean(1)))
    for length, documents in found.items():
        pairs, cache = (torch.stack(x).mean(0) for x in zip(*documents, strict=True))
        by_head[str(length)] = cache.tolist()
        shares = {"ops": float(pairs), "cache": float(cache.mean())}
        rows.append({"length": length, "documents": len(documents), **shares})
    return {"live_share": {"horizon": horizon, "lengths": rows}, "cache_by_head": by_head}


def judge(folder: Path, part: str, options: argparse.Namespace, horizon: float) -> None:
    """Writes FOLDER/PART as `benchmarks/retrofit_arm.py` has it, and the live share into gates/gates.json."""
    model, out = str(folder / "model"), folder / part
    if part == "gates":
        out.mkdir(exist_ok=True)
        write_json(out / "gates.json", live(model, options.dev, horizon, options.longest))
    elif part.startswith("eval"):
        length, documents = (options.longest, 6) if part == "eval-128k" else (options.length, 16)
        which: dict[str, Any] = {"min_tokens": length, "max_documents": documents, "controls": False}
        evaluate(model, data=options.dev, length=length, out=out, **which)
    else:
        which = {"mode": part.partition("-")[2], "trials": options.trials, "seed": 7}
        needle(model, data=options.haystack, lengths=options.lengths, out=out, **which)


def main(given: list[str] | None = None) -> None:
    global PRESSURE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the arm's own: its name is the arm's")
    parser.add_argument("--recipe")
    parser.add_argument("--dev", help="documents for losses")
    parser.add_argument("--haystack", help="essays to hide needles in")
    parser.add_argument("--share", type=float, default=0.16, help="of the keys, to be left at 32k")
    parser.add_argument("--pressure", type=float, default=0.0, help="weight of the budget at the start")
    parser.add_argument("--trials", type=int, default=20, help="prompts at each of five depths, by length")
    lengths = [1024, 4096, 8192, 16384, 32768]
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths, help="of the needles' contexts")
    parser.add_argument("--length", type=int, default=32768, help="of the documents for the first loss")
    parser.add_argument("--longest", type=int, default=131072, help="and for the second")
    parser.add_argument("--only", default="", help="parts with commas between: train, " + ", ".join(PARTS))
    parser.add_argument("--check", action="store_true", help="only compare the kernels with float32")
    parser.add_argument("changes", nargs="*", help="a.b=value")
    options = parser.parse_intermixed_args(given)
    if torch.cuda.is_available():
        check()
    if options.check:
        return
    if not (options.folder and options.recipe and options.dev and options.haystack):
        parser.error("give the arm's folder, --recipe, --dev and --haystack")
    folder, only = options.folder, [part for part in options.only.split(",") if part] or ["train", *PARTS]
    recipe = load_recipe(options.recipe, [f"output={folder}", *options.changes])
    stage, horizon = recipe.stages[0], float(recipe.fox.horizon) if recipe.fox and recipe.fox.horizon else 0.0
    if not (recipe.fox and horizon and recipe.fox.gate_heads == "kv" and len(recipe.stages) == 1):
        parser.error("the recipe needs one stage, gate_heads: kv and a horizon")
    modeling_fox.attend = attend
    for part in only:
        started = time.perf_counter()
        if part == "train":
            batch = stage.batch_tokens or stage.sequence_length * stage.micro_batch
            layers = AutoConfig.from_pretrained(recipe.model).num_hidden_layers
            calls = layers * (batch // (stage.sequence_length * stage.micro_batch))
            PRESSURE = Pressure(options.share, options.pressure, horizon, calls, stage.tokens // batch)
            train(recipe)
            share, weight = torch.stack(PRESSURE.history).T.tolist()
            write_json(folder / "pressure.json", {"share": share, "weight": weight})
            PRESSURE = None
        else:
            judge(folder, part, options, horizon)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
