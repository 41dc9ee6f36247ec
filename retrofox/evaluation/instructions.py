"""Whether instructions survive: greedy answers of a model beside those of its base, which made them first.

The base answers prompts by its own chat template, greedily. The model answers the same prompts. Reported are the share
of answers that are the same token by token, the mean length of the common prefix, and the loss of the base's own
answers under the model and under the base.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrofox.evaluation import task_cache
from retrofox.evaluation.bootstrap import Bootstrap
from retrofox.evaluation.needles.shares import wilson_interval
from retrofox.evaluation.panel_texts import SHIPPED
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.generation.generate import complete
from retrofox.loading.opened import Opened
from retrofox.support.report import progress_bar
from retrofox.version import __version__

BATCH = {"cpu": 1, "cuda": 32}
"""Prompts that are answered at one time."""


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first `count` shipped prompts, each as a conversation's first turn.

    Raises:
        ValueError: more than there are, or a tokenizer without a chat template.
    """
    prompts = json.loads((SHIPPED / "prompts.json").read_text(encoding="utf-8"))
    if not 0 < count <= len(prompts):
        raise ValueError(f"chat must be 1 to {len(prompts)} prompts, got {count}")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: it is not an instruct model's (leave out --chat)")
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for prompt in prompts[:count]
    ]


def answer(
    opened: Opened,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    fingerprint: str,
    cache: Path | None,
    progress: bool = True,
) -> list[list[int]]:
    """Greedy answers to each prompt, kept in the folder `cache` under the model's fingerprint."""
    identity = {"model": fingerprint, "prompts": list(prompts), "tokens": max_new_tokens, "retrofox": __version__}
    entry = task_cache.read(cache, "chat", identity)
    if entry is not None:
        return entry["answers"]
    answers: list[list[int]] = []
    batch = BATCH.get(opened.device.type, BATCH["cpu"])
    with progress_bar("prompts", progress) as bar:
        task = bar.add_task(f"{opened.name} answers", total=len(prompts))
        for start in range(0, len(prompts), batch):
            some = prompts[start : start + batch]
            answers += complete(opened, some, max_new_tokens)
            bar.advance(task, len(some))
    task_cache.write(cache, "chat", identity, {"answers": answers})
    return answers


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that both have in common."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def compare_answers(
    model: Opened, base: Opened, prompts: Sequence[list[int]], own: Sequence[list[int]], its: Sequence[list[int]]
) -> dict[str, Any]:
    """{"prompts", "same": {"value", "interval"}, "common_prefix" (tokens), "answer_tokens", "loss", "base",
    "difference"} of the model's answers `own` and the base's answers `its`; the last three as {"mean", "interval"}.
    """
    same = float(np.mean([list(a) == list(b) for a, b in zip(own, its, strict=True)]))
    texts = [
        Scored(np.array([*prompt, *reply], np.int64), np.arange(len(prompt), len(prompt) + len(reply)))
        for prompt, reply in zip(prompts, its, strict=True)
    ]
    sums = [np.array([loss.sum() for loss, _ in score_tokens(m.model, texts)], np.float64) for m in (model, base)]
    counts = np.array([len(reply) for reply in its], np.float64)
    draws = Bootstrap(len(its))
    return {
        "prompts": len(its),
        "same": {"value": same, "interval": list(wilson_interval(same, len(its)))},
        "common_prefix": float(np.mean([common_prefix(a, b) for a, b in zip(own, its, strict=True)])),
        "answer_tokens": float(counts.mean()),
        "loss": draws.ratio(sums[0], counts),
        "base": draws.ratio(sums[1], counts),
        "difference": draws.ratio(sums[0] - sums[1], counts),
    }
