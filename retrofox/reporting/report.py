"""`retrofox report`: a suite of evaluations run one after the other, kept as they finish, and put on one page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from retrofox.data.sources import listed
from retrofox.data.windows import choose_windows
from retrofox.evaluation.compared_models import compare
from retrofox.evaluation.lm_eval import refuse_without_tasks
from retrofox.loading.device import resolve_device
from retrofox.loading.errors import first_line
from retrofox.loading.source import holds_converted
from retrofox.reporting.page import render
from retrofox.reporting.sections import PartStore, ReportPart, ReportRequest, plan_parts
from retrofox.reporting.suites import Suite, choose_suite
from retrofox.reporting.summary import summarise
from retrofox.support.files import write_json_result, write_result
from retrofox.support.interruptions import Interruptions
from retrofox.support.report import duration, environment


def report(
    model: str | os.PathLike,
    against: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    suite: str = "quick",
    out: str | os.PathLike | None = None,
    *,
    length: int | None = None,
    max_documents: int | None = None,
    trials: int | None = None,
    tasks: Sequence[str] = (),
    include_path: str | None = None,
    limit: int | None = None,
    text_field: str = "text",
    dtype: str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures a model beside its base and writes one HTML page, report.html, and one JSON, report.json.

    Parts: needles, loss by position, unlike texts and instructions, gates, tasks. Each one's numbers and figures are
    kept in OUT/parts as soon as it is done, with the models' files, texts, options and versions: a report that was
    interrupted goes on after its last finished part, and one that is asked for again runs what has changed. What can't
    be measured is named on the page with the reason, and tried again the next time.

    Args:
        model: Hub id, directory, adapter directory or .gguf file.
        against: the same, one or several; differences are taken to the first.
        data: texts for needles, loss and gates.
        suite: "quick", "long" or "full" (see `suites.SUITES`); on a CPU "quick" is shorter.
        out: where it goes; None = the folder "report" in a converted model's directory; `push` leaves it at home.
        length, max_documents, trials: other sizes than the suite's: longest text in tokens, documents of the
            loss, needle prompts for each length and depth.
        tasks: lm-eval tasks or presets beside the suite's own; `include_path` and `limit` as in `evaluate`.

    Returns:
        What report.json holds: "suite", "models", "summary", "parts" (each evaluation's own numbers), "missing",
        "seconds", "environment".

    Raises:
        FileNotFoundError: a model or text that is not there.
        ValueError: bad options, another tokenizer in `against`, nothing to measure, or nothing that could be.
    """
    started = time.time()
    sizes = {"length": length, "max_documents": max_documents, "trials": trials}
    chosen = choose_suite(suite, resolve_device(device).type == "cpu", **sizes, tasks=tasks)
    if out is None and not (Path(model).is_dir() and holds_converted(os.fspath(model))):
        raise ValueError(f"name a folder for the report (--out): {model} is no directory of a converted model for it")
    folder = Path(model) / "report" if out is None else Path(out)
    compared = compare(model, listed(against), listed(data), folder, dtype=dtype, device=device)
    refuse_without_tasks(chosen.tasks, include_path=include_path, limit=limit)
    request = ReportRequest(
        os.fspath(model),
        listed(against),
        listed(data),
        text_field=text_field,
        min_tokens=_min_tokens(listed(data), compared.tokenizer, chosen, text_field),
        include_path=include_path,
        limit=limit,
    )
    parts, missing = plan_parts(request, chosen)
    store = PartStore(folder, request, dtype, device)
    # Progress goes to stderr, line by line, where no bar is drawn, too.
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Interruptions(f"finished parts are kept in {folder / 'parts'}"):
        where = {"dtype": dtype, "device": device, "progress": progress}
        done = _run_all(parts, store, missing, where, console)
    if not done:
        raise ValueError("no part could be measured: " + "; ".join(f"{n}: {why}" for n, why in missing.items()))
    summary = summarise({name: entry["result"] for name, entry in done.items()})
    for entry in done.values():
        entry["result"].pop("answers", None)  # each single needle's, which its part has
    result: dict[str, Any] = {
        "suite": suite,
        "model": request.model,
        "against": request.against,
        "data": request.data,
        "summary": summary,
        "parts": done,
        "missing": missing,
        "seconds": time.time() - started,
        "environment": environment(),
    }
    write_json_result(folder / "report.json", result)
    write_result(folder / "report.html", render(result).encode())
    console.print(f"wrote {folder / 'report.html'} and {folder / 'report.json'}", soft_wrap=True)
    return result


def _min_tokens(data: list[str], tokenizer: Any, suite: Suite, text_field: str) -> int:
    """The suite's length where enough documents have it: every position is then an average over the same ones."""
    which: dict[str, Any] = {"max_documents": suite.documents, "text_field": text_field}
    try:
        found = choose_windows(data, tokenizer, suite.length, min_tokens=suite.length, **which) if data else []
    except ValueError:
        choose_windows(data, tokenizer, suite.length, min_tokens=2, **which)  # none is so long; refuses none at all
        return 2
    return suite.length if len(found) == suite.documents else 2


def _run_all(
    parts: Sequence[ReportPart], store: PartStore, missing: dict[str, str], where: dict[str, Any], console: Console
) -> dict[str, dict[str, Any]]:
    """Every part's entry by name, run where none is kept; adds to `missing` what refuses its models or texts."""
    done: dict[str, dict[str, Any]] = {part.name: entry for part in parts if (entry := store.read(part)) is not None}
    for name, entry in done.items():
        console.print(f"{name}: kept from before ({duration(entry['seconds'])})")
    waiting = [part for part in parts if part.name not in done]
    for number, part in enumerate(waiting, 1):
        left = _left(waiting[number - 1 :], done.values())
        console.print(f"\n[{number}/{len(waiting)}] {part.name}: {part.measures}{left}", soft_wrap=True)
        begun = time.perf_counter()
        try:
            result = part.run(**part.options, out=store.place(part), **where)
        except ValueError as error:  # what an evaluation says of models or texts it can't measure
            missing[part.name] = first_line(error)
            console.print(f"{part.name} is left out: {missing[part.name]}", soft_wrap=True)
        else:
            done[part.name] = store.write(part, result, time.perf_counter() - begun)
    return {part.name: done[part.name] for part in parts if part.name in done}


def _left(waiting: Sequence[ReportPart], done: Any) -> str:
    """How long all that waits will take, at the speed of the finished parts."""
    timed = [entry for entry in done if entry["tokens"]]
    tokens = sum(part.tokens for part in waiting)
    if not (timed and tokens):
        return ""
    seconds = tokens * sum(entry["seconds"] for entry in timed) / sum(entry["tokens"] for entry in timed)
    return f"; about {duration(seconds)}{'' if all(part.tokens for part in waiting) else ' and the tasks'} left"
