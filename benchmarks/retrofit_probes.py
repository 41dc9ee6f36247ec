"""Which rotary pairs retrieval needs: untrained probes and short trainings of SmolLM2-135M, judged by needles and loss.

    python benchmarks/retrofit_probes.py MODEL --train FILE --dev FILE --haystack FILE --out probes-new.json

MODEL is a directory with tokenizer; the files are text or JSON lines. Each arm prints a line as it ends: needles found
and their mean log-probability at each length, then the loss at each stretch of positions. The runs of 2026-11-22 in
benchmarks/retrofit/probes.json were made by an earlier form of this script, with its own needles and its own facts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attentions, inner_model, token_losses
from retrofox.config import Stage
from retrofox.data.facts import with_facts
from retrofox.data.windows import documents
from retrofox.evaluation.needle import needle
from retrofox.model.rope import interpolated
from retrofox.training.objectives import Extend
from retrofox.training.speed import fuse_norms, lower_precision_stream

PAIRS, THETA, TRAINED = 32, 1e5, 8192
LENGTHS = (1024, 4096, 8192, 16384, 32768)
EDGES = (0, 512, 2048, 4096, 8192, 16384, 24576, 32768)
FREQUENCIES = [THETA ** (-pair / PAIRS) for pair in range(PAIRS)]
LONG = {"half_life": (4096.0, float(1 << 20))}
ARMS: dict[str, tuple[list[float] | None, str, float, float, int]] = {
    # name: (fades or None for the base itself, gate, tokens, share of documents with facts, window)
    "base": (None, "none", 0, 0, 0),
    **{f"keep {n}, no gates": ([1.0] * n + [0.0] * (PAIRS - n), "none", 0, 0, 0) for n in (28, 26, 24, 22, 20, 18, 16)},
    **{
        f"without pairs {first} to {last}": (
            [0.0 if first <= pair <= last else 1.0 for pair in range(PAIRS)],
            "none",
            0,
            0,
            0,
        )
        for first, last in ((0, 3), (4, 7), (8, 11), (12, 15), (16, 19), (20, 23), (24, 27), (28, 31))
    },
    "every second pair, no gates": ([1.0, 0.0] * (PAIRS // 2), "none", 0, 0, 0),
    "pairs 0 to 3 and 12 to 23, no gates": ([1.0] * 4 + [0.0] * 8 + [1.0] * 12 + [0.0] * 8, "none", 0, 0, 0),
    **{f"stretched {s} times": (interpolated(FREQUENCIES, TRAINED, s), "none", 0, 0, 0) for s in (4, 16)},
    "control": (None, "none", 2e6, 0.3, 8192),
    "16 kept, gates, facts": ([1.0] * 16 + [0.0] * 16, "data", 2e6, 0.3, 8192),
    "20 kept, gates": ([1.0] * 20 + [0.0] * 12, "data", 2e6, 0, 8192),
    **{
        f"stretched {s} times, gates": (interpolated(FREQUENCIES, TRAINED, s), "data", 2e6, 0, 8192) for s in (4, 8, 16)
    },
    "stretched 8 times, no gates": (interpolated(FREQUENCIES, TRAINED, 8), "none", 2e6, 0, 8192),
    "stretched 8 times, gates, facts": (interpolated(FREQUENCIES, TRAINED, 8), "data", 2e6, 0.3, 8192),
    "stretched 8 times, gates, 16k, 6M": (interpolated(FREQUENCIES, TRAINED, 8), "data", 6e6, 0, 16384),
}


def fade(model: Any, fades: list[float]) -> None:
    """Sets the fade of each rotary pair in every layer."""
    for _, attention in attentions(model):
        rotary: Any = attention.rotary_fade
        rotary.fade, rotary.kept = list(fades), all(f == 1.0 for f in fades)
        kept = sum(f == 1.0 for f in fades)
        rotary.num_leading = kept if fades == [1.0] * kept + [0.0] * (len(fades) - kept) else None
        rotary._shared_by, rotary._tensors = (tuple(fades), rotary.layer_type), {}


def windows(files: str, tokenizer: Any, share: float, length: int) -> list[np.ndarray]:
    """Windows of single documents, one token longer than `length`, in a fixed random order."""
    found = []
    for _, tokens in documents([files], tokenizer, length + 1):
        text = with_facts(tokenizer.decode(tokens), share) if share else ""
        told = np.array(tokenizer(text)["input_ids"]) if text else tokens
        found += [told[s : s + length + 1] for s in range(0, len(told) - length - 1, length)]
    random.Random(0).shuffle(found)
    return found


def train(model: Any, rows: list[np.ndarray], tokens: float, device: torch.device, batch: int = 65536) -> str:
    """AdamW 6e-4 (gates 3e-4), linear warm-up over a tenth and down to 0; returns the last loss and the speed."""
    model.train()
    fuse_norms(model)
    lower_precision_stream(model, torch.bfloat16)
    named = list(model.named_parameters())
    rates = [3e-4 if "forget_gate" in name else 6e-4 for name, _ in named]
    decay = [0.1 if p.ndim > 1 and "forget_gate" not in name else 0.0 for name, p in named]
    groups = [{"params": [p], "lr": r, "weight_decay": d} for (_, p), r, d in zip(named, rates, decay, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    length = len(rows[0]) - 1
    stage = Stage.model_validate({"objective": "extend", "tokens": int(tokens), "sequence_length": length})
    objective, steps, started, loss = Extend(model, stage, device), int(tokens) // batch, time.time(), torch.zeros(())
    for step in range(steps):
        done = (step + 1) / steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, done / 0.1) * (1 - max(0.0, (done - 0.1) / 0.9))
        count = max(1, batch // length)
        for row in range(count):
            ids = torch.from_numpy(rows[(step * count + row) % len(rows)].astype(np.int64))[None].to(device)
            with torch.autocast(device.type, torch.bfloat16):
                hidden = inner_model(model)(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
                loss = objective.from_hidden(model, hidden, ids[:, 1:])[0] / length
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return f"{float(loss):.3f}, {steps * batch / (time.time() - started):.0f} tokens/s"


def judge(model: Any, tokenizer: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Easy needles of 24 at each length, and the loss by position."""
    model.eval()
    settings: dict[str, Any] = {
        "depths": [0.0, 0.25, 0.5, 0.75],
        "trials": 6,
        "progress": False,
        "tokenizer": tokenizer,
    }
    edges = [edge for edge in EDGES if edge <= options.longest]
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        found = needle(model, None, [options.haystack], options.lengths, **settings)
        texts = [t[: edges[-1]] for _, t in documents([options.dev], tokenizer, edges[-1])][: options.documents]
        losses = torch.stack(
            [token_losses(model, torch.from_numpy(t.astype(np.int64))[None].to(device))[0].cpu() for t in texts]
        )
    (by_mode,) = [entry["modes"]["easy"]["by_length"] for entry in found["models"].values()]
    spans = pairwise(edges)
    return {"needles": by_mode, "loss": {f"{a}-{b}": float(losses[:, max(0, a - 1) : b - 1].mean()) for a, b in spans}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name in ("train", "dev", "haystack", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM", help="all by default"
    )
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="of the needles' contexts")
    parser.add_argument("--longest", type=int, choices=EDGES[1:], default=EDGES[-1], help="tokens of a document")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, results = AutoTokenizer.from_pretrained(options.model), {}
    for name in options.arms:
        fades, gate, tokens, share, window = ARMS[name]
        dtype = torch.float32 if tokens or device.type == "cpu" else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        if fades is not None:
            spec = FoxSpec(rope="keep", gate=gate, **(LONG if gate == "data" else {}))  # type: ignore[arg-type]
            model = retrofox.convert(model, fox=spec)
            fade(model, fades)
        model.to(device)
        speed = train(model, windows(options.train, tokenizer, share, window), tokens, device) if tokens else None
        results[name] = {**judge(model, tokenizer, options, device), "training": speed}
        print(name, json.dumps(results[name]), flush=True)
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
