"""verify_serving: whether vLLM gives the log-probabilities that retrofox gives, however it batches, chunks and evicts.

vLLM runs greedily in a process of its own; retrofox then reads each prompt with its answer once, without a cache, and
gives its log-probability of every token and the token it would have chosen. Equal choices at every position are equal
greedy texts. It reads on the CPU, where float32 products are exact to rounding, and in bfloat16 on the GPU that served.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from retrofox.anatomy import read_logits, vocabulary_size
from retrofox.loading.base import load_base
from retrofox.loading.converted import load
from retrofox.loading.source import read_config
from retrofox.loading.tokenizers import open_tokenizer
from retrofox.serving.engines import Job, run_vllm
from retrofox.support.files import text_of, write_result
from retrofox.support.report import check_folder, environment, output_console, print_table

TOLERANCE = 1e-3
"""Nats by which log-probabilities may differ in float32."""
CHUNK = 512
"""Tokens that vLLM computes at once: longer prompts come in chunks."""
LOGIT_POSITIONS = 512
SLACK = 1.1
"""In bfloat16, mean differences of model and base are compared up to this factor, and two standard errors of them."""


def verify_serving(
    directory: str | Path,
    *,
    against: str | None = None,
    data: str | Path | None = None,
    dtype: str = "float32",
    requests: int = 32,
    longest: int = 8192,
    tokens: int = 24,
    out: str | Path | None = None,
    eager: bool = False,
    tensor_parallel: int = 1,
) -> dict[str, Any]:
    """Serves a converted checkpoint with vLLM and compares every log-probability with retrofox's.

    Rounds: requests of mixed lengths at once; the same again, from the prefix cache, with other endings, and some that
    share a beginning never seen before; prompts up to the longest, in chunks; as many requests in a cache too small for
    them, so that vLLM preempts some.

    Args:
        against: the base. In bfloat16 the measure is how far vLLM's base is from transformers' base.
        data: a text file whose tokens make the prompts; None = tokens drawn at random.
        dtype: "float32" (equal greedy tokens, log-probabilities within 1e-3) or "bfloat16" (mean difference at most
            1.1 of the base's, and chance; needs `against`).
        requests: requests at once.
        longest: tokens of the longest prompt, its answer included.
        tokens: tokens generated for each.
        eager: without vLLM's torch.compile.
        tensor_parallel: ranks to split the heads over.
        out: where the report goes, as JSON.

    Raises:
        ValueError: the model or the request can't be served or compared, with vLLM's own reason.
    """
    if dtype == "bfloat16" and against is None:
        raise ValueError("bfloat16 is measured by the base's own difference: give --against BASE")
    check_folder(None if out is None else Path(out).parent)
    values = read_config(directory)
    if not str(values.get("model_type")).startswith("fox_"):
        raise ValueError(f"{directory} is a plain {values.get('model_type')}, not a converted one: convert it first")
    if against is not None:
        read_config(against)
    text = None if data is None else text_of(Path(data))  # refused before the model is opened
    engine = {"dtype": dtype, "enforce_eager": eager, "tensor_parallel_size": tensor_parallel, "seed": 0}
    model: Any = load(directory, dtype=dtype).eval()
    source = _tokens(directory, text, vocabulary_size(model))
    jobs = make_jobs(source, engine, requests, min(longest, int(values["max_position_embeddings"])), tokens)
    started = time.perf_counter()
    served = _served(jobs, str(directory))
    base_served = [] if against is None else _served(jobs[:1], against)
    device = "cuda" if torch.cuda.is_available() and dtype == "bfloat16" else "cpu"
    report = {
        "model": str(directory),
        "spec": values["fox"],
        "model_type": values["model_type"],
        "dtype": dtype,
        "compiled": not eager,
        "tensor_parallel": tensor_parallel,
        "read_on": device,
        "vllm": served[0]["vllm"],
        "rounds": _compared(model.to(device), jobs, served, str(directory)),
    }
    if against is not None:
        del model
        base = load_base(against, dtype=getattr(torch, dtype))[0].to(device).eval()
        report |= {"base": against, "base_rounds": _compared(base, jobs, base_served, against)}
    report |= {"passed": _passed(report, dtype), "seconds": round(time.perf_counter() - started, 1)}
    report["environment"] = environment()
    if out is not None:
        write_result(out, (json.dumps(report, indent=1) + "\n").encode())
    _print(report)
    return report


def make_jobs(source: Sequence[int], engine: dict[str, Any], requests: int, longest: int, tokens: int) -> list[Job]:
    """The engines and rounds of a comparison; prompts are slices of `source`."""
    draw = random.Random(0)
    longest = min(longest, len(source)) - tokens
    if longest < 64:
        raise ValueError(
            f"prompts of {longest} tokens prove nothing, where {tokens} more are generated: at least 64 must fit the "
            "model's length, --longest and the texts"
        )

    def slice_of(length: int) -> list[int]:
        start = draw.randrange(max(1, len(source) - length))
        return list(source[start : start + length])

    short = min(longest, 700)
    mixed = [slice_of(round(8 * (short / 8) ** draw.random())) for _ in range(requests - 2)]
    mixed += [slice_of(short), slice_of(short * 3 // 4)]
    endings = [prompt[: len(prompt) * 3 // 4] + slice_of(9) for prompt in mixed[-2:]]
    beginning = slice_of(short // 4)
    twins = [beginning + slice_of(length) for length in (9, 5, 17)]  # in one step, which fills the pages they share
    lengths = sorted({min(longest, n) for n in (longest, longest // 2, longest // 4)})
    plenty = {**engine, "max_num_seqs": requests, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    plenty["max_model_len"] = longest + tokens
    options = {"max_tokens": tokens, "of_prompt": True}
    rounds = [
        {"name": f"{requests} requests at once", "prompts": mixed, **options},
        {"name": "prefix hits", "prompts": twins + mixed + endings, **options, "of_prompt": False},
        {"name": f"prompts up to {lengths[-1]}, in chunks", "prompts": [slice_of(n) for n in lengths], **options},
    ]
    block = 32
    growing = [slice_of(draw.randrange(2 * block, 4 * block - 8)) for _ in range(min(16, requests))]
    more = 2 * block + 8
    wanted = sum(-(-(len(prompt) + more) // block) for prompt in growing)
    tight = {**plenty, "max_model_len": min(longest + tokens, 4 * block + more), "block_size": block}
    tight |= {"num_gpu_blocks_override": wanted * 2 // 3 + 1}
    preempted = {"name": "preemption, small cache", "prompts": growing, "max_tokens": more, "of_prompt": False}
    return [Job(plenty, rounds), Job(tight, [preempted])]


def _tokens(directory: str | Path, text: str | None, vocabulary: int) -> list[int]:
    if text is None:
        return torch.randint(3, vocabulary, (32768,), generator=torch.Generator().manual_seed(0)).tolist()
    return open_tokenizer(str(directory))(text, add_special_tokens=False).input_ids


def _served(jobs: Sequence[Job], path: str) -> list[dict[str, Any]]:
    output_console().print(f"vLLM: {path} ...", highlight=False)
    return run_vllm(jobs, path)


def _compared(model: Any, jobs: Sequence[Job], served: Sequence[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    output_console().print(f"retrofox: {path}, on {model.device} ...", highlight=False)
    rows = []
    for job, found in zip(jobs, served, strict=False):  # the base's are fewer
        for wanted, got in zip(job.rounds, found["rounds"], strict=True):
            row = compare(model, wanted["prompts"], got["answers"])
            rows.append({"round": wanted["name"], **row, "preemptions": got["preemptions"], "seconds": got["seconds"]})
    return rows


@torch.no_grad()
def compare(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of vLLM's answers from a transformers model's log-probabilities of the same tokens.

    Returns:
        requests, tokens compared, prompt_tokens, longest prompt, cached tokens, chosen_otherwise (generated tokens that
        are not the model's own choice), max and mean difference of log-probabilities in nats, its
        standard error.
    """
    differences, otherwise, generated = [], 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer["tokens"]], device=model.device)
        first = len(prompt)
        log_p, choice = _read(read_logits(model, ids), ids[0], 1 if answer["prompt_log_p"] else first)
        served = torch.tensor([*(answer["prompt_log_p"] or []), *answer["log_p"]], dtype=torch.float64)
        differences.append((log_p.double() - served).abs())
        made = len(answer["tokens"])
        generated += made
        otherwise += int((choice[-made:] != torch.tensor(answer["tokens"])).sum())
    every = torch.cat(differences)
    return {
        "requests": len(prompts),
        "longest_prompt": max(map(len, prompts)),
        "prompt_tokens": sum(map(len, prompts)),
        "generated_tokens": generated,
        "cached_tokens": sum(answer["cached"] for answer in answers),
        "compared": len(every),
        "chosen_otherwise": otherwise,
        "max_difference": float(every.max()),
        "mean_difference": float(every.mean()),
        "standard_error": float(every.std(correction=0)) / len(every) ** 0.5,
    }


def _read(logits_at: Callable[[Any], torch.Tensor], ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each token from position `first` on, most probable token there), float32 and int64, CPU."""
    log_p, choice = [], []
    for start in range(first, len(ids), LOGIT_POSITIONS):
        stop = min(start + LOGIT_POSITIONS, len(ids))
        logits = logits_at((slice(None), slice(start - 1, stop - 1)))[0].float()
        chosen = logits.gather(1, ids[start:stop, None])[:, 0]
        log_p.append((chosen - logits.logsumexp(-1)).cpu())
        choice.append(logits.argmax(-1).cpu())
    return torch.cat(log_p), torch.cat(choice)


def _passed(report: dict[str, Any], dtype: str) -> dict[str, bool]:
    rounds = report["rounds"]
    held = {
        "prefixes were cached": rounds[1]["cached_tokens"] > 0,
        "prompts came in chunks": rounds[2]["longest_prompt"] > CHUNK,
        "requests were preempted": rounds[3]["preemptions"] > 0,
    }
    if rounds[2]["longest_prompt"] <= CHUNK:
        del held["prompts came in chunks"]  # a tiny model's length
    if dtype == "float32":
        held["greedy tokens are equal"] = not any(row["chosen_otherwise"] for row in rounds)
        held[f"log-probabilities within {TOLERANCE:g}"] = all(row["max_difference"] <= TOLERANCE for row in rounds)
        return held
    for mine, base in zip(rounds, report["base_rounds"], strict=False):
        chance = 2 * math.hypot(mine["standard_error"], base["standard_error"])
        name = f"{mine['round']}: no further apart than the base"
        held[name] = mine["mean_difference"] <= SLACK * base["mean_difference"] + chance
    return held


def _print(report: dict[str, Any]) -> None:
    columns = ("round", "requests", "compared", "cached", "preempted", "other choices", "max", "mean")
    rows = []
    for name, found in (("", report["rounds"]), ("base: ", report.get("base_rounds", []))):
        for row in found:
            counts = [row[key] for key in ("requests", "compared", "cached_tokens", "preemptions", "chosen_otherwise")]
            differences = [f"{row[key]:.1e}" for key in ("max_difference", "mean_difference")]
            rows.append([name + row["round"], *map(str, counts), *differences])
    console, title = output_console(), f"{report['model']}, {report['dtype']}, vLLM {report['vllm']}"
    print_table(console, columns, rows, title, left="round")
    for what, held in report["passed"].items():
        console.print(f"{'yes' if held else 'NO '}  {what}", highlight=False)
