"""`eval`, `needle`, `inspect`, `panel` and `report` on the command line. Importing it imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrofox.cli.options import METAVAR, MODEL, Device, Dtype, Tasks, TextField, count, require_there, task_names
from retrofox.support.counts import ALLOWED


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[str] | None, typer.Option(help="Files or directories of documents, one or more.")] = None,
    against: Annotated[list[str] | None, typer.Option(help="Models to compare with, the base first.")] = None,
    length: Annotated[
        int,
        typer.Option(parser=count, metavar=METAVAR, help="Tokens to read of each document, from its start."),
    ] = 4096,
    out: Annotated[Path | None, typer.Option(help="Directory for JSON and plots.")] = None,
    max_documents: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use only the first N documents.")
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(parser=count, metavar=METAVAR, help="Skip documents with fewer tokens.")
    ] = 2,
    controls: Annotated[bool, typer.Option(help="Also run with gates forced open and shuffled over heads.")] = True,
    text_field: TextField = "text",
    tasks: Tasks = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with additional lm-eval task files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="lm-eval: examples per task.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measures the loss at each document position, L(i), for a model and its original.

    Prints a bucket table; writes JSON and plots into --out.
    """
    names = task_names(tasks)
    if not data and not names:
        raise ValueError("nothing to evaluate on: give data files (--data) or lm-eval tasks (--tasks)")
    require_there([model, *(against or ())], data or ())
    from retrofox.evaluation.evaluate import evaluate as run

    options: dict[str, Any] = {"length": length, "min_tokens": min_tokens}
    options |= {"max_documents": max_documents, "controls": controls, "text_field": text_field}
    options |= {"tasks": names, "include_path": include_path, "limit": limit}
    run(model, against=against or None, data=data or [], out=out, **options, device=device, dtype=dtype)


def needle(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[str], typer.Option(help="Text files that make the haystack, one or more.")],
    against: Annotated[
        list[str] | None, typer.Option(help="Models that read the same prompts, the base first.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "1024,2048,4096,8192",
    depths: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of depths, evenly spaced from start to end.")
    ] = 5,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="easy (the needle holds question and answer), standard, or both. [default: easy]"),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts per length and depth, each of another text.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Seed of facts and places.")] = 0,
    text_field: TextField = "text",
    out: Annotated[Path | None, typer.Option(help="Directory for JSON and plots.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Hides facts in long texts and asks for them, at several context lengths and depths.

    One forward pass over prompt and answer tells what greedy decoding would emit. Prints the share found with its 95 %
    Wilson interval and the answers' mean log-probability; 100 prompts per length (`--trials 20` at 5 depths) tell
    shares apart that differ by 15 points.

    **Modes.** *easy* asks in the needle's own words, which a base model can follow; *standard* in others. Harder tasks
    are RULER's (arXiv 2404.06654), through lm-eval: `retrofox eval MODEL --tasks ruler --length 32Ki`.

    Example:

        retrofox needle RUN/model --against BASE --data books/ --lengths 1024,8192,32768 --mode easy --mode standard
    """
    try:
        sizes = [count(part) for part in lengths.split(",")]
    except typer.BadParameter:
        raise ValueError(
            f"lengths must be whole numbers with commas between, such as 1024,4096 or 4Ki,32Ki; got {lengths!r}: each "
            f"takes {ALLOWED}"
        ) from None
    if unknown := [name for name in mode or () if name not in ("easy", "standard")]:
        raise ValueError(f"mode must be one of easy, standard; got {unknown[0]!r}")
    require_there([model, *(against or ())], data)
    from retrofox.evaluation.needle import needle as run

    options: dict[str, Any] = {"depths": depths, "mode": mode or ["easy"], "trials": trials, "seed": seed}
    options["text_field"] = text_field
    run(model, against or None, data, sizes, **options, out=out, device=device, dtype=dtype)


def inspect(
    model: Annotated[str, typer.Argument(help="A converted model, or an adapter of one: directory or Hub id.")],
    data: Annotated[list[str] | None, typer.Option(help="Measure the gates on these texts.")] = None,
    length: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Tokens to read of each document.")] = 2048,
    horizon: Annotated[
        float | None, typer.Option(help="Nats of decay at which a key counts as forgotten: the model's own, else 16.")
    ] = None,
    max_documents: Annotated[int, typer.Option(min=1, metavar="N", help="Use only the first N documents.")] = 8,
    text_field: TextField = "text",
    out: Annotated[Path | None, typer.Option(help="Directory for JSON and a plot.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Shows each head's half-life: local and global heads, dead gates.

    With --data also the live share at 8k, 32k and 128k tokens (--length 128Ki): what attention and cache must keep.
    """
    require_there([model], data or ())
    from retrofox.evaluation.gates import inspect as run

    options: dict[str, Any] = {"length": length, "max_documents": max_documents, "horizon": horizon, "out": out}
    run(model, data or None, **options, text_field=text_field, device=device, dtype=dtype)


def panel(
    model: Annotated[str, typer.Argument(help=MODEL)],
    against: Annotated[str, typer.Option(help="The base that it was made of.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND=PATH: texts of your own, beside those that are shipped; or a directory with a file or folder "
            "for each kind, in place of those that are shipped. Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter rows, fewer tokens: for a CPU.")] = False,
    length: Annotated[
        int | None, typer.Option(parser=count, metavar=METAVAR, help="Tokens of a row (8Ki; quick: 2Ki).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(parser=count, metavar=METAVAR, help="Tokens of each kind at most (128Ki; quick: 8Ki).")
    ] = None,
    chat: Annotated[int, typer.Option(help="Also compare greedy answers to so many prompts (208 at most).")] = 0,
    text_field: TextField = "text",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Looks for harm on text that nobody tuned the model to: a dozen kinds, each its own row beside the base.

    Prose with line breaks, C, JavaScript, Markdown, a specification, logs, JSON, verse, German, French, mathematics,
    chat. Loss at early and late positions, difference to the base with its interval, KL to the base. The worst row is
    the headline. Small texts are shipped; give yours for narrow intervals.

        retrofox panel RUN/model --against BASE --data "verse=poems/" --data "c=src/*.c" --chat 200 --out panel
    """
    from retrofox.evaluation.panel_texts import choose_kinds

    require_there([model, against], [path for paths in choose_kinds(data or ()).values() for path in paths])
    from retrofox.evaluation.panel import panel as run

    options: dict[str, Any] = {"quick": quick, "length": length, "tokens": tokens, "chat": chat}
    run(model, against, data or (), out, **options, text_field=text_field, device=device, dtype=dtype)


def report(
    model: Annotated[str, typer.Argument(help=MODEL)],
    against: Annotated[list[str] | None, typer.Option(help="Models to compare with, the base first.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files or directories of long documents, one or more.")] = None,
    suite: Annotated[Literal["quick", "long", "full"], typer.Option(help="How much is measured; see above.")] = "quick",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report; by default `report` in the model's directory."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(parser=count, metavar=METAVAR, help="Tokens of the longest text, not the suite's.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help="Documents that the loss reads, not the suite's.")] = None,
    trials: Annotated[int | None, typer.Option(help="Needle prompts per length and depth, not the suite's.")] = None,
    tasks: Tasks = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with additional lm-eval task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="lm-eval: examples per task.")] = None,
    text_field: TextField = "text",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measures memory, loss, harm, gates and tasks beside the base, and writes one self-contained HTML page and JSON.

    Parts that are finished are kept: interrupted, it goes on; asked again, it runs what has changed. Suites: *quick*
    (easy and standard needles, loss and gates to 32k tokens; on a CPU to 2k), *long* (to 64k, more prompts, RULER's
    tasks), *full* (still more, and the paper's short tasks).

        retrofox report RUN/model --against BASE --data books/ --suite quick
    """
    names = task_names(tasks)
    require_there([model, *(against or ())], data or ())
    from retrofox.reporting.report import report as run

    options: dict[str, Any] = {"length": length, "max_documents": max_documents, "trials": trials}
    options |= {"tasks": names, "include_path": include_path, "limit": limit}
    run(model, against, data or [], suite, out, **options, text_field=text_field, dtype=dtype, device=device)
