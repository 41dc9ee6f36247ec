"""The command `report`. Importing it imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrofox.cli.options import MODEL, Baselines, Device, Dtype, TextField, TrustRemoteCode, look, task_names
from retrofox.cli.tokens import METAVAR, count


def report(
    model: Annotated[str, typer.Argument(help=MODEL)],
    against: Annotated[list[str] | None, typer.Option(help="Models to compare with, the base first.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files or directories of long documents, one or more.")] = None,
    suite: Annotated[Literal["quick", "long", "full"], typer.Option(help="How much is measured; see below.")] = "quick",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report; by default `report` in the model's directory."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(parser=count, metavar=METAVAR, help="Tokens of the longest text, not the suite's.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help="Documents that the loss reads, not the suite's.")] = None,
    trials: Annotated[int | None, typer.Option(help="Needle prompts per length and depth, not the suite's.")] = None,
    baseline: Baselines = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="lm-eval tasks, comma-separated, or short, ruler, longbench (needs retrofox[eval])."),
    ] = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with additional lm-eval task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="lm-eval: examples per task.")] = None,
    text_field: TextField = "text",
    name: Annotated[str | None, typer.Option(help="What the page calls the model; by default its directory.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measures memory, loss, harm, gates and tasks beside the base, and writes one self-contained HTML page and JSON.

    Parts that are finished are kept: interrupted, it goes on; asked again, it runs what has changed. Suites: *quick*
    (easy and standard needles, loss and gates to 32k tokens; on a CPU to 2k), *long* (to 64k, more prompts, RULER's
    tasks), *full* (still more, and the paper's short tasks).

        retrofox report RUN/model --against BASE --data books/ --suite quick
    """
    names = task_names(tasks, include_path)
    look([model, *(against or ())], data, baseline)
    from retrofox.loading.trust import trusting_code
    from retrofox.reporting.report import report as run

    options: dict[str, Any] = {"length": length, "max_documents": max_documents, "trials": trials}
    options |= {"baselines": baseline or [], "tasks": names}
    options |= {"name": name, "include_path": include_path, "limit": limit}
    with trusting_code(trust_remote_code):
        run(model, against, data or [], suite, out, **options, text_field=text_field, dtype=dtype, device=device)
