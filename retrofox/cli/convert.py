"""`retrofox convert` on the command line: options to a FoxSpec, nothing else. Importing it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from retrofox.cli.options import there
from retrofox.cli.spec_options import spec_of, with_spec_options
from retrofox.support.interruptions import Interruptions


@with_spec_options
def convert(
    source: Annotated[str, typer.Argument(help="Hub id, local directory, or .gguf file of a pretrained model.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; new, or empty.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Fields of the retrofit, as recipes have them: fox.half_life=[512,65536] fox.horizon=16."),
    ] = None,
    *,
    fox: dict[str, Any],
    texts: Annotated[
        list[Path] | None, typer.Option(help="--init measured: files to measure each head's attention distance on.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link the weight files instead of copying them.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the parity proof (and say so in OUT).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    revision: Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the code beside a tokenizer that needs it, naming it."),
    ] = False,
) -> None:
    """Converts a pretrained model: adds gates, scales RoPE (or keeps or removes it), and proves the result.

    Weights are copied or linked, never loaded (a .gguf file is dequantised); OUT appears whole or not at all. It ends
    with a parity proof in a fresh process: gates open + RoPE kept must give the base model's logits.

    `--horizon 16` is short for `fox.horizon=16`, and so for every field of the retrofit.
    """
    spec = spec_of(changes or [], fox)
    from retrofox.loading.source import check_out

    check_out(there(source), out)
    files = [str(file) for file in texts or []]
    if dry_run:
        from retrofox.conversion import artefact
        from retrofox.conversion import report as report

        plan, values = artefact.preview(source, out, spec, link=link, revision=revision, texts=files)
        print(json.dumps(values, indent=2)) if as_json else report.print_plan(plan, values)
        return
    with Interruptions("nothing was written"):  # a plain kill cleans up as Ctrl-C does
        from retrofox.conversion import artefact
        from retrofox.conversion import report as report
        from retrofox.loading.trust import trusting_code

        with report.copying(quiet=as_json) as progress, trusting_code(trust_remote_code):
            result = artefact.write(
                source,
                out,
                spec,
                link=link,
                verify=not no_verify,
                revision=revision,
                progress=progress,
                texts=files,
            )
    print(json.dumps(result, indent=2)) if as_json else report.print_conversion(result, out)
