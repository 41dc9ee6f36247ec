"""Cross-entropy of a linear head, forward and backward: time and peak memory of the implementations to choose from.

    python benchmarks/cross_entropy.py --out benchmarks/cross_entropy.json

Ours (chunked), torch.nn.functional.linear_cross_entropy (torch >= 2.13) and Liger's fused loss (pip install
liger-kernel), on N hidden states (N, H) in bfloat16 and a float32 head (V, H) under autocast, as in training. Peak
memory is what each adds to the tensors that are there before it; errors are of the gradients against a float32 loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance
from transformers import LlamaConfig, LlamaForCausalLM

from retrofox.config import Stage
from retrofox.training.objectives import Extend


def head_only(hidden_size: int, vocabulary: int, device: torch.device) -> Any:
    """A Llama with next to nothing but a head."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        vocab_size=vocabulary,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=hidden_size // 64,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(d hidden, d weight) of the summed loss, float32, 1024 rows at a time."""
    hidden, weight = hidden.detach().float(), weight.detach()
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for part in range(0, len(hidden), 1024):
        rows = hidden[part : part + 1024]
        d_logits = torch.softmax(rows @ weight.T, -1)
        d_logits[torch.arange(len(rows)), targets[part : part + 1024]] -= 1
        d_hidden[part : part + 1024] = d_logits @ weight
        d_weight += d_logits.T @ rows
    return d_hidden, d_weight


def measure(kind: str, tokens: int, vocabulary: int, hidden_size: int, device: torch.device, repeats: int) -> dict:
    """Seconds of a forward and backward, peak bytes above the inputs, relative errors of the gradients."""
    torch.manual_seed(0)
    model = head_only(hidden_size, vocabulary, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = (torch.randn(1, tokens, hidden_size, device=device) * 2).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (1, tokens), device=device)
    stage = Stage.model_validate({"objective": "extend", "tokens": 1, "sequence_length": 1, "cross_entropy": kind})
    objective = Extend(model, stage, device)
    weight = model.lm_head.weight

    def once() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, _ = objective.from_hidden(model, hidden, targets)
        loss.backward()

    once()
    times = []
    if device.type == "cuda":
        for _ in range(repeats):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            once()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        hidden.grad = weight.grad = None
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        peak = torch.cuda.max_memory_allocated() - base
    else:
        import time

        for _ in range(repeats):
            started = time.perf_counter()
            once()
            times.append(time.perf_counter() - started)
        peak = 0
    some = slice(0, min(tokens, 4096))
    hidden_part, targets_part = hidden[:, some].detach().requires_grad_(), targets[:, some]
    weight.grad = None
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        objective.from_hidden(model, hidden_part, targets_part)[0].backward()
    assert hidden_part.grad is not None
    assert weight.grad is not None
    wanted = reference(hidden_part[0], weight, targets_part[0])
    errors = [
        float((a.float() - b).norm() / b.norm())
        for a, b in zip((hidden_part.grad[0], weight.grad), wanted, strict=True)
    ]
    return {
        "implementation": kind,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden_size": hidden_size,
        "milliseconds": round(1e3 * sorted(times)[len(times) // 2], 2),
        "peak_gb": round(peak / 1e9, 3),
        "error_d_hidden": errors[0],
        "error_d_weight": errors[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    present = {
        "chunked": True,
        "torch": hasattr(F, "linear_cross_entropy"),
        "liger": importlib.util.find_spec("liger_kernel") is not None and device.type == "cuda",
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict = {**provenance(), "device": name, "absent": [k for k, v in present.items() if not v]}
    found["rows"] = []
    for kind in (key for key, there in present.items() if there):
        row = measure(kind, options.tokens, options.vocabulary, options.hidden_size, device, options.repeats)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
