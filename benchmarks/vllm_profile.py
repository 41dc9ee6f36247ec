"""Where a model's time goes under vLLM: seconds of a round without and with decoding, by kernel and by function.

    python benchmarks/vllm_profile.py MODEL [--lengths 2048,32768] [--requests 64] [--out profile.json]

Runs base or converted models, in this process. Log-probabilities are not asked for, so rounds are shorter than those of
`vllm_throughput.py`. Prints the kernels that take longest and the milliseconds of an engine's step by what it holds
(prompts, decoding, both); writes these and all kernels as JSON, with the host's functions that take longest while
prompts are read. Where the host is the slower part, steps tell better than rounds what takes its time.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from retrofox.serving.vllm_run import inspect_here
from retrofox.support.files import write_json

DECODED = 128
PROFILED = 33
SHOWN = 20
HOST_FUNCTIONS = 60


class Steps:
    """What each of an engine's steps held, and its seconds, while it is watched."""

    def __init__(self, engine: Any):
        self.rows: list[tuple[str, float]] = []
        self.held = ""
        execute, step = GPUModelRunner.execute_model, engine.step

        def executed(runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            new = scheduled.num_scheduled_tokens.values()
            long = sum(tokens > 1 for tokens in new)
            if new:
                self.held = "decoding" if not long else "prompts" if long == len(new) else "both"
            return execute(runner, scheduled, *args, **kwargs)

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.held, begun = "", time.perf_counter()
            made = step(*args, **kwargs)
            if self.held:
                self.rows.append((self.held, time.perf_counter() - begun))
            return made

        GPUModelRunner.execute_model = executed
        engine.step = stepped

    def taken(self) -> dict[str, dict[str, float]]:
        """By what they held, how many steps and their median in milliseconds; begins anew."""
        rows, self.rows = self.rows, []
        found = {held: [seconds for kind, seconds in rows if kind == held] for held, _ in rows}
        return {held: {"steps": len(x), "milliseconds": 1000 * statistics.median(x)} for held, x in found.items()}


def kernels(found: Any) -> list[dict[str, Any]]:
    """Kernels and copies of a profile by the time they took, longest first."""
    rows = [
        {"kernel": event.key[:120], "microseconds": round(event.self_device_time_total), "calls": event.count}
        for event in found.key_averages()
        if event.self_device_time_total and str(event.device_type).endswith("CUDA")
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])


def functions(watched: cProfile.Profile) -> list[dict[str, Any]]:
    """Python functions by the time they themselves took, longest first; this slows the host down."""
    found: dict[tuple[str, int, str], Any] = pstats.Stats(watched).stats  # type: ignore[attr-defined]
    rows = [
        {"function": f"{Path(file).name}:{line} {name}", "seconds": own, "with_callees": whole, "calls": calls}
        for (file, line, name), (_, calls, own, whole, _) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])[:HOST_FUNCTIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="2048,32768")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("profile.json"))
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    total = max(lengths) + DECODED
    inspect_here(options.model)
    llm = LLM(
        options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=total,
        max_num_seqs=options.requests,
        hf_overrides={"max_position_embeddings": total},
        attention_config={"backend": "FLASH_ATTN"},
    )
    steps = Steps(llm.llm_engine)
    draw = random.Random(0)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def seconds(length: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(length)]}
            for _ in range(options.requests)
        ]
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    rows = []
    for length in lengths:
        seconds(length, DECODED)
        steps.taken()
        row: dict[str, Any] = {"length": length, "seconds": {n: seconds(length, n) for n in (1, DECODED)}}
        row["steps"] = steps.taken()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            row["profiled_seconds"] = seconds(length, PROFILED)
        row["kernels"] = kernels(found)
        watched = cProfile.Profile()
        row["watched_seconds"] = watched.runcall(seconds, length, 1)
        row["functions"] = functions(watched)
        row["gpu_seconds"] = sum(kernel["microseconds"] for kernel in row["kernels"]) / 1e6
        rows.append(row)
        table = Table("kernel", "microseconds", "calls", title=f"{length} tokens: {row['seconds']} s")
        for kernel in row["kernels"][:SHOWN]:
            table.add_row(*map(str, kernel.values()))
        Console().print(table, row["steps"])
        write_json(
            options.out, {**provenance(), "model": options.model, "gpu": torch.cuda.get_device_name(), "rows": rows}
        )
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main()
