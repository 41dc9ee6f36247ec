"""Tokens per second of a converted model under vLLM beside its base, same requests, in turns.

    python benchmarks/vllm_throughput.py OUT --against BASE [--lengths 2048,32768] [--requests 64] [--tokens 128]
        [--warm-ups 1] [--repeats 3] [--turns 2] [--out benchmarks/vllm-throughput.json]

Base and model take turns; each turn is a vLLM engine in a process of its own, with, for each length, `--warm-ups`
rounds that don't count and `--repeats` that do. Prompts are random tokens, so no prefix is shared; the length of a
model's positions is raised where the prompts are longer. Prints a table, writes JSON after each turn; the ratio is of
the medians of all rounds. Beside them the most requests that ran at once, and how many vLLM's allocator counts on; for
what fits in 80 GB of a larger GPU: more requests than that, enough new tokens, a `gpu_memory_utilization`, no warm-up.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from provenance import out_file, provenance
from rich.console import Console
from rich.table import Table

from retrofox.loading.source import read_config
from retrofox.serving.engines import Job, run_vllm
from retrofox.support.files import write_json

WARM_UP = "warm-up"


def job(lengths: list[int], options: argparse.Namespace, vocabulary: int, seed: int) -> Job:
    """One engine: for each length a round to warm up and the rounds that count, each of prompts never seen before."""
    draw = random.Random(seed)

    def wanted(name: str, count: int, length: int, tokens: int) -> dict[str, Any]:
        prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]
        return {"name": name, "prompts": prompts, "max_tokens": tokens, "of_prompt": False}

    total = max(lengths) + options.tokens
    engine = {
        "dtype": options.dtype,
        "tensor_parallel_size": 1,
        "max_model_len": total,
        "max_num_seqs": options.requests,
        "hf_overrides": {"max_position_embeddings": total},
        "enforce_eager": options.eager,
        **json.loads(options.engine),
    }
    rounds = []
    for length in lengths:
        names = [WARM_UP] * options.warm_ups + [str(length)] * options.repeats
        rounds += [wanted(name, options.requests, length, options.tokens) for name in names]
    return Job(engine, rounds)


def measure(model: str, lengths: list[int], options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Length, seconds, tokens per second (prompt and generated), most requests at once of each counted round."""
    asked = job(lengths, options, int(read_config(model)["vocab_size"]), seed)
    (found,) = run_vllm([asked], model)
    rows = []
    for wanted, got in zip(asked.rounds, found["rounds"], strict=True):
        if wanted["name"] == WARM_UP:
            continue
        length = int(wanted["name"])
        speed = options.requests * (length + options.tokens) / got["seconds"]
        kept = {name: got[name] for name in ("seconds", "preemptions", "running")}
        rows.append({"length": length, "tokens_per_second": speed, **kept, "cache": found["cache"]})
    return rows


def summary(lengths: list[int], found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per length the rounds of base and model, their medians and the ratio of these."""
    rows = []
    for length in lengths:
        rounds = {name: [r for r in measured if r["length"] == length] for name, measured in found.items()}
        medians = {name: statistics.median(r["tokens_per_second"] for r in of) for name, of in rounds.items()}
        rows.append({"length": length, "rounds": rounds, **medians, "ratio": medians["retrofit"] / medians["base"]})
    return rows


def _at_once(rounds: list[dict[str, Any]]) -> str:
    most, preempted = (max(row[name] for row in rounds) for name in ("running", "preemptions"))
    return f"{most}, {preempted:.0f} preempted; counted on {rounds[0]['cache']['concurrency']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--against", required=True, help="the base")
    parser.add_argument("--lengths", default="2048,32768", help="prompt lengths in tokens")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each request")
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds of each length before those that count")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds of each length in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", default="{}", help='more arguments for vLLM, as JSON: {"attention_backend": ...}')
    parser.add_argument("--out", type=out_file, default=Path(__file__).parent / "vllm-throughput.json")
    options = parser.parse_args()
    lengths = [int(x) for x in options.lengths.split(",")]
    found: dict[str, list[dict[str, Any]]] = {"base": [], "retrofit": []}
    rows = []
    for turn in range(options.turns):
        for name, model in (("base", options.against), ("retrofit", options.model)):
            print(f"turn {turn + 1} of {options.turns}, {name} ...", end=" ", file=sys.stderr, flush=True)
            started = time.perf_counter()
            found[name] += measure(model, lengths, options, seed=turn)
            print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        rows = summary(lengths, found)
        settings = {
            k: getattr(options, k) for k in ("requests", "tokens", "warm_ups", "repeats", "turns", "dtype", "eager")
        }
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        write_json(options.out, {**provenance(), **settings, "gpu": gpu, "rows": rows})
    table = Table(title=f"tokens per second, {options.requests} requests, {options.tokens} tokens each")
    for column in ("prompt", "base", "retrofit", "ratio", "at once, base", "retrofit"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = (f"{row['base']:.0f}", f"{row['retrofit']:.0f}", f"{row['ratio']:.2f}")
        table.add_row(str(row["length"]), *speeds, *(_at_once(row["rounds"][name]) for name in ("base", "retrofit")))
    Console().print(table)


if __name__ == "__main__":
    main()
