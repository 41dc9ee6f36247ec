"""`retrofox eval`: per-token loss of a model against its original and against its own gates switched off."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from retrofox.anatomy import attention_mode
from retrofox.config_values import trained_length
from retrofox.data.sources import listed
from retrofox.data.windows import Window, choose_windows
from retrofox.evaluation import loss_report
from retrofox.evaluation.compared_models import compare
from retrofox.evaluation.lm_eval import Scores, differences, find_tasks, print_tasks, refuse_without_tasks, run_tasks
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.counts import require_at_least
from retrofox.support.plots import save_figure
from retrofox.support.report import environment, output_console, progress_bar, write_results


def evaluate(
    model: str | os.PathLike | PreTrainedModel,
    against: str | os.PathLike | PreTrainedModel | Sequence[Any] | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    length: int = 4096,
    out: str | os.PathLike | None = None,
    *,
    max_documents: int | None = None,
    min_tokens: int = 2,
    controls: bool = True,
    text_field: str = "text",
    tasks: Sequence[str] = (),
    include_path: str | None = None,
    limit: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures L(i), the loss of document position i in nats, for a model and for those it is compared with.

    All lines read the same tokens: the first `length` tokens of each document, chosen with the model's tokenizer. A
    converted model is also run with its gates forced open and with its gates shuffled over heads, since a loss alone
    does not tell whether the gates do anything. Prints a bucket table; into `out` go eval.json and
    per_token_loss.png and .svg, each written whole or not at all, eval.json first.

    Args:
        model: Hub id, directory, .gguf file, adapter directory or a live model.
        against: the same, one or several; differences are taken to the first.
        data: files, directories, globs or hf:org/name, as `data.windows.documents` reads them (a document ends with
            the tokenizer's end-of-text token, as in training).
        length: tokens of a document that are read; a shorter document contributes the positions it has.
        out: directory for the results; None = only print and return them.
        max_documents: take the first so many documents that are long enough; None = all.
        min_tokens: leave out documents shorter than this; `length` makes every position an average over the same
            documents.
        controls: False skips the two control runs.
        text_field: field of JSON records that holds the text.
        tasks: lm-eval tasks or presets (short, ruler, longbench) to run as well, with further task files from
            `include_path` and `limit` examples each; with tasks, `data` may be empty.
        dtype, device: as `open_model` takes them.

    Returns:
        A dict, as in eval.json: "lines" (per line: key, label, source, seconds, mean),
        "buckets" (per bucket: from, to, tokens, documents, loss and difference by key), "tasks" (per line, task and
        metric), "task_differences" (to the first `against`: difference, standard_error, p, documents), "environment",
        "files".

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: no document, all too short, a tokenizer that differs between model and `against`, bad options.
    """
    require_at_least(2, length=length, min_tokens=min_tokens)
    require_at_least(1, max_documents=max_documents, limit=limit)
    refuse_without_tasks(tasks, include_path=include_path, limit=limit)
    sources = listed(data)
    if not sources and not tasks:
        raise ValueError("nothing to evaluate on: give data files (--data) or lm-eval tasks (--tasks)")
    started = time.time()
    found = None
    if tasks:
        name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model.config.name_or_path
        found = find_tasks(tasks, include_path, length=length, tokenizer=name)
    compared = compare(model, against, sources, out, tokenizer=tokenizer, dtype=dtype, device=device)
    chosen: list[Window] = []
    if sources:
        which: dict[str, Any] = {"min_tokens": min_tokens, "max_documents": max_documents}
        chosen = choose_windows(sources, compared.tokenizer, length, **which, text_field=text_field)
    result: dict[str, Any] = {
        "length": length,
        "min_tokens": min_tokens,
        "data": sources,
        "documents": len(chosen),
        "tokens": sum(len(w.token_ids) for w in chosen),
        "longest": max((len(w.token_ids) for w in chosen), default=0),
        "lines": [],
        "names": {},
        "tasks": {},
        "task_differences": {},
        "environment": environment(),
        "files": {},
    }
    if chosen and progress:
        cut = f": none has {length:,}" if result["longest"] < length else ""
        documents = f"{len(chosen)} document{'s' * (len(chosen) > 1)}"
        print(f"{documents} of up to {result['longest']:,} tokens{cut}", file=sys.stderr, flush=True)
    losses: dict[str, list[np.ndarray]] = {}
    scores: dict[str, Scores] = {}
    for key, opened in compared.columns():
        if key == "model":
            result["trained_length"] = trained_length(opened.model.config)
        result["names"][key] = opened.name
        if chosen:
            for line, values in _run(opened, key, chosen, controls, progress):
                result["lines"].append(line)
                losses[line["key"]] = values
        if found is not None:
            scores[key] = run_tasks(opened, found, max_length=length, limit=limit, progress=progress)
            result["tasks"][key] = scores[key].metrics
        opened = None  # frees the weights before the next model is loaded
    _report(result, losses, scores, out, started)
    return result


def _report(
    result: dict[str, Any],
    losses: dict[str, list[np.ndarray]],
    scores: dict[str, Scores],
    out: str | os.PathLike | None,
    started: float,
) -> None:
    console = output_console()
    length: int = result["length"]
    if losses:
        result["buckets"] = loss_report.buckets(losses, length)
        for line, summary in zip(result["lines"], loss_report.summarise(losses, length).values(), strict=True):
            line.update(summary)
        loss_report.print_losses(result, console)
        loss_report.add_curves(result, losses)
    if scores:
        reference = "base" if "base" in scores else "model"
        result["task_differences"] = differences(scores, reference)
        print_tasks(result["tasks"], result["task_differences"], result["names"], reference, console)
    result["seconds"] = time.time() - started
    if out is not None:
        stem = Path(out) / "per_token_loss"
        draw = (lambda: save_figure(loss_report.figure(result), stem)) if losses else None
        write_results(result, Path(out) / "eval.json", console, draw)


def _run(
    opened: LoadedModel, key: str, chosen: Sequence[Window], controls: bool, progress: bool
) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """One line for the model as it is and, for a converted one, one for each control."""
    labels = {key: opened.name}
    if controls and key == "model" and opened.fox is not None and opened.fox.get("gate") != "none":
        labels |= loss_report.CONTROLS
    texts = [Scored(w.token_ids, np.arange(1, len(w.token_ids)), w.name or "a document") for w in chosen]
    total = sum(len(w.token_ids) for w in chosen)
    for name, label in labels.items():
        started = time.perf_counter()
        switched = attention_mode(opened.model, name) if name in loss_report.CONTROLS else nullcontext()
        with progress_bar("tokens", progress) as bar, switched:
            task = bar.add_task(label, total=total - len(chosen))  # a window's last token is not read
            scores = score_tokens(opened.model, texts, partial(bar.advance, task))
        seconds = time.perf_counter() - started
        line = {
            "key": name,
            "label": label,
            "source": opened.source,
            "dtype": str(opened.model.dtype).removeprefix("torch."),
            "device": str(opened.device),
            "fox": opened.fox,
            "seconds": seconds,
            "tokens_per_second": total / seconds,
        }
        yield line, [loss for loss, _ in scores]
