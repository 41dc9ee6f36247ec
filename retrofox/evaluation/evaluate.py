"""`retrofox eval`: per-token loss of a model against its original and against its own gates switched off."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from retrofox.anatomy import attention_mode
from retrofox.data.sources import listed
from retrofox.data.windows import Window, _require_files, choose_windows
from retrofox.evaluation import loss_report
from retrofox.evaluation.lm_eval import find_tasks, run_tasks
from retrofox.evaluation.per_token_loss import window_losses
from retrofox.loading.opened import Opened, open_model
from retrofox.loading.tokenizers import open_tokenizer, require_same_tokenizer
from retrofox.support.memory import peak_bytes, reset_peak
from retrofox.support.report import (
    check_folder,
    environment,
    output_console,
    progress_bar,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTROLS = {"open": "gates forced open", "shuffled": "gates shuffled"}


def evaluate(
    model: str | os.PathLike | PreTrainedModel,
    against: str | os.PathLike | PreTrainedModel | Sequence[Any] | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    length: int = 4096,
    out: str | os.PathLike | None = None,
    *,
    max_documents: int | None = None,
    windows: int | None = 1,
    min_tokens: int = 2,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    batch: int = 1,
    controls: bool = True,
    text_field: str = "text",
    tokenizer: Any = None,
    tasks: Sequence[str] = (),
    include_path: str | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures L(i), the loss of document position i in nats, for a model and for what it is compared with.

    All lines read the same tokens: the first `length` tokens of each document, chosen with the model's tokenizer. A
    converted model is also run with its gates forced open and with its gates shuffled over heads, since a loss alone
    does not tell whether the gates do anything. Prints a bucket table; into `out` go eval.json, buckets.csv,
    per_token_loss.csv and per_token_loss.png and .svg, each written whole or not at all, eval.json last.

    Args:
        model: Hub id, directory, .gguf file, adapter directory or a live model.
        against: the same, one or several; differences are taken to the first.
        data: files, directories, globs or hf:org/name, as `data.windows.documents` reads them (a document ends with
            the tokenizer's end-of-text token, as in training).
        length: tokens per window; a shorter document contributes the positions it has.
        out: directory for the results; None = only print and return them.
        max_documents: take the first so many documents that are long enough; None = all.
        windows: windows of `length` tokens per document, each read without the text before it; None = all.
        min_tokens: leave out documents shorter than this; `length` makes every position an average over the same
            documents.
        batch: windows run at one time.
        controls: False skips the two control runs.
        text_field: field of JSON records that holds the text.
        tasks: lm-eval tasks to run as well, with further task files from `include_path` and `limit` examples each;
            with tasks, `data` may be empty.

    Returns:
        A dict, as in eval.json: "lines" (per line: key, label, source, seconds, peak_memory_bytes, mean, slopes),
        "buckets" (per bucket: from, to, tokens, documents, loss and difference by key), "environment", "files".

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: no document, all too short, a tokenizer that differs between model and `against`, bad options.
    """
    sources, others = listed(data), _listed(against)
    _check(length, sources, tasks, windows, min_tokens, batch, max_documents, limit)
    check_folder(out)
    if not tasks and (include_path is not None or limit is not None):
        raise ValueError("include_path and limit say how lm-eval tasks run: name tasks, or drop them")
    started = time.time()
    manager = find_tasks(tasks, include_path) if tasks else None
    tokenizer = tokenizer or _tokenizer_of(model)
    for other in others:
        require_same_tokenizer(tokenizer, other)
    chosen: list[Window] = []
    if sources:
        chosen = choose_windows(
            sources,
            tokenizer,
            length,
            windows=windows,
            min_tokens=min_tokens,
            max_documents=max_documents,
            text_field=text_field,
        )
    result: dict[str, Any] = {
        "length": length,
        "windows_per_document": windows,
        "min_tokens": min_tokens,
        "data": sources,
        "documents": len({w.document for w in chosen}),
        "tokens": sum(len(w.token_ids) for w in chosen),
        "document_names": list(dict.fromkeys(w.name for w in chosen)),
        "longest": max((len(w.token_ids) for w in chosen), default=0),
        "tokens_sha256": _fingerprint(chosen),
        "lines": [],
        "tasks": {},
        "environment": environment(),
    }
    losses: dict[str, list[np.ndarray]] = {}
    for number, source in enumerate([model, *others]):
        key = "model" if number == 0 else "base" if number == 1 else f"base{number}"
        opened = open_model(source, tokenizer=tokenizer, dtype=dtype, device=device)
        if number == 0:
            result["trained_length"] = getattr(opened.model.config, "max_position_embeddings", None)
        if chosen:
            for line, values in _run(opened, key, chosen, batch, controls and number == 0, progress):
                result["lines"].append(line)
                losses[line["key"]] = values
        if tasks:
            result["tasks"][key] = run_tasks(opened, tasks, manager, max_length=length, limit=limit, batch=batch)
        opened = None  # frees the weights before the next model is loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    _tell_apart(result["lines"])
    _report(result, losses, chosen, out, started)
    return result


def _report(
    result: dict[str, Any],
    losses: dict[str, list[np.ndarray]],
    chosen: Sequence[Window],
    out: str | os.PathLike | None,
    started: float,
) -> None:
    """Completes the result with its statistics, prints the tables and writes the files."""
    console = output_console()
    length: int = result["length"]
    if chosen:
        result["buckets"] = loss_report.buckets(losses, chosen, length)
        for line, summary in zip(result["lines"], loss_report.summarise(losses, chosen, length).values(), strict=True):
            line.update(summary)
        loss_report.print_table(result, console)
    if result["tasks"]:
        _print_tasks(result["tasks"], console)
    result["seconds"] = time.time() - started
    result["files"] = {}
    if out is not None:
        result["files"] = loss_report.write_files(result, losses, chosen, Path(out))
        console.print(f"wrote {', '.join(result['files'].values())}", highlight=False, soft_wrap=True)


def _check(
    length: int,
    data: Sequence[str],
    tasks: Sequence[str],
    windows: int | None,
    min_tokens: int,
    batch: int,
    max_documents: int | None,
    limit: int | None,
) -> None:
    if not 2 <= length < 2**31:
        raise ValueError(f"length must be at least 2 tokens and below 2^31, got {length}")
    if not data and not tasks:
        raise ValueError("nothing to evaluate on: give data files (--data) or lm-eval tasks (--tasks)")
    if min_tokens < 2 or min_tokens > length:
        raise ValueError(f"min_tokens must lie between 2 and the length, {length}; got {min_tokens}")
    counts = {"windows": windows, "batch": batch, "max_documents": max_documents, "limit": limit}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    _require_files(data)


def _listed(against: Any) -> list[Any]:
    if against is None:
        return []
    return list(against) if isinstance(against, (list, tuple)) else [against]


def _tokenizer_of(source: Any) -> Any:
    if isinstance(source, (str, os.PathLike)):
        return open_tokenizer(os.fspath(source))
    return open_model(source).tokenizer


def _run(
    opened: Opened, key: str, chosen: Sequence[Window], batch: int, controls: bool, progress: bool
) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """One line for the model as it is and, for a converted one, one for each control."""
    modes = {key: ("fox", opened.name)}
    if controls and opened.fox is not None and opened.fox.get("gate") != "none":
        modes |= {mode: (mode, label) for mode, label in CONTROLS.items()}
    total = sum(len(w.token_ids) for w in chosen)
    for name, (mode, label) in modes.items():
        reset_peak(opened.device)
        started = time.perf_counter()
        switched = nullcontext() if mode == "fox" else attention_mode(opened.model, mode)
        with progress_bar("tokens", progress) as bar, switched:
            task = bar.add_task(label, total=total)
            values = window_losses(opened.model, chosen, batch, lambda n, bar=bar, task=task: bar.advance(task, n))
        seconds = time.perf_counter() - started
        line = {
            "key": name,
            "label": label,
            "source": opened.source,
            "mode": None if opened.fox is None else mode,
            "dtype": str(next(opened.model.parameters()).dtype).removeprefix("torch."),
            "device": str(opened.device),
            "fox": opened.fox,
            "seconds": seconds,
            "tokens_per_second": total / seconds,
            "peak_memory_bytes": peak_bytes(opened.device),
        }
        yield line, values


def _tell_apart(lines: list[dict[str, Any]]) -> None:
    """Numbers labels that would otherwise be the same, as checkpoints of one name in two places are."""
    for line in lines:
        same = [other for other in lines if other["label"] == line["label"]]
        if len(same) > 1:
            for number, other in enumerate(same, 1):
                other["label"] = f"{other['label']} ({number})"


def _fingerprint(chosen: Sequence[Window]) -> str:
    digest = hashlib.sha256()
    for window in chosen:
        digest.update(window.token_ids.astype("<u4").tobytes())
        digest.update(b"\xff" * 4)
    return digest.hexdigest()


def _print_tasks(tasks: dict[str, dict[str, dict[str, Any]]], console: Console) -> None:
    table = Table(title="lm-eval tasks", title_justify="left")
    for column in ("task", "metric", *tasks):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, metrics in next(iter(tasks.values())).items():
        for metric, value in metrics.items():
            if not isinstance(value, float | None) or "_stderr" in metric:
                continue
            cells = []
            for results in tasks.values():
                mean, error = results[task][metric], results[task].get(metric.replace(",", "_stderr,"))
                spread = f" ±{error:.3f}" if isinstance(error, float) else ""
                cells.append("-" if mean is None else f"{mean:.4f}{spread}")
            table.add_row(task, metric, *cells)
    console.print(table)
