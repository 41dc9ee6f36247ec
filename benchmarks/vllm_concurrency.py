"""How many requests of 32k tokens vLLM's block manager takes at once in 80 GB, for SmolLM2-135M's shape: no GPU.

    python benchmarks/vllm_concurrency.py [--out benchmarks/vllm-concurrency.json]     # needs vLLM 0.32; a minute

vLLM's own KVCacheManager hands out blocks to a stand-in for its scheduler: prompts are read in steps of 16384 tokens,
500 tokens are written to each, and the count ends with the first request that finds no room, or is preempted. Of 80 GB
nine tenths are vLLM's, of which weights and activations take 1.8. Nothing is computed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from provenance import out_file, provenance
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from retrofox.serving.vllm_blocks import ReachSpec
from retrofox.support.files import write_json

BLOCK, PROMPT, NEW, STEP = 16, 32768, 500, 16384
MEMORY = int(0.9 * 80e9 - 1.8e9)
LAYERS, OPEN, HORIZON = 30, 8, 8.0
"""Layers of the model, those of them with an open head, and nats of the horizon of smollm2-stretch."""


def cache_config(width: int, reach: int | None) -> Any:
    """vLLM's cache of 30 layers of 3 kv heads so wide, all but the open ones bounded where there is a reach."""
    common: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 3, "head_size": width, "dtype": torch.bfloat16}
    specs: dict[str, Any] = {f"layer {n}": FullAttentionSpec(**common) for n in range(LAYERS)}
    if reach is not None:
        specs |= {f"layer {n}": ReachSpec(**common, sliding_window=reach, sinks=1) for n in range(OPEN, LAYERS)}
    layout = getattr(KVCacheLayout, "LBNHC", next(iter(KVCacheLayout)))
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
        ),
        model_config=SimpleNamespace(max_model_len=PROMPT + NEW, original_max_model_len=PROMPT + NEW, hf_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=2 * STEP,
        num_prefill_lookahead_tokens=0,
    )
    return get_kv_cache_configs(config, [specs], [MEMORY])[0]


def at_once(width: int, reach: int | None) -> int:
    """Requests that run together before one finds no room."""
    manager = KVCacheManager(
        cache_config(width, reach), PROMPT + NEW, BLOCK, BLOCK, max_in_flight_tokens=2 * STEP, enable_caching=False
    )
    running: list[Any] = []
    number = 0
    while True:
        budget = STEP
        for request in running:  # a token each; the last may still be reading its prompt
            left = PROMPT - request.num_computed_tokens
            new = min(left, budget) if left > 0 else 1
            if new and manager.allocate_slots(request, new) is None:
                return len(running)
            request.num_computed_tokens += new
            budget -= new
            if request.num_computed_tokens >= PROMPT:
                request.append_output_token_ids(0)
        for request in [x for x in running if x.num_computed_tokens >= PROMPT + NEW]:
            manager.free(request)
            running.remove(request)
        while budget > 0:
            request = Request(str(number), [0] * PROMPT, SamplingParams(max_tokens=NEW), None)
            new = min(budget, PROMPT)
            if manager.allocate_slots(request, new, full_sequence_must_fit=True) is None:
                return len(running)
            request.num_computed_tokens = new
            running.append(request)
            budget, number = budget - new, number + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_file, default=Path(__file__).parent / "vllm-concurrency.json")
    options = parser.parse_args()
    shapes: dict[str, tuple[int, int | None]] = {"base": (64, None), "converted, nothing freed": (72, None)}
    for longest in (256, 512, 1024):
        shapes[f"max_half_life {longest}"] = (72, math.ceil(HORIZON * longest / math.log(2)) + 1)
    rows = [{"model": name, "requests": at_once(*shape)} for name, shape in shapes.items()]
    for row in rows:
        print(f"{row['model']:28} {row['requests']:4} requests at once", flush=True)
    write_json(options.out, {"rows": rows, "environment": provenance()})


if __name__ == "__main__":
    main()
