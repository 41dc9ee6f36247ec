"""The command line: parses and calls, no logic. Importing it imports no torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Retrofit forget gates (Forgetting Attention, FoX) into a pretrained LLaMA-family model.\n\n"
    "The usual road:\n\n"
    "    retrofox convert HuggingFaceTB/SmolLM2-135M OUT    RoPE partly swapped for gates, proven against the base\n\n"
    "    retrofox train recipes/smollm2-partial.yaml       adapt it\n\n"
    "    retrofox eval RUN/model --against BASE --data T   per-token loss of both\n\n"
    "    retrofox generate RUN/model 'Once upon a time'    use it",
)
config_app = typer.Typer(no_args_is_help=True, help="About recipes.")
app.add_typer(config_app, name="config")

MODEL = "a converted model: directory or Hub id (a plain model works too where it makes sense)"
Revision = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: CUDA where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored (gates stay float32).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value, such as stages.0.tokens=2M.")]


def _version(value: bool) -> None:
    if value:
        from retrofox import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False):
    pass


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Hub id, local directory, or .gguf file of a pretrained model.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not exist yet.")],
    rope: Annotated[str, typer.Option(help="keep, partial (keep the short wavelengths) or drop.")] = "partial",
    max_wavelength: Annotated[
        float | None, typer.Option(help="partial: longest wavelength kept, in tokens. [default: trained length / 4]")
    ] = None,
    gate: Annotated[str, typer.Option(help="data (from the hidden state), bias, fixed (ALiBi) or none.")] = "data",
    init: Annotated[
        str, typer.Option(help="slopes (log-spaced half-lives), open (starts as the base) or calibrated.")
    ] = "slopes",
    half_life: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="MIN MAX", help="Half-lives of the heads, in tokens. [default: length/32 length*8]"),
    ] = None,
    sink_tokens: Annotated[int, typer.Option(help="First tokens of a document that never decay; 0 is the paper's.")] = 1,
    pro: Annotated[str, typer.Option(help="qk-norm,output-norm,output-gate,k-shift,v-shift; all; none.")] = "none",
    log_n: Annotated[int | None, typer.Option(help="Scale logits by ln(position)/ln(N) beyond N trained tokens.")] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Text files: fit gates and queries to the base's attention on them.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link the weight files instead of copying them.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the parity proof (and say so in OUT).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    revision: Revision = None,
) -> None:
    """Converts a pretrained model: gates in, RoPE out (wholly, partly or not), proven against the original.

    Weights are copied or linked, never loaded (a .gguf file is dequantised); OUT appears whole or not at all. It ends
    with a parity proof in a fresh process: gates open + RoPE kept must give the base model's logits.
    """
    from retrofox.model.configuration_fox import FoxSpec

    spec = FoxSpec(
        rope=rope,
        max_wavelength=max_wavelength,
        gate=gate,
        init=init,
        half_life=half_life,
        sink_tokens=sink_tokens,
        pro=pro,  # type: ignore[arg-type]
        log_n=log_n,
    )
    from retrofox import artefact, conversion_report as report

    files = [str(file) for file in calibrate or []]
    if dry_run:
        plan = artefact.plan_for(source, spec, revision)
        print(json.dumps(plan.to_dict(), indent=2)) if as_json else report.print_plan(plan)
        return
    with report.copying(quiet=as_json) as progress:
        result = artefact.write(
            source, out, spec, link=link, verify=not no_verify, revision=revision, progress=progress, calibrate=files
        )
    print(json.dumps(result, indent=2)) if as_json else report.print_conversion(result, out)


def main() -> None:
    """Entry point: bad input ends with one clear message and exit code 2, Ctrl-C with 130."""
    try:
        app()
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        if os.environ.get("RETROFOX_TRACEBACK"):
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(error)}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


def _plain(error: BaseException) -> Any:
    from rich.markup import escape

    return escape(str(error) or type(error).__name__)
