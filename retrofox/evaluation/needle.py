"""Needle in a haystack: facts hidden in a long text, asked for at the end (Lin et al., ICLR 2025, section 4.4).

A needle is found if greedy decoding, given the prompt, would emit exactly the answer's tokens a_1 ... a_n:

    found  <=>  argmax_v p(v | prompt, a_1 ... a_k-1) = a_k  for k = 1 ... n.

One forward pass over prompt and answer decides it: decoding emits a_1 iff it is the argmax, then reads a_1, and so on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from retrofox.config_values import trained_length
from retrofox.data.sources import listed
from retrofox.evaluation.compared_models import compare
from retrofox.evaluation.needle_prompts import MODES, Prompt, make_prompts, read_haystack
from retrofox.evaluation.needle_report import print_tables, shares, write_files
from retrofox.evaluation.token_scores import score_tokens
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.counts import require_at_least
from retrofox.support.report import environment, output_console, progress_bar, write_results


def needle(
    model: str | os.PathLike | PreTrainedModel,
    against: str | os.PathLike | PreTrainedModel | Sequence[Any] | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
    depths: Sequence[float] | int = 5,
    mode: str | Sequence[str] = "easy",
    out: str | os.PathLike | None = None,
    *,
    trials: int = 2,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    text_field: str = "text",
    tokenizer: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Share of needles found over context lengths and depths, and the mean log-probability of their answers.

    All models read the same prompts. Prints a table for each mode with Wilson intervals; into `out` go needle.json, and
    as .png and .svg needle (share by length) and a heat-map over depths for each model and mode. Harder tasks are
    RULER's: `retrofox eval --tasks ruler`.

    Args:
        against: models to compare with, one or several: Hub ids, directories or live models.
        data: files whose text is the haystack; it is repeated if shorter than twice the longest context.
        lengths: whole prompts' lengths in tokens, to which the answer comes.
        depths: where in the haystack the needle goes, 0 = its start, 1 = its end; a number spaces so many evenly.
        mode: easy, standard, or both.
        trials: prompts per cell, each with another fact and another stretch of the haystack.
        seed: of facts and stretches.

    Returns:
        {"models": {name: {"modes": {mode: {"found": depths x lengths shares, "by_length": [{"length", "prompts",
        "found", "interval", "log_probability"}]}}}}, "answers": [...], ...}.

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: bad options, no text, another tokenizer in `against`, or a length too short for needle and question.
    """
    places = [float(d) for d in (np.linspace(0, 1, depths) if isinstance(depths, int) else depths)]
    if any(not 0 <= depth <= 1 for depth in places):
        raise ValueError(f"depths must be numbers from 0 (start) to 1 (end); got {places}")
    modes = list(dict.fromkeys([mode] if isinstance(mode, str) else mode))
    if not {*modes} <= {*MODES}:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {', '.join(modes)}")
    require_at_least(1, trials=trials, depths=len(places))
    sources, lengths = listed(data), list(dict.fromkeys(lengths))
    started = time.time()
    compared = compare(model, against, sources, out, tokenizer=tokenizer, dtype=dtype, device=device)
    hay = read_haystack(compared.tokenizer, sources, max(lengths), text_field)
    prompts = make_prompts(hay, modes, lengths, places, trials, seed)
    result: dict[str, Any] = {
        "modes": modes,
        "lengths": lengths,
        "depths": places,
        "trials": trials,
        "seed": seed,
        "data": sources,
        "names": {},
        "models": {},
        "answers": [],
        "environment": environment(),
    }
    for role, opened in compared.columns():
        begun = time.perf_counter()
        answers = _answers(opened, prompts, progress)
        result["names"][role] = opened.name
        result["models"][opened.name] = {
            "source": opened.source,
            "role": role,
            "trained_length": trained_length(opened.model.config),
            "seconds": time.perf_counter() - begun,
            "modes": {},
        }
        for mode in modes:
            own = [answer for answer in answers if answer["mode"] == mode]
            result["models"][opened.name]["modes"][mode] = shares(own, lengths, places)
        result["answers"] += [{"model": opened.name, **answer} for answer in answers]
        opened = None  # frees the weights before the next model is loaded
    result |= {"seconds": time.time() - started, "files": {}}
    console = output_console()
    print_tables(result, console)
    if out is not None:
        write_results(result, Path(out) / "needle.json", console, partial(write_files, result, Path(out)))
    return result


def _answers(opened: LoadedModel, prompts: Sequence[Prompt], progress: bool) -> list[dict[str, Any]]:
    """One record for each prompt, as in needle.json; `answer` ends at the first wrong token."""
    texts = [prompt.scored for prompt in prompts]
    with progress_bar("tokens", progress) as bar:
        task = bar.add_task(opened.name, total=sum(text.needed for text in texts))
        scores = score_tokens(opened.model, texts, lambda tokens: bar.advance(task, tokens))
    answers = []
    for prompt, (loss, best) in zip(prompts, scores, strict=True):
        wrong = np.flatnonzero(best != prompt.answer)
        emitted = best[: wrong[0] + 1] if len(wrong) else best
        answers.append(
            {
                "mode": prompt.task.mode,
                "length": prompt.length,
                "depth": prompt.depth,
                "needle": prompt.task.answer.strip(),
                "city": prompt.task.city,
                "answer": opened.tokenizer.decode(emitted.tolist(), skip_special_tokens=True),
                "found": not len(wrong),
                "log_probability": -float(loss.mean()),
            }
        )
    return answers
