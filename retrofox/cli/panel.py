"""The command `panel`. Importing it imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from retrofox.cli.options import MODEL, Device, Dtype, TextField, TrustRemoteCode, look
from retrofox.cli.tokens import METAVAR, count


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
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Looks for harm on text that nobody tuned the model to: a dozen kinds, each its own row beside the base.

    Prose with line breaks, C, JavaScript, Markdown, a specification, logs, JSON, verse, German, French, mathematics,
    chat. Loss at early and late positions, difference to the base with its interval, KL to the base. The worst row is
    the headline. Small texts are shipped; give yours for narrow intervals.

        retrofox panel RUN/model --against BASE --data "verse=poems/" --data "c=src/*.c" --chat 200 --out panel
    """
    from retrofox.evaluation.panel_texts import choose_kinds

    look([model, against])
    choose_kinds(data or ())
    from retrofox.evaluation.panel import panel as run
    from retrofox.loading.trust import trusting_code

    options: dict[str, Any] = {"quick": quick, "length": length, "tokens": tokens, "chat": chat}
    with trusting_code(trust_remote_code):
        run(model, against, data or (), out, **options, text_field=text_field, device=device, dtype=dtype)
