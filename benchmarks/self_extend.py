"""Longer contexts without training: Self-Extend and dual chunk attention on a plain model, judged as the arms are.

    python benchmarks/self_extend.py BASE RUNS --haystack haystack.jsonl.xz --dev dev.jsonl.xz [--only self-extend]

Both give queries and keys other rotary positions where they are far apart, so that no distance is larger than those
the model was trained on. m is the query's position, n the key's; L the trained length:

    Self-Extend (arXiv 2401.01325)   m - n < W: as it was; else m // G + W - W // G against n // G
    dual chunk (arXiv 2402.17463)    chunks of S; the same chunk: as it was; the chunk before:
                                     min(S + m mod S, L - 1) against n mod S; earlier chunks: L - 1 against n mod S

The softmax is over all keys together: each kind of pair is a dense attention of its own, and these are merged by their
log-sum-exp. A sweep on prompts of another seed chooses W and G, and S, by easy needles found at the longest length,
then by the answers' log-probability. `retrofit_results.py collect` takes RUNS/self-extend/ and RUNS/dual-chunk/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance
from torch import Tensor
from transformers import AttentionInterface

from retrofox.anatomy import inner_model
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.needle import needle
from retrofox.loading.loaded_model import open_model
from retrofox.support.files import write_json

NAME = "untrained-extension"
Rotate = Callable[[Tensor, Tensor], Tensor]
"""(B, H, T, D) and positions (T,) -> rotated."""
Part = tuple[Tensor, Tensor]
"""Output (B, H, T, D) and log-sum-exp (B, H, T), float32, of queries over some of their keys; -inf without any."""


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    """Dense attention by the flash kernel of the device."""
    if query.device.type == "cuda":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = kernel(query.contiguous(), key.contiguous(), value.contiguous(), 0.0, causal, scale=scale)
    return out, lse[..., : query.shape[2]].float()


def place(part: Part, before: int, after: int) -> Part:
    """The part with rows of no keys before and after its own."""
    out, lse = part
    return F.pad(out, (0, 0, before, after)), F.pad(lse, (before, after), value=-torch.inf)


def merge(parts: list[Part]) -> Tensor:
    """The softmax over the keys of all parts: sum_i exp(lse_i - lse) out_i."""
    whole = torch.stack([lse for _, lse in parts]).logsumexp(0)
    merged = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for out, lse in parts:
        merged += (lse - whole).exp()[..., None] * out
    return merged.to(parts[0][0].dtype)


def in_chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, T, D) -> (B, H, chunks, size, D), zeros after the end."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def within_chunks(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = True) -> Part:
    """Attention of each chunk (B, H, chunks, size, D) to the chunk in its place; rows of all chunks in order."""
    out, lse = attend(*(x.flatten(1, 2) for x in (query, key, value)), scale=scale, causal=causal)
    heads = query.shape[1]
    return out.unflatten(1, (heads, -1)).flatten(2, 3), lse.unflatten(1, (heads, -1)).flatten(2, 3)


@dataclass(frozen=True)
class SelfExtend:
    window: int
    group: int

    def reach(self, trained: int) -> int:
        return (trained - self.window) * self.group + self.window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rotate: Rotate, scale: float) -> Tensor:
        length, window = query.shape[2], self.window
        place_of = torch.arange(length, device=query.device)
        near_query, near_key = rotate(query, place_of), rotate(key, place_of)
        if length <= window:
            return attend(near_query, near_key, value, scale, causal=True)[0]
        # Neighbours, in chunks as long as the window: those in the query's own chunk, and those in the one before that
        # lie after the query's place. Read backwards, these come before it, as a causal mask has them.
        chunks = [in_chunks(x, window) for x in (near_query, near_key, value)]
        own = within_chunks(*chunks, scale=scale)
        back_query, back_key, back_value = (x.flip(3) for x in chunks)
        out, lse = within_chunks(back_query[:, :, 1:, 1:], back_key[:, :, :-1, :-1], back_value[:, :, :-1, :-1], scale)
        out, lse = out.unflatten(2, (-1, window - 1)).flip(3), lse.unflatten(2, (-1, window - 1)).flip(3)
        out, lse = F.pad(out, (0, 0, 0, 1)).flatten(2, 3), F.pad(lse, (0, 1), value=-torch.inf).flatten(2, 3)
        before = place((out, lse), window, 0)
        # All keys at W and beyond: the first T - W keys, causal for the last T - W queries.
        far_query = rotate(query[:, :, window:], place_of[window:] // self.group + window - window // self.group)
        far_key = rotate(key[:, :, : length - window], place_of[: length - window] // self.group)
        far = attend(far_query, far_key, value[:, :, : length - window], scale, causal=True)
        near = [(out[:, :, :length], lse[:, :, :length]) for out, lse in (own, before)]
        return merge([*near, place(far, window, 0)])


@dataclass(frozen=True)
class DualChunk:
    chunk: int
    trained: int

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rotate: Rotate, scale: float) -> Tensor:
        length, size = query.shape[2], self.chunk
        place_of = torch.arange(length, device=query.device) % size
        key = rotate(key, place_of)
        own = rotate(query, place_of)
        if length <= size:
            return attend(own, key, value, scale, causal=True)[0]
        keys, values = in_chunks(key, size), in_chunks(value, size)
        parts = [within_chunks(in_chunks(own, size), keys, values, scale)]
        next_query = in_chunks(rotate(query, (place_of + size).clamp(max=self.trained - 1)), size)[:, :, 1:]
        parts.append(place(within_chunks(next_query, keys[:, :, :-1], values[:, :, :-1], scale, causal=False), size, 0))
        far_query = rotate(query, torch.full_like(place_of, self.trained - 1))
        for start in range(2 * size, length, size):
            rows, seen = far_query[:, :, start : start + size], start - size
            far = attend(rows, key[:, :, :seen], value[:, :, :seen], scale, causal=False)
            parts.append(place(far, start, length - start - rows.shape[2]))
        return merge([(out[:, :, :length], lse[:, :, :length]) for out, lse in parts])


Method = SelfExtend | DualChunk


@contextmanager
def extended(model: Any, method: Method) -> Iterator[None]:
    """Inside, the plain model attends by the method, over whole texts (no cache); outside it is as it was."""
    rotary: Any = inner_model(model).rotary_emb

    def rotate(x: Tensor, places: Tensor) -> Tensor:
        cos, sin = rotary.forward(x, places[None])  # without the hook below
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if key.shape[2] != query.shape[2]:
            raise ValueError("Self-Extend and dual chunk attention read whole texts here, without a cache")
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return method(query, key, value, rotate, options["scaling"]).transpose(1, 2), None

    def unrotated(_: Any, __: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.ones_like(found[0]), torch.zeros_like(found[1])

    before = model.config._attn_implementation
    hook = rotary.register_forward_hook(unrotated)
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        hook.remove()
        model.set_attn_implementation(before)


def candidates(trained: int, longest: int) -> dict[str, list[Method]]:
    """By arm: what the sweep tries; only what reaches the longest length without unseen distances."""
    pairs = [SelfExtend(trained // part, group) for part in (2, 4, 8) for group in (6, 8, 16)]
    return {
        "self-extend": [pair for pair in pairs if pair.reach(trained) >= longest],
        "dual-chunk": [DualChunk(trained * part // 8, trained) for part in (2, 4, 6)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a plain model")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--haystack", required=True, help="essays to hide needles in")
    parser.add_argument("--dev", required=True, help="documents for the loss")
    parser.add_argument(
        "--lengths", default="1024,4096,8192,16384,32768", type=lambda x: [int(n) for n in x.split(",")]
    )
    parser.add_argument("--trials", type=int, default=20, help="prompts at each of five depths, by length")
    parser.add_argument("--sweep-prompts", type=int, default=10, help="at the longest length, for each candidate")
    parser.add_argument("--documents", type=int, default=16, help="of the longest length, for the loss")
    parser.add_argument("--only", choices=("self-extend", "dual-chunk"))
    options = parser.parse_args()
    opened = open_model(options.base, dtype="bfloat16" if torch.cuda.is_available() else None)  # flash is of 16 bits
    if opened.fox is not None:
        parser.error(f"{options.base} is a converted model: only a plain one is extended")
    longest = max(options.lengths)
    asked: dict[str, Any] = {"data": options.haystack, "mode": "easy", "tokenizer": opened.tokenizer}
    dev: dict[str, Any] = {
        "data": options.dev,
        "length": longest,
        "min_tokens": longest,
        "controls": False,
        "tokenizer": opened.tokenizer,
    }
    for name, methods in candidates(opened.model.config.max_position_embeddings, longest).items():
        if options.only not in (None, name):
            continue
        started, swept = time.time(), []
        for method in methods:
            with extended(opened.model, method):
                found = needle(opened.model, lengths=[longest], trials=1, depths=options.sweep_prompts, seed=0, **asked)
            row = next(iter(found["models"].values()))["modes"]["easy"]["by_length"][0]
            swept.append({**asdict(method), "found": row["found"], "log_probability": row["log_probability"]})
        best = max(range(len(swept)), key=lambda n: (swept[n]["found"], swept[n]["log_probability"]))
        folder = options.runs / name
        folder.mkdir(parents=True, exist_ok=True)
        told = {"method": asdict(methods[best]), "sweep": swept, "seconds_of_sweep": round(time.time() - started)}
        write_json(folder / "untrained.json", {**told, "environment": provenance()})
        print(name, told, flush=True)
        with extended(opened.model, methods[best]):
            for mode in ("easy", "standard"):
                chosen = {**asked, "mode": mode, "trials": options.trials, "depths": 5, "seed": 7}
                needle(opened.model, lengths=options.lengths, out=folder / f"needle-{mode}", **chosen)
                if mode == "easy":  # the loss before what is asked less
                    evaluate(opened.model, max_documents=options.documents, out=folder / "eval", **dev)


if __name__ == "__main__":
    main()
