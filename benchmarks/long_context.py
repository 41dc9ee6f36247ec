"""Memory and tokens a second against the length of the context: the converted model beside its base.

    python benchmarks/long_context.py [--model DIR] [--lengths 8192,32768,131072,524288,1048576]
        [--contenders full,base,base-static] [--prefill 131072] [--new 320] [--seconds 280] [--cell-seconds 90]
        [--out benchmarks/long-context.json]

Without --model (a converted directory): SmolLM2-135M's shapes with random weights of deviation 0.02 and half-lives of
16 to 16384 tokens, which says what memory and time are, not what text comes out. The text is random tokens. `full`
prefills 8192 tokens at a time and decodes from a captured step; `base` is the unconverted model with its
dynamic cache, its prompt in one piece, and `base-static` with transformers' static cache, compiled, which is never
read but filled, as below. `prefill_s` is the time to the first token, `tokens_per_second` the median of
later ones, `cache_gb` what keys, values and gates take after the last, `peak_gb` the most that was allocated.

Contexts of more than --prefill tokens are not read: each layer's cache is filled with the keys, values and gates that
its projections make of random vectors, 8192 tokens at a time, which takes seconds where a
prefill's time grows with the square of the length. Such rows have no `prefill_s`.

A length that doesn't fit is written down as its error, and so is a measurement that took longer than --cell-seconds or
what was left of --seconds. Goes on where a file of the same settings ends: what it has is not measured again. Draws
benchmarks/long-context.png and .svg; --draw draws them from the file alone.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from model_shapes import PICO, SMOLLM2, base_of_shapes
from provenance import at_most, provenance
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import retrofox
from retrofox.generation.generate import PREFILL
from retrofox.model.cache import CACHE, GateCache

ROOT = Path(__file__).resolve().parent.parent
FOX = {"rope": "partial", "max_wavelength": 1400, "half_life": (16.0, 16384.0), "sink_tokens": 1}
CONTENDERS = ("full", "base", "base-static")
WARM = 280  # tokens before steps are timed: captured by then


class Arrivals:
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def models(arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    built: dict[str, Any] = {}
    if arguments.model is not None:
        built["fox"] = retrofox.load(arguments.model)
    else:
        base = LlamaForCausalLM(LlamaConfig(**(PICO if arguments.pico else SMOLLM2)))
        built = {"fox": retrofox.convert(base, fox=retrofox.FoxSpec(**FOX)), "base": base}
    if "base" not in built:
        built["base"] = base_of_shapes(built["fox"])
    return {name: model.to(arguments.device, dtype).eval() for name, model in built.items()}


def held(cache: Any) -> int:
    """Bytes of the tokens that a cache holds."""
    total = 0
    for layer in cache.layers:
        tensors = (layer.keys, layer.values, getattr(layer, "sums", None))
        total += sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return total


@torch.no_grad()
def fill(model: Any, cache: Any, length: int) -> None:
    """Puts `length` tokens of random hidden states' keys, values and gates into a cache."""
    generator = torch.Generator(model.device).manual_seed(0)
    cache.tokens_to_reserve = length + 1024
    most = length if isinstance(cache, StaticCache) else PREFILL
    for start in range(0, length, most):
        shape = (1, min(most, length - start), model.config.hidden_size)
        for number, layer in enumerate(model.get_decoder().layers):
            attention = layer.self_attn
            x = torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)
            x = layer.input_layernorm(x)
            projected = attention.k_proj(x), attention.v_proj(x)
            k, v = (y.view(1, shape[1], -1, attention.head_dim).transpose(1, 2) for y in projected)
            if not hasattr(attention, "num_fox_heads"):
                cache.update(k, v, number)
                continue
            gates = GateCache(cache, attention.log_f(x), x)
            gates.update(k, v, number)


def measure(built: dict[str, Any], contender: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    model = built["base" if contender.startswith("base") else "fox"]
    cuda = model.device.type == "cuda"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (1, length), generator=generator).to(model.device)
    if contender == "base-static":
        cache: Any = StaticCache(config=model.config, max_cache_len=length + arguments.new + 1)
    else:
        cache = DynamicCache(config=model.config)
    arrivals = Arrivals()
    options: dict[str, Any] = {"max_new_tokens": arguments.new, "do_sample": False, "eos_token_id": None}
    reads = length <= arguments.prefill and contender != "base-static"
    if not reads:
        fill(model, cache, length - 1)
    elif contender != "base" and length > PREFILL:
        options["prefill_chunk_size"] = PREFILL
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), streamer=arrivals, pad_token_id=0, **{CACHE: cache}, **options
    )
    tokens = arrivals.times[1:]
    later = tokens[min(WARM, len(tokens) // 2) :]
    steps = [b - a for a, b in itertools.pairwise(later)]
    result = {
        "tokens_per_second": 1 / statistics.median(steps),
        "whole_tokens_per_second": len(steps) / sum(steps),
        "cache_gb": held(cache) / 1e9,
    }
    if reads:
        result["prefill_s"] = tokens[0] - started
    if cuda:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if not contender.startswith("base"):
        result["decoded_by"] = model.decoded_by
    return result


def draw(report: dict[str, Any], out: Path) -> None:
    """Tokens a second and gigabytes of cache against the context, a line for each contender."""
    import matplotlib  # not on every machine that has a GPU: `--draw` draws what is on file
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    from retrofox.support.plots import COLOURS, STYLE, tokens_label

    panels = {"tokens_per_second": "Tokens a second", "cache_gb": "Cache (GB)", "peak_gb": "Peak memory (GB)"}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (column, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for number, name in enumerate(CONTENDERS):
                rows = [
                    (int(n), row[name][column]) for n, row in report["lengths"].items() if column in row.get(name, {})
                ]
                if rows:
                    axes.plot(*zip(*sorted(rows), strict=True), "o-", color=COLOURS[number], label=LABELS[name])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_locator(FixedLocator([int(length) for length in report["lengths"]]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("Context (tokens)")
            axes.set_title(title)
        figure.axes[0].legend()
        for kind in ("png", "svg"):
            figure.savefig(out.with_suffix(f".{kind}"), dpi=150, metadata={"Date": None} if kind == "svg" else None)


LABELS = {
    "full": "retrofit, full cache",
    "base": "base, dynamic cache",
    "base-static": "base, static cache, compiled",
}


def show(report: dict[str, Any]) -> None:
    columns = ("prefill_s", "tokens_per_second", "cache_gb", "peak_gb")
    print(f"{'context':>10} {'':6}" + "".join(f"{c:>19}" for c in columns))
    for length, row in report["lengths"].items():
        for name, cell in row.items():
            numbers = "".join(f"{cell[c]:19.4f}" if c in cell else " " * 19 for c in columns)
            print(f"{length:>10} {name:6}{numbers}  {cell.get('error', cell.get('decoded_by', ''))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a converted directory; SmolLM2's shapes if not given")
    parser.add_argument("--pico", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--lengths", default="8192,32768,131072,524288,1048576")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--prefill", type=int, default=131072, help="most tokens to prefill; more are filled in")
    parser.add_argument("--new", type=int, default=320)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further measurement after so many"
    )
    parser.add_argument("--cell-seconds", type=float, default=90.0, help="stop a measurement after so many")
    parser.add_argument("--draw", action="store_true", help="only draw what --out holds")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "long-context.json")
    arguments = parser.parse_args()
    contenders = arguments.contenders.split(",")
    if unknown := set(contenders) - set(CONTENDERS):
        parser.error(f"contenders are {', '.join(CONTENDERS)}; got {', '.join(sorted(unknown))}")
    if arguments.draw:
        draw(json.loads(arguments.out.read_text(encoding="utf-8")), arguments.out)
        return
    started, built = time.perf_counter(), models(arguments)
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    settings = {"device": device, "dtype": arguments.dtype, "model": Path(arguments.model or "random weights").name,
                "fox": built["fox"].config.fox}  # fmt: skip
    report: dict[str, Any] = {**provenance(), **settings, "new": arguments.new, "lengths": {}}
    report = json.loads(json.dumps(report))
    if arguments.out.is_file():
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        if all(old.get(k) == report[k] for k in settings):
            report["lengths"] = old["lengths"]
    for name in contenders:  # compiles the kernels, which is no part of a first token's time
        measure(built, name, 2 * PREFILL if built["fox"].device.type == "cuda" else 600, arguments)
    for length in map(int, arguments.lengths.split(",")):
        for name in contenders:
            if "cache_gb" in report["lengths"].get(str(length), {}).get(name, {}):
                continue
            left = arguments.seconds - (time.perf_counter() - started)
            if left <= 0:
                print(f"out of time before {length}, {name}", flush=True)
                continue
            try:
                with at_most(min(left, arguments.cell_seconds)):
                    row = measure(built, name, length, arguments)
            except Exception as error:  # the others are still worth their time
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            report["lengths"].setdefault(str(length), {})[name] = row
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(f"{time.perf_counter() - started:6.0f} s  {length} {name}: "
                  f"{ {k: v for k, v in row.items() if k != 'kept'} }", flush=True)  # fmt: skip
    show(report)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(report, arguments.out)
    else:
        print("matplotlib is not installed: draw the figure elsewhere, with --draw")


if __name__ == "__main__":
    main()
