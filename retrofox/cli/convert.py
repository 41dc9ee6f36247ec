"""`retrofox convert` on the command line: options to a FoxSpec, nothing else. Importing it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrofox.cli.options import require_there
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
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the parity proof (and say so in OUT).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    revision: Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")] = None,
    to: Annotated[
        Literal["fla"] | None,
        typer.Option(help="fla: write a converted SOURCE as flash-linear-attention's ForgettingTransformer."),
    ] = None,
) -> None:
    """Converts a pretrained model: adds gates, scales RoPE (or keeps or removes it), and proves the result.

    Weights are copied, never loaded (a .gguf file is dequantised); OUT appears whole or not at all. It ends
    with a parity proof in a fresh process: gates open + RoPE kept must give the base model's logits.

    A checkpoint that came with forget gates, of the FoX authors' repository or of flash-linear-attention, is renamed,
    with the same logits. `--to fla` goes the other way.

    `--horizon 16` is short for `fox.horizon=16`, and so for every field of the retrofit.
    """
    spec = spec_of(changes or [], fox)
    if to is not None:
        if changes or fox or texts or no_verify or dry_run:
            raise ValueError(f"--to {to} writes a converted model as it is: of options it takes --revision and --json")
        if revision is None:
            require_there([source], [])
        with Interruptions("nothing was written"):
            from retrofox.conversion.own_gates import write_for_fla

            written = write_for_fla(source, out, revision)
        print(json.dumps(written, indent=2) if as_json else f"{out}: {written['tensors']} tensors for {to}")
        return
    from retrofox.loading.atomic_directory import refuse_existing

    refuse_existing(out)
    files = [str(file) for file in texts or []]
    if revision is None:
        require_there([source], files)
    from retrofox.conversion.convert import plan_for, preview, write
    from retrofox.conversion.own_gates import HORIZON_ALONE
    from retrofox.conversion.report import print_conversion, print_plan

    fields = {*fox, *(change.partition("=")[0].removeprefix("fox.") for change in changes or ())}
    if fields - {"horizon"} and plan_for(source, spec, revision).own_gates is not None:
        raise ValueError(HORIZON_ALONE.format(source))  # such a field may have the value that it has anyway
    if dry_run:
        plan, values = preview(source, out, spec, revision=revision, texts=files)
        print(json.dumps(values, indent=2)) if as_json else print_plan(plan, values)
        return
    with Interruptions("nothing was written"):  # a plain kill cleans up as Ctrl-C does
        options: dict[str, Any] = {"verify": not no_verify, "revision": revision, "texts": files}
        result = write(source, out, spec, progress=not as_json, **options)
    print(json.dumps(result, indent=2)) if as_json else print_conversion(result, out)
