"""Tokens per second of a converted model under vLLM beside its base, same requests, in turns.

    python benchmarks/vllm_throughput.py OUT --against BASE [--lengths 2048,32768] [--requests 64] [--tokens 128]
        [--repeats 3] [--out benchmarks/vllm-throughput.json]

Each measurement is a vLLM engine in a process of its own, one short round to warm up and `--repeats` rounds that count;
base and model take turns twice. Prompts are random tokens, so no prefix is shared; the length of a model's positions is
raised where the prompts are longer. Prints a table, writes JSON; the ratio is of the medians of all rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

from retrofox.loading.source import read_config
from retrofox.serving.engines import Job, run_vllm
from retrofox.support.files import write_json

TURNS = 2


def job(length: int, options: argparse.Namespace, vocabulary: int, seed: int) -> Job:
    """One engine: a round to warm up, then the rounds that count, each of prompts never seen before."""
    draw = random.Random(seed)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[draw.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count)]

    total = length + options.tokens
    engine = {
        "dtype": options.dtype,
        "tensor_parallel_size": 1,
        "max_model_len": total,
        "max_num_seqs": options.requests,
        "hf_overrides": {"max_position_embeddings": total},
        "enforce_eager": options.eager,
        **json.loads(options.engine),
    }
    rounds = [
        {"name": "warm-up", "prompts": prompts(min(4, options.requests), min(length, 512)), "max_tokens": 8},
        *(
            {"name": "counted", "prompts": prompts(options.requests, length), "max_tokens": options.tokens}
            for _ in range(options.repeats)
        ),
    ]
    return Job(f"{length}", engine, [{**wanted, "of_prompt": False} for wanted in rounds])


def measure(model: str, length: int, options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Seconds and tokens per second (prompt and generated) of each counted round."""
    asked = job(length, options, int(read_config(model)["vocab_size"]), seed)
    found = run_vllm(asked, model)["rounds"][1:]
    tokens = options.requests * (length + options.tokens)
    return [
        {"seconds": r["seconds"], "tokens_per_second": tokens / r["seconds"], "preemptions": r["preemptions"]}
        for r in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--against", required=True, help="the base")
    parser.add_argument("--lengths", default="2048,32768", help="prompt lengths in tokens")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", default="{}", help='more arguments for vLLM, as JSON: {"attention_backend": ...}')
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "vllm-throughput.json")
    options = parser.parse_args()
    rows = []
    for length in (int(x) for x in options.lengths.split(",")):
        found: dict[str, list[dict[str, Any]]] = {"base": [], "retrofit": []}
        for turn in range(TURNS):
            for name, model in (("base", options.against), ("retrofit", options.model)):
                print(f"{length} tokens, {name}, turn {turn + 1} of {TURNS} ...", file=sys.stderr, flush=True)
                found[name] += measure(model, length, options, seed=turn)
        medians = {name: statistics.median(r["tokens_per_second"] for r in rounds) for name, rounds in found.items()}
        rows.append({"length": length, "rounds": found, **medians, "ratio": medians["retrofit"] / medians["base"]})
        settings = {name: getattr(options, name) for name in ("requests", "tokens", "repeats", "dtype", "eager")}
        write_json(options.out, {**provenance(), **settings, "gpu": _gpu(), "rows": rows})
    table = Table(title=f"tokens per second, {options.requests} requests, {options.tokens} tokens each")
    for column in ("prompt", "base", "retrofit", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["length"]), f"{row['base']:.0f}", f"{row['retrofit']:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
