"""The command line: parses and calls, no logic. Importing it imports no torch."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from retrofox.cli import adapt, measure, recipes, use
from retrofox.cli.convert import convert
from retrofox.support.processes import wait_to_be_ended

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Retrofit forget gates (Forgetting Attention, FoX) into a pretrained LLaMA-family model.\n\n"
    "Typical use:\n\n"
    "    retrofox convert HuggingFaceTB/SmolLM2-135M OUT   adds gates, scales RoPE, checks it; train does so too\n\n"
    "    retrofox recipes cp smollm2-stretch               a recipe to start from: set its data and output\n\n"
    "    retrofox train smollm2-stretch.yaml               converts and trains; resumes if run again\n\n"
    "    retrofox eval RUN/model --against BASE --data T   loss at each position, of both\n\n"
    "    retrofox generate RUN/model 'Once upon a time'    continues a text",
)
SEVERAL = ("--data", "--against", "--texts", "--mode")
"""Options that may be repeated."""
app.add_typer(recipes.config_app, name="config")
app.add_typer(recipes.app, name="recipes")


def _version(value: bool) -> None:
    if value:
        from retrofox.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
):
    pass


def doctor() -> None:
    """Reports what this machine has: versions, GPU, extras, which attention backend would run and why, and whether vLLM
    sees the plug-in that serves converted models.
    """
    import torch
    from fox_kernels import choose

    from retrofox.serving.installed import optional
    from retrofox.support.report import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(1, 128, 8, 64, device=device, dtype=torch.bfloat16)
    backend, reason = choose(q, q, q, torch.zeros(1, 128, 8, device=device))
    report = {**environment(), "attention_backend": backend, "reason": reason, **optional()}
    print(json.dumps(report, indent=2, default=str))


for command in (convert, adapt.prepare, adapt.plan, adapt.train, adapt.merge):
    app.command()(command)
app.command(name="eval")(measure.evaluate)
for command in (use.generate, use.chat, measure.needle, measure.inspect, measure.panel, measure.report):
    app.command()(command)
for command in (use.push, doctor):
    app.command()(command)
app.command(name="verify-serving")(use.verify_serving)


def spread(arguments: list[str]) -> list[str]:
    """Lets `--data a b c` stand for `--data a --data b --data c`, since a shell turns `--data *.txt` into the former.

    Whatever follows a value of an option in SEVERAL, up to the next option, is one more value of it.
    """
    result: list[str] = []
    for argument in arguments:
        if not argument.startswith("-") and len(result) > 1 and result[-2] in SEVERAL:
            result.append(result[-2])
        result.append(argument)
    return result


def at_home(arguments: list[str]) -> list[str]:
    """~ and paths under it spelled out, which a shell leaves as they are in quotes and in `--out=~/x`.

    `generate` and `chat` take texts too: of their arguments only names of files that are there count as paths.
    """
    result = []
    for argument in arguments:
        option, path = re.fullmatch(r"(--[\w-]+=)?(.*)", argument, re.DOTALL).groups("")  # type: ignore[union-attr]
        takes_texts = arguments[0] in ("generate", "chat")
        whole = os.path.expanduser(path) if path.startswith("~/") or (path == "~" and not takes_texts) else path
        result.append(argument if takes_texts and not os.path.exists(whole) else f"{option}{whole}")
    return result


def main() -> None:
    """Entry point: bad input ends with one clear message and exit code 2, Ctrl-C (handled by typer) with 130."""
    sys.argv[1:] = at_home(spread(sys.argv[1:]))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # other encodings than UTF-8 lack characters that models write
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would fill a log file
    # On a CPU every process that imports peft beside bitsandbytes 0.50 would be told of a kernel on the Hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        app()
    except RuntimeError:
        wait_to_be_ended()
        raise
    except (ValueError, OSError) as error:
        if os.environ.get("RETROFOX_TRACEBACK"):
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            wait_to_be_ended()
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename:  # without "[Errno 2]"
            text = f"{error.filename2 or error.filename}: {error.strerror}"  # the second is a file's final name
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error:", "bold red"), f" {text}"))
        sys.exit(2)
