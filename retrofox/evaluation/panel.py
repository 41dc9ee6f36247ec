"""`retrofox panel`: whether a model is harmed on text that nobody tuned it to, kind by kind, beside its base."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel

from retrofox.config_values import trained_length
from retrofox.data.windows import documents
from retrofox.evaluation.compared_models import compare
from retrofox.evaluation.instructions import answer, chat_prompts, compare_answers
from retrofox.evaluation.model_difference import summarise_rows, token_differences
from retrofox.evaluation.panel_texts import SHORTEST_ROW, choose_kinds, rows_of
from retrofox.support.counts import require_at_least
from retrofox.support.plots import span_label
from retrofox.support.report import environment, output_console, print_table, progress_bar, write_results

LENGTH, TOKENS, ANSWER = 8192, 131072, 128
"""Tokens of a row, of a kind, and of an answer."""
QUICK_LENGTH, QUICK_TOKENS, QUICK_ANSWER = 2048, 8192, 64
"""The same in the quick form, for a CPU; some instructions ask for forty words, which 32 tokens can't hold."""


def panel(
    model: str | os.PathLike | PreTrainedModel,
    against: str | os.PathLike | PreTrainedModel,
    data: Sequence[str] = (),
    out: str | os.PathLike | None = None,
    *,
    quick: bool = False,
    length: int | None = None,
    tokens: int | None = None,
    chat: int = 0,
    text_field: str = "text",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Loss of a model and its base on a dozen kinds of text, one row each, and the KL divergence between the two.

    The documents of a kind stand one after the other in rows of `length` tokens. A row of the table has the loss at the
    first sixteenth of the positions and at the second half (0-512 and 4k-8k of 8k), its paired difference to the base
    with a 95 % interval over documents (over rows, where there are fewer than five documents), and KL(base || model)
    inside the base's trained length. The kind with the largest difference is the headline.

    Args:
        against: the base.
        data: KIND=PATH words: such a kind replaces the shipped texts of its name. A directory instead: each file or
            folder in it is a kind, and the shipped texts are left out.
        out: directory for panel.json.
        quick: shorter rows and fewer tokens, for a CPU; `length` and `tokens` (of each kind) override either form.
        chat: also compare greedy answers to so many prompts, and read the base's answers as one more kind, "chat".

    Returns:
        A dict, as in panel.json: "kinds" (each as `summarise_rows` gives it), "worst" ({"kind", "from", "to", "mean",
        "interval"}), "instructions" (as `compare_answers` gives it; None without chat), "environment", "files".

    Raises:
        FileNotFoundError: a model or text that is not there.
        ValueError: bad options, another tokenizer or vocabulary, no text of some kind.
    """
    length = (QUICK_LENGTH if quick else LENGTH) if length is None else length
    tokens = (QUICK_TOKENS if quick else TOKENS) if tokens is None else tokens
    require_at_least(64, length=length, tokens=tokens)
    require_at_least(0, chat=chat)
    kinds = choose_kinds(data)
    if chat and "chat" in kinds:
        raise ValueError('with --chat the kind "chat" is the base\'s answers: call your own texts something else')
    started = time.time()
    texts = [path for paths in kinds.values() for path in paths]
    compared = compare(model, against, texts, out, tokenizer=tokenizer, dtype=dtype, device=device)
    tokenizer = compared.tokenizer
    prompts = chat_prompts(tokenizer, chat) if chat else []
    rows = {}
    for kind, paths in kinds.items():
        rows[kind] = rows_of((ids for _, ids in documents(paths, tokenizer, text_field=text_field)), length, tokens)
    empty = [kind for kind, own in rows.items() if not own]
    if empty:
        raise ValueError(f"under {SHORTEST_ROW} tokens of kind {', '.join(empty)}: give more, or leave it out")
    mine, its = compared.open(model), compared.open(against)
    instructions = None
    if prompts:
        answer_tokens = QUICK_ANSWER if quick else ANSWER
        own, theirs = (answer(opened, prompts, answer_tokens, progress) for opened in (mine, its))
        instructions = compare_answers(mine, its, prompts, own, theirs)
        said = [np.array([*prompt.token_ids, *reply]) for prompt, reply in zip(prompts, theirs, strict=True)]
        rows["chat"] = rows_of(said, length, tokens)
    trained = trained_length(its.model.config)
    spans = [(0, length // 16), (length // 2, length)]
    found: dict[str, Any] = {}
    with progress_bar("tokens", progress) as bar:
        task = bar.add_task("panel", total=sum(len(row.token_ids) for own in rows.values() for row in own))
        for kind, own in rows.items():
            bar.update(task, description=kind)
            advance = partial(bar.advance, task)
            differences = [token_differences(mine.model, its.model, row.token_ids, advance) for row in own]
            found[kind] = summarise_rows(own, differences, spans, trained)
    result: dict[str, Any] = {
        "names": {"model": mine.name, "base": its.name},
        "model": {"label": mine.name, "source": mine.source},
        "base": {"label": its.name, "source": its.source},
        "length": length,
        "tokens": tokens,
        "kinds": found,
        "worst": worst_row(found),
        "instructions": instructions,
        "seconds": time.time() - started,
        "environment": environment(),
        "files": {},
    }
    console = output_console()
    print_panel(result, console)
    if out is not None:
        write_results(result, Path(out) / "panel.json", console)
    return result


def worst_row(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The kind and positions where the model's loss exceeds the base's most: {"kind", "from", "to", "mean", ...}."""
    rows = [
        {"kind": kind, "from": span["from"], "to": span["to"], **span["difference"]}
        for kind, found in kinds.items()
        for span in found["spans"]
        if span["tokens"]
    ]
    return max(rows, key=lambda row: row["mean"])


def headline(result: Mapping[str, Any]) -> str:
    """The worst row in a sentence."""
    worst = result["worst"]
    text = f"Worst row: {worst['kind']} at {span_label(worst)}, {worst['mean']:+.3f} nats to the base"
    if worst["interval"] is None:
        return f"{text}; one row gives no interval"
    low, high = worst["interval"]
    return f"{text} ({low:+.3f} to {high:+.3f}){'' if low > 0 else ', no clear harm'}"


def instruction_sentence(found: Mapping[str, Any]) -> str:
    """How alike the answers are, and how many instructions that a program can check are followed."""
    low, high = (100 * end for end in found["same"]["interval"])
    text = (
        f"Of {found['prompts']} greedy answers {100 * found['same']['value']:.0f} % are the base's token by token "
        f"({low:.0f} to {high:.0f}); the base's answers cost {found['difference']['mean']:+.3f} nats a token more"
    )
    followed = found["followed"]
    if followed is None:
        return text
    change = followed["difference"]
    return (
        f"{text}. Of {followed['prompts']} checkable instructions the model follows {100 * followed['model']:.0f} %, "
        f"the base {100 * followed['base']:.0f} % ({100 * change['difference']:+.1f} points, p {change['p']:.2g})"
    )


def print_panel(result: Mapping[str, Any], console: Console) -> None:
    """The headline, the table, the instructions."""
    console.print(headline(result), highlight=False, soft_wrap=True)
    columns = ["kind", "tokens"]
    for span in next(iter(result["kinds"].values()))["spans"]:
        columns += [f"base {span_label(span)}", f"difference {span_label(span)}"]
    rows = []
    for kind, found in result["kinds"].items():
        row = [kind, f"{found['tokens']:,}"]
        for span in found["spans"]:
            row += [number(span["base"]["mean"]), signed(span["difference"])]
        rows.append([*row, number(found["kl"]["mean"])])
    title = f"{result['model']['label']} less {result['base']['label']}, nats per token; 95 % intervals"
    print_table(console, [*columns, "KL"], rows, title, left="kind")
    if result["instructions"] is not None:
        console.print(instruction_sentence(result["instructions"]), highlight=False, soft_wrap=True)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def signed(value: Mapping[str, Any]) -> str:
    """A difference with its interval; "-" where there is no token."""
    if value["mean"] is None or value["interval"] is None:
        return "-" if value["mean"] is None else f"{value['mean']:+.3f}"
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(value["mean"], *value["interval"])
