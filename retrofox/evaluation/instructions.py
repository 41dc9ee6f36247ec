"""Whether instructions survive: greedy answers of a model beside those of its base.

The base answers prompts by its own chat template, greedily. The model answers the same prompts. Reported are the share
of answers that are the same token by token, the loss of the base's own answers under the model and under the base, and
how many instructions that a program can check are followed by either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrofox.evaluation.panel_texts import SHIPPED
from retrofox.evaluation.statistics import mean_over_documents, paired_difference, wilson_interval
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.generation.generate import complete
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.report import progress_bar

BATCH = {"cpu": 1, "cuda": 32}
"""Prompts that are answered at one time."""
Check = Callable[[str], bool]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation's first turn as token ids, and the check of its answer, if a program can check it."""

    token_ids: list[int]
    check: Check | None = None


def chat_prompts(tokenizer: Any, count: int) -> list[ChatPrompt]:
    """The first `count` of 208 prompts: after two that a program can check one that it can't, while there are both."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the base's tokenizer has no chat template, so it is no instruct model: leave it out")
    free = [(text, None) for text in json.loads((SHIPPED / "prompts.json").read_text(encoding="utf-8"))]
    checkable = [(text.format(topic), check) for topic in TOPICS for text, check in INSTRUCTIONS]
    prompts: list[tuple[str, Check | None]] = []
    while free or checkable:
        prompts += [*checkable[:2], *free[:1]]
        free, checkable = free[1:], checkable[2:]
    if count > len(prompts):
        raise ValueError(f"chat is a number of prompts, {len(prompts)} at most, got {count}")

    def first_turn(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])

    return [ChatPrompt(first_turn(text), check) for text, check in prompts[:count]]


def answer(
    opened: LoadedModel, prompts: Sequence[ChatPrompt], max_new_tokens: int, progress: bool = True
) -> list[list[int]]:
    """Greedy answers to each prompt, as token ids."""
    answers: list[list[int]] = []
    batch = BATCH.get(opened.device.type, BATCH["cpu"])
    with progress_bar("prompts", progress) as bar:
        task = bar.add_task(f"{opened.name} answers", total=len(prompts))
        for start in range(0, len(prompts), batch):
            some = [prompt.token_ids for prompt in prompts[start : start + batch]]
            answers += complete(opened, some, max_new_tokens)
            bar.advance(task, len(some))
    return answers


def compare_answers(
    model: LoadedModel,
    base: LoadedModel,
    prompts: Sequence[ChatPrompt],
    own: Sequence[list[int]],
    its: Sequence[list[int]],
) -> dict[str, Any]:
    """The model's answers `own` beside the base's answers `its`.

    Returns:
        {"prompts", "same": {"value", "interval"}, "loss", "base", "difference", "followed"}; loss, base and difference,
        nats per token of the base's answers, as `mean_over_documents` gives them; "followed" as `followed` does.
    """
    same = float(np.mean([list(a) == list(b) for a, b in zip(own, its, strict=True)]))
    texts = [
        Scored(
            np.array([*prompt.token_ids, *reply], np.int64),
            np.arange(len(prompt.token_ids), len(prompt.token_ids) + len(reply)),
        )
        for prompt, reply in zip(prompts, its, strict=True)
    ]
    sums = [np.array([loss.sum() for loss, _ in score_tokens(m.model, texts)], np.float64) for m in (model, base)]
    counts = np.array([len(reply) for reply in its], np.float64)
    return {
        "prompts": len(its),
        "same": {"value": same, "interval": list(wilson_interval(same, len(its)))},
        "loss": mean_over_documents(sums[0], counts),
        "base": mean_over_documents(sums[1], counts),
        "difference": mean_over_documents(sums[0] - sums[1], counts),
        "followed": followed(model.tokenizer, prompts, own, its),
    }


def followed(
    tokenizer: Any, prompts: Sequence[ChatPrompt], own: Sequence[list[int]], its: Sequence[list[int]]
) -> dict[str, Any] | None:
    """{"prompts", "model", "base" (shares of checkable instructions followed), "difference" (paired)}; None without."""
    kept: list[dict[str, float]] = []
    for answers in (own, its):
        texts = [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]
        checks = [(n, prompt.check) for n, prompt in enumerate(prompts) if prompt.check is not None]
        kept.append({str(n): float(check(texts[n])) for n, check in checks})
    if not kept[0]:
        return None
    model, base = (float(np.mean([*found.values()])) for found in kept)
    return {"prompts": len(kept[0]), "model": model, "base": base, "difference": paired_difference(*kept)}


def _json_object(answer: str) -> bool:
    found = re.search(r"\{.*\}", answer, re.S)
    try:
        return found is not None and {"name", "use"} <= set(json.loads(found[0]))
    except ValueError:
        return False


def _words(answer: str) -> int:
    return len(re.findall(r"[\w'-]+", answer))


def _cased(letters: Callable[[str], bool]) -> Check:
    return lambda answer: any(c.isalpha() for c in answer) and letters(answer)


INSTRUCTIONS: tuple[tuple[str, Check], ...] = (
    ("Write one sentence about {}. Use capital letters only.", _cased(str.isupper)),
    ("Write one sentence about {}. Use lowercase letters only.", _cased(str.islower)),
    (
        "Name exactly three facts about {}, each on a line of its own that begins with '- '.",
        lambda answer: len(re.findall(r"^\s*- \S", answer, re.M)) == 3,
    ),
    (
        "List five words that belong to {}, numbered 1. to 5.",
        lambda answer: re.findall(r"^\s*(\d+)[.)] ", answer, re.M) == list("12345"),
    ),
    ("Describe {} in at most ten words.", lambda answer: 0 < _words(answer) <= 10),
    ("Write at least forty words about {}.", lambda answer: _words(answer) >= 40),
    ("Write two sentences about {} without a comma.", lambda answer: _words(answer) > 3 and "," not in answer),
    (
        "Write a sentence about {} that begins with the words 'Long ago'.",
        lambda answer: re.match(r"\W*Long ago\b", answer) is not None,
    ),
    (
        "Write a sentence about {} that ends with a question mark.",
        lambda answer: answer.rstrip(" \n\"'").endswith("?"),
    ),
    ("Write a JSON object about {} with the keys name and use, and nothing else.", _json_object),
    (
        "Give a title to a story about {}. Put the title in double angular brackets, such as <<title>>.",
        lambda answer: re.search(r"<<[^<>\n]+>>", answer) is not None,
    ),
    (
        "Write a sentence about {} that contains the words 'river' and 'winter'.",
        lambda answer: all(re.search(rf"\b{word}\b", answer, re.I) for word in ("river", "winter")),
    ),
)
TOPICS = (
    *("horses", "bridges", "tea", "the Moon", "trains", "cheese", "music", "rain", "libraries", "clocks", "forests"),
    "football",
)
