"""`retrofox convert` on the command line: options to a FoxSpec, nothing else. Importing it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from retrofox.cli.tokens import METAVAR, count, length
from retrofox.fox_spec import IDLE, PRESETS, FoxSpec, default_rope, idle_fields
from retrofox.support.counts import parse_tokens
from retrofox.support.interruptions import Interruptions

NAMES = "; ".join(f"{name}: {what}" for name, (_, what) in PRESETS.items())


def convert(
    source: Annotated[str, typer.Argument(help="Hub id, local directory, or .gguf file of a pretrained model.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; new, or empty.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"A published system; other options change single parts of it. {NAMES}. [default: fox-partial]"
        ),
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(
            help="interpolate (stretch slow pairs), keep, partial (keep the short wavelengths), drop, or anneal (fade "
            "while training). [default: interpolate, partial with --max-wavelength, or the preset's]"
        ),
    ] = None,
    rope_factor: Annotated[
        float | None,
        typer.Option(
            help="interpolate: times the trained length that the slowest pairs are stretched to. [default: 8]"
        ),
    ] = None,
    max_wavelength: Annotated[
        float | None,
        typer.Option(
            parser=length,
            metavar=METAVAR,
            help="partial: longest wavelength kept, in tokens. [default: trained length / 4]",
        ),
    ] = None,
    layer_max_wavelength: Annotated[
        str | None,
        typer.Option(metavar="LAYERS=N,...", help="Longest wavelength kept in single layers: 0-3=inf,20=0."),
    ] = None,
    anneal_to: Annotated[str | None, typer.Option(help="anneal: where it ends, partial or drop.")] = None,
    anneal_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar=METAVAR,
            help="anneal: training tokens over which pairs fade, lowest frequencies first.",
        ),
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="data (from the hidden state), bias (learned, data-independent), fixed or none. "
            "[default: data, or the preset's]"
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="slopes (log-spaced half-lives), open (starts as the base), measured (on --texts), or alibi "
            "(ALiBi's slopes). [default: slopes, or the preset's]"
        ),
    ] = None,
    half_life: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="MIN MAX",
            help="Shortest and longest half-life of the heads, in tokens. [default, of the trained length: 1/2 and "
            "128 times with --rope interpolate, else 1/32 and 8 times]",
        ),
    ] = None,
    t_min: Annotated[
        float | None,
        typer.Option(
            parser=length,
            metavar=METAVAR,
            help="Shortest time constant T, f = exp(-1/T): the FoX paper's T_min, in place of --half-life (T ln 2).",
        ),
    ] = None,
    t_max: Annotated[
        float | None, typer.Option(parser=length, metavar=METAVAR, help="Longest time constant: the paper's T_max.")
    ] = None,
    sink_tokens: Annotated[
        int | None,
        typer.Option(
            help="First tokens of a document that never decay; the paper has 0. [default: 1, or the preset's]"
        ),
    ] = None,
    pro: Annotated[
        str | None,
        typer.Option(
            help="Parts of FoX (Pro), comma-separated: qk-norm, output-norm, output-gate, k-shift, v-shift; all; none. "
            "[default: none, or the preset's]"
        ),
    ] = None,
    log_n: Annotated[
        int | None,
        typer.Option(parser=count, metavar=METAVAR, help="Scale logits by ln(position)/ln(N) beyond N trained tokens."),
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option(
            metavar="LN_EPS", help="Skip keys that the gates cut off, losing at most e^LN_EPS of the weight; try -10."
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None, typer.Option(help="--init measured: files to measure each head's attention distance on.")
    ] = None,
    open_heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="--init measured: kv heads that look up facts and start open. [default: 0]"),
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
    """
    given: dict[str, Any] = {
        "preset": preset,
        "rope": rope,
        "gate": gate,
        "pro": pro,
        "rope_factor": rope_factor,
        "max_wavelength": max_wavelength,
        "anneal_to": anneal_to,
        "anneal_tokens": anneal_tokens,
        "init": init,
        "open_heads": open_heads,
        "half_life": None if half_life is None else half_lives(half_life),
        "t_min": t_min,
        "t_max": t_max,
        "sink_tokens": sink_tokens,
        "log_n": log_n,
        "prune": prune,
        "layer_max_wavelength": None if layer_max_wavelength is None else layer_wavelengths(layer_max_wavelength),
    }
    given = {name: value for name, value in given.items() if value is not None}
    refuse_idle(given)
    spec = FoxSpec.from_dict(given)
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


LADDER = ("half_life", "t_min", "t_max")
"""Options that set where gates start."""


def refuse_idle(given: dict[str, Any]) -> None:
    """Raises ValueError, in the names of options, for one among those given that the others leave without effect.

    Args:
        given: FoxSpec field -> value, of the options that were given.
    """
    preset = PRESETS.get(given.get("preset", "fox-partial"), ({}, ""))[0]
    chosen = {"rope": default_rope(given.get("max_wavelength")), **preset, **given}
    switches = {name: chosen.get(name, getattr(FoxSpec, name)) for name in ("rope", "anneal_to", "gate", "init")}

    def option(name: str) -> str:
        """What set a field: the option itself, or the preset."""
        text = f"--{name.replace('_', '-')} {switches[name]}"
        return f"--preset {given['preset']} ({text})" if name in preset and name not in given else text

    for name, other in idle_fields(**switches).items():
        for field in LADDER if name == "half_life" else (name,):
            if field in given:
                what = IDLE[name].replace("rope ", "--rope ")
                raise ValueError(
                    f"--{field.replace('_', '-')} sets {what}, but {option(other)} leaves it without effect: drop one "
                    "of them"
                )


def half_lives(texts: tuple[str, str]) -> tuple[float, float]:
    """The two numbers of --half-life, suffixes read."""
    try:
        return length(texts[0]), length(texts[1])
    except typer.BadParameter as error:
        raise ValueError(f"--half-life: {error.message}") from None


MOST_LAYERS = 10_000
"""Layers that one part of --layer-max-wavelength can name; the model says which of them it lacks."""


def layer_wavelengths(text: str) -> dict[int, float]:
    """{layer: tokens} from text such as "0-3=inf,20=0".

    Raises:
        ValueError: it reads differently, or names a layer twice.
    """
    result: dict[int, float] = {}
    for part in text.split(","):
        layers, _, tokens = part.partition("=")
        first, dash, last = layers.partition("-")
        try:
            names = range(int(first), int(last if dash else first) + 1)[:MOST_LAYERS]
            value = float(str(parse_tokens(tokens)))
        except ValueError:
            names = range(0)
            value = 0.0
        if not names or any(layer in result for layer in names):
            raise ValueError(
                "--layer-max-wavelength takes layers and tokens, each layer once, such as 0-3=inf,20=0; "
                f"got {part!r} in {text!r}"
            )
        result |= dict.fromkeys(names, value)
    return result
