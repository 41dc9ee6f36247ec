"""Prefill, decoding and memory of `generate`: a converted model beside its base, in turns in one run.

    python benchmarks/generate.py [--model DIR|FILE.gguf|CONVERTED] [--batches 1,16] [--contexts 2048,32768,131072]
        [--contenders fox,fox-loop,base,base-static] [--rounds 2] [--new 64] [--seconds 280] [--cell-seconds 60]
    python benchmarks/generate.py --device cpu --dtype float32 --contexts 128,1024,4096 --batches 1 --new 48 \\
        --rounds 5 --contenders fox,base --model FILE.gguf --out FILE.json

Without --model: SmolLM2-135M's shapes with random weights. A converted model, a Llama's, is taken as it is, its base
has random weights of the same shapes. Contenders: `fox` decodes as it does by default (a captured step on a GPU,
transformers' loop on a CPU), `fox-loop` by transformers' loop, `fox-full` with a cache that keeps all keys, `base`
with its dynamic cache, `base-static` with transformers' static cache, compiled. One generation gives all figures of a
contender in a cell and round. Times come from when tokens arrive: `first_ms` to the first token, `wall_ms` the median
between later ones, after compiling and capturing, `least_ms` the least; `whole_ms` their mean with everything before
the profiler runs. Over its last steps, on a GPU, `gpu_ms` is the sum of a step's kernels and `launches` their number,
from torch.profiler; `replay_ms` is one captured step between two CUDA events. On a CPU, `cpu_ms` and `first_cpu_ms`
are the processor's time for a later token and for the first, which other users of the machine disturb less. Where a
cell has more than --prefill tokens, its cache is filled with random keys and nothing is prefilled: a first token from
128k takes longer than all the steps that are to be timed. Its gates are half open. With --text prompts are that text,
and the gates of filled caches are those that the converted model has on it: so much a horizon leaves to read.
`cache_mb` is what a cache keeps allocated.

The result is written after every measurement. Measurements that a file of the same settings has in full are left out,
so the cells can be measured in several runs. No measurement begins after --seconds, and none takes longer than
--cell-seconds or what is left of --seconds: a longer one is stopped and stands as an error, which a later run tries
again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from model_shapes import PICO, SMOLLM2, base_of_shapes
from provenance import at_most, provenance
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, StaticCache

import retrofox
from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.anatomy import attentions, inner_model
from retrofox.evaluation.needle_prompts import read_haystack
from retrofox.generation.caches import cache_bytes, new_cache
from retrofox.generation.generate import part_tokens
from retrofox.loading.loaded_model import open_model
from retrofox.model.modeling_fox import CACHE

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = ("fox", "fox-loop", "fox-full", "base", "base-static")
PROFILED = 8  # steps
WARM = 12  # tokens before steps are timed: compiled and captured by then
LEAST_NEW = WARM + PROFILED + 10


class Arrivals:
    """A streamer that notes when tokens come and, on a GPU, profiles the last steps but one."""

    def __init__(self, cuda: bool, new: int):
        self.profiled_from = new - PROFILED - 1 if cuda else 0
        self.times: list[float] = []
        self.used: list[float] = []  # seconds of processors, by then
        self.count = -1  # the prompt comes first
        self.recorder: Any = None
        self.seen: Any = None

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.used.append(time.process_time())
        self.count += 1
        if not self.profiled_from:
            return
        if self.count == self.profiled_from:
            torch.cuda.synchronize()
            self.recorder = profile(activities=[ProfilerActivity.CUDA])
            self.recorder.start()
        elif self.count == self.profiled_from + PROFILED:
            torch.cuda.synchronize()
            self.recorder.stop()
            self.seen, self.recorder = self.recorder, None

    def end(self) -> None:
        pass

    def profiled(self) -> dict[str, Any]:
        if self.seen is None:
            return {}
        events = [e for e in self.seen.key_averages() if e.self_device_time_total > 0]
        largest = sorted(events, key=lambda e: -e.self_device_time_total)[:12]
        return {
            "gpu_ms": sum(e.self_device_time_total for e in events) / 1e3 / PROFILED,
            "launches": sum(e.count for e in events) / PROFILED,
            "kernels": [
                {"name": e.key[:90], "us": e.self_device_time_total / PROFILED, "count": e.count / PROFILED}
                for e in largest
            ],
        }


def models(arguments: argparse.Namespace) -> dict[str, Any]:
    """The base and its converted form, both on the device in the dtype."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is None:
        torch.manual_seed(0)
        base: Any = LlamaForCausalLM(LlamaConfig(**(PICO if arguments.pico else SMOLLM2)))
    else:
        base = open_model(arguments.model, dtype=dtype, device="cpu").model
    if getattr(base.config, "fox", None) is not None:
        base, converted = base_of_shapes(base), base
    else:
        fox = {"rope": "partial", "max_wavelength": 1400, "half_life": (256.0, 65536.0), "sink_tokens": 1}
        converted = retrofox.convert(base, fox=retrofox.FoxSpec(**fox))
    return {name: m.to(arguments.device, dtype).eval() for name, m in (("base", base), ("fox", converted))}


def text_of(tokenizer: Any, files: list[str], length: int) -> torch.Tensor:
    """(1, length) token ids of the files' text."""
    return torch.from_numpy(read_haystack(tokenizer, files, length, "text").token_ids[:length].astype("int64"))[None]


@torch.no_grad()
def gates_on(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Layer -> log_f (1, T, heads) float32 on a text (1, T)."""
    heard: dict[int, torch.Tensor] = {}
    gates = [attention.forget_gate for _, attention in attentions(model)]
    hooks = [
        gate.register_forward_hook(lambda module, given, log_f, layer=layer: heard.update({layer: log_f.detach()}))
        for layer, gate in enumerate(gates)
        if gate is not None
    ]
    inner_model(model)(input_ids=ids.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return heard


def filled(model: Any, contender: str, batch: int, context: int, new: int, gates: dict[int, torch.Tensor]) -> Any:
    """A cache with random keys and values of `context` tokens, and with the gates given, else half-open ones."""
    config = model.config
    kv, heads = config.num_key_value_heads, config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if contender == "base-static":
        cache: Any = StaticCache(config=config, max_cache_len=context + new + 1)
    else:
        cache = new_cache(model, "full" if contender == "fox-full" else "auto")
        cache.tokens_to_reserve = context + new + 1
    generator = torch.Generator(model.device).manual_seed(0)
    shape = (batch, kv, context, width)
    for index in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype) for _ in range(2))
        if contender.startswith("fox"):
            if index in gates:
                log_f = gates[index][:, :context].to(model.device).expand(batch, -1, -1)
                log_f = log_f.repeat_interleave(heads // log_f.shape[-1], -1).contiguous()
            else:
                log_f = torch.full((batch, context, heads), -1e-4, device=model.device)
            retrofox.model.modeling_fox.GateCache(cache, log_f).update(k, v, index)
        else:
            cache.update(k, v, index)
    return cache


def run(model: Any, contender: str, ids: torch.Tensor, new: int, cache: Any) -> dict[str, Any]:
    """One generation: times of its tokens, and what was profiled."""
    cuda = ids.is_cuda
    arrivals = Arrivals(cuda, new)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    kept = cache
    if cache is None and contender == "base-static":
        options["cache_implementation"] = "static"
    else:
        kept = cache or new_cache(model, "full" if contender == "fox-full" else "auto")
        options[CACHE] = kept
    part = part_tokens(model, len(ids))
    if cache is None and part is not None and ids.shape[1] > part:
        options["prefill_chunk_size"] = part
    replays: list[float] = []
    devices, loop = captured.DEVICES, captured._loop
    if contender == "fox-loop":
        captured.DEVICES = ()
    captured._loop = replaying(replays)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started, used = time.perf_counter(), time.process_time()
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=arrivals, **options)
    finally:
        captured.DEVICES, captured._loop = devices, loop
        if arrivals.recorder is not None:  # stopped in the middle
            arrivals.recorder.stop()
    if cuda:
        torch.cuda.synchronize()
    tokens = arrivals.times[1 : 1 + (arrivals.profiled_from or new)]
    later = [b - a for a, b in zip(tokens[WARM:], tokens[WARM + 1 :], strict=False)]
    result = {
        "wall_ms": statistics.median(later) * 1e3,
        "least_ms": min(later) * 1e3,
        "whole_ms": (tokens[-1] - tokens[0]) / (len(tokens) - 1) * 1e3,
    }
    if cache is None:
        result["first_ms"] = (tokens[0] - started) * 1e3
    if not cuda:
        spent = arrivals.used[1:]
        result["cpu_ms"] = statistics.median(b - a for a, b in zip(spent[WARM:], spent[WARM + 1 :], strict=False)) * 1e3
        if cache is None:
            result["first_cpu_ms"] = (spent[0] - used) * 1e3
    if kept is not None:
        result["cache_mb"] = cache_bytes(kept) / 1e6
    if cuda:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    result |= arrivals.profiled()
    if contender.startswith("fox"):
        result["decoded_by"] = model.decoded_by
    if replays:
        result["replay_ms"] = statistics.median(replays)
    return result


def replaying(spans: list[float]) -> Any:
    """A `captured._loop` that afterwards times some captured steps, the counters put back before each."""
    original = captured._loop

    def loop(decoding: Any, choice: Any, streamer: Any) -> Any:
        result = original(decoding, choice, streamer)
        if getattr(decoding, "graph", None) is None:
            return result
        result = result.clone()
        torch.cuda.synchronize()
        for _ in range(20):
            choice.at.fill_(choice.column - 1)
            decoding.lengths.lengths.sub_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            decoding.graph.replay()
            end.record()
            torch.cuda.synchronize()
            spans.append(start.elapsed_time(end))
        return result

    return loop


def measure(
    model: Any,
    contender: str,
    batch: int,
    context: int,
    arguments: argparse.Namespace,
    text: torch.Tensor | None,
    gates: dict[int, torch.Tensor],
) -> dict[str, Any]:
    """A contender's figures in one cell and round; an error stands as text."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (batch, context + 1), generator=generator)
    ids = (ids if text is None else text[:, : context + 1].expand(batch, -1)).to(model.device)
    new, synthetic = arguments.new, batch * context > arguments.prefill
    cache = filled(model, contender, batch, context, new, gates) if synthetic else None
    return run(model, contender, ids, new, cache)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of rounds, the least of the least; an error, or what isn't a number, as the last round has it."""
    result = dict(rounds[-1])
    for name, value in result.items():
        values = [x[name] for x in rounds if isinstance(x.get(name), (int, float))]
        if values and isinstance(value, (int, float)):
            result[name] = min(values) if name == "least_ms" else statistics.median(values)
    return result | {"rounds": len(rounds)}


def ratios(cells: dict[str, Any]) -> None:
    """Adds to every cell's fox what its times are of the others' in the same run."""
    for cell in cells.values():
        fox = cell.get("fox", {})
        for name, other in cell.items():
            if name != "fox" and "wall_ms" in fox and "wall_ms" in other:
                fox[f"wall_of_{name}"] = fox["wall_ms"] / other["wall_ms"]
                for column in ("least", "cpu", "first", "first_cpu"):
                    if f"{column}_ms" in fox and f"{column}_ms" in other:
                        fox[f"{column}_of_{name}"] = fox[f"{column}_ms"] / other[f"{column}_ms"]
        if "wall_ms" in fox and fox.get("replay_ms"):
            fox["wall_of_replay"] = fox["wall_ms"] / fox["replay_ms"]
        if "wall_ms" in fox and fox.get("gpu_ms"):
            fox["wall_of_gpu"] = fox["wall_ms"] / fox["gpu_ms"]


def show(cells: dict[str, Any]) -> None:
    columns = (
        "first_ms",
        "first_cpu_ms",
        "wall_ms",
        "cpu_ms",
        "whole_ms",
        "gpu_ms",
        "replay_ms",
        "launches",
        "cache_mb",
        "peak_gb",
    )
    print(f"{'batch x context':16} {'':12}" + "".join(f"{c:>13}" for c in columns))
    for name, cell in cells.items():
        for contender, row in cell.items():
            numbers = "".join(f"{row[c]:13.3f}" if isinstance(row.get(c), (int, float)) else " " * 13 for c in columns)
            print(f"{name:16} {contender:12}{numbers}  {row.get('error', row.get('decoded_by', ''))}")
        for key, value in cell.get("fox", {}).items():
            if "_of_" in key:
                print(f"{'':29} {key} {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="Hub id, directory or .gguf file, converted or not; SmolLM2's shapes if not given"
    )
    parser.add_argument("--pico", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--text", nargs="+", help="files whose text is read")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--contexts", default="2048,32768,131072")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--new", type=int, default=64, help=f"tokens to generate, at least {LEAST_NEW}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=8192, help="most tokens to prefill; more are filled in")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further measurement after so many"
    )
    parser.add_argument("--cell-seconds", type=float, default=90.0, help="stop a measurement after so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "generate.json")
    arguments = parser.parse_args()
    contenders = arguments.contenders.split(",")
    if unknown := set(contenders) - set(CONTENDERS):
        parser.error(f"contenders are {', '.join(CONTENDERS)}; got {', '.join(sorted(unknown))}")
    if arguments.text and arguments.model is None:
        parser.error("--text needs the converted --model whose gates it is to make")
    if arguments.new < LEAST_NEW:
        parser.error(
            f"--new must be at least {LEAST_NEW}: the first {WARM} tokens and the last {PROFILED} aren't timed"
        )
    started, built = time.perf_counter(), models(arguments)
    text, gates = None, {}
    if arguments.text:
        contexts = [int(context) for context in arguments.contexts.split(",")]
        text = text_of(AutoTokenizer.from_pretrained(arguments.model), arguments.text, max(contexts) + 1)
        if max(contexts) * max(map(int, arguments.batches.split(","))) > arguments.prefill:
            gates = gates_on(built["fox"], text[:, :-1])
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    settings = {"device": device, "dtype": arguments.dtype, "model": Path(arguments.model or "random weights").name,
                "threads": torch.get_num_threads(), "new": arguments.new}  # fmt: skip
    report: dict[str, Any] = {**provenance(), **settings}
    report["cells"] = {}
    if arguments.out.is_file():
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        if all(old.get(k) == v for k, v in settings.items()):
            report["cells"] = old["cells"]
    for context in map(int, arguments.contexts.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            cell = report["cells"].setdefault(f"{batch} x {context}", {})
            wanted = [x for x in contenders if "wall_ms" not in cell.get(x, {}) or cell[x]["rounds"] < arguments.rounds]
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
            if "base-static" in wanted:
                torch.compiler.reset()  # past a limit of shapes it would stop compiling, and not say so
            for number in range(arguments.rounds):
                for name in wanted:
                    left = arguments.seconds - (time.perf_counter() - started)
                    if left <= 0:
                        print(f"out of time before {batch} x {context}, round {number}, {name}", file=sys.stderr)
                        continue
                    if found[name] and "error" in found[name][-1]:
                        continue
                    try:
                        with at_most(min(left, arguments.cell_seconds)):
                            row = measure(built[name.split("-")[0]], name, batch, context, arguments, text, gates)
                    except Exception as error:  # the other cells and contenders are still worth their time
                        traceback.print_exc()
                        row = {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:300]}
                    clean()
                    found[name].append(row)
                    cell[name] = merged(found[name])
                    ratios(report["cells"])
                    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    print(f"{time.perf_counter() - started:6.0f} s  {batch} x {context} {name} round {number}: "
                          f"{ {k: v for k, v in row.items() if k != 'kernels'} }", flush=True)  # fmt: skip
    show(report["cells"])


if __name__ == "__main__":
    main()
