"""vLLM engines, one after the other, in a process that `retrofox.serving.engines` starts.

    python -m retrofox.serving.vllm_run JOBS.json RESULTS.json

Jobs: the model, and for each engine its arguments (of `vllm.LLM`) and rounds, each with prompts (lists of token ids),
max_tokens and whether log-probabilities of the prompt are wanted. Results: per engine, round and prompt the tokens
generated greedily, their log-probabilities, those of the prompt's tokens but the first, and how many tokens came from
the prefix cache; per round the most requests in one step; per engine the blocks of its cache, and how many requests of
the greatest length vLLM counts on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm import __version__ as vllm_version

from retrofox.loading.source import read_config
from retrofox.serving import vllm_models
from retrofox.serving.refusals import SERVED


def run(model: str, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job; see the module."""
    llm = LLM(model, skip_tokenizer_init=True, disable_log_stats=False, **job["engine"])
    rounds, running = [], _watch(llm)
    for wanted in job["rounds"]:
        sampling = SamplingParams(
            max_tokens=wanted["max_tokens"],
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if wanted["of_prompt"] else None,
        )
        running.clear()
        before = _counter(llm, "vllm:num_preemptions")
        started = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in wanted["prompts"]], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        preemptions = _counter(llm, "vllm:num_preemptions") - before
        said = {"seconds": seconds, "preemptions": preemptions, "running": max(running)}
        rounds.append({**said, "answers": [_answer(answer) for answer in answers]})
    cache = llm.llm_engine.vllm_config.cache_config
    counted = {"blocks": cache.num_gpu_blocks, "concurrency": cache.kv_cache_max_concurrency}
    llm.llm_engine.engine_core.shutdown()  # frees the cache and leaves the groups of ranks
    torch.compiler.reset()
    return {"vllm": vllm_version, "cache": counted, "rounds": rounds}


def _watch(llm: Any) -> list[int]:
    """How many requests run in each step from now on."""
    scheduler, running = llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = schedule(*args, **kwargs)
        running.append(len(scheduler.running))
        return made

    scheduler.schedule = watched
    return running


def _answer(answer: Any) -> dict[str, Any]:
    made = answer.outputs[0]
    prompt = answer.prompt_logprobs
    return {
        "tokens": list(made.token_ids),
        "log_p": [found[token].logprob for token, found in zip(made.token_ids, made.logprobs, strict=True)],
        "prompt_log_p": prompt
        and [found[token].logprob for token, found in zip(answer.prompt_token_ids[1:], prompt[1:], strict=True)],
        "cached": answer.num_cached_tokens or 0,
    }


def _counter(llm: LLM, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)  # type: ignore[attr-defined]


def inspect_here(model: str) -> None:
    """Spares vLLM a process of its own to import itself and look at a class that it meets for the first time."""
    values = read_config(model)
    if values["model_type"].removeprefix("fox_") in SERVED and "fox" in values:
        (name,) = values["architectures"]
        ModelRegistry.register_model(name, getattr(vllm_models, name))


def main(asked: Path, answered: Path) -> None:
    """Runs the jobs of one file and writes their results to the other."""
    collect = gc.collect
    if not torch.cuda.is_available():
        gc.collect = lambda *_: 0  # nine calls an engine, half its time: each walks all that vLLM's imports made
    given = json.loads(asked.read_text(encoding="utf-8"))
    inspect_here(given["model"])
    results = []
    for job in given["jobs"]:
        results.append(run(given["model"], job))
        collect()  # the engine's cache and weights
    answered.write_text(json.dumps(results), encoding="utf-8")


def run_program() -> NoReturn:
    """`main` of the command line; vLLM's threads would keep a process that ends in another way."""
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    run_program()
