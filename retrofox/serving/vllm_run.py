"""One vLLM engine for one job, in a process of its own: `python -m retrofox.serving.vllm_run JOB.json RESULT.json`.

A job: model; engine (arguments of `vllm.LLM`); rounds, each with prompts (lists of token ids), max_tokens and whether
log-probabilities of the prompt are wanted. A result: per round and prompt the tokens generated greedily, their
log-probabilities, those of the prompt's tokens but the first, and how many tokens came from the prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job; see the module."""
    started = time.perf_counter()
    llm = LLM(job["model"], skip_tokenizer_init=True, disable_log_stats=False, **job["engine"])
    loaded = time.perf_counter() - started
    rounds = []
    for wanted in job["rounds"]:
        sampling = SamplingParams(
            max_tokens=wanted["max_tokens"],
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if wanted["of_prompt"] else None,
        )
        before = _counter(llm, "vllm:num_preemptions")
        started = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in wanted["prompts"]], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        preemptions = _counter(llm, "vllm:num_preemptions") - before
        rounds.append(
            {"seconds": seconds, "preemptions": preemptions, "answers": [_answer(answer) for answer in answers]}
        )
    return {"vllm": vllm_version, "load_seconds": loaded, "rounds": rounds}


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


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
