"""What forgetting saves in `generate`: prefill, decoding and the cache of a converted model beside its base.

    python benchmarks/generate.py --model CONVERTED --base BASE --text FILES [--batches 1,16] [--contexts 2048,32768]
        [--contenders fox,fox-dense,base] [--rounds 2] [--new 48] [--seconds 170] [--out FILE.json]
    python benchmarks/generate.py --device cpu --dtype float32 --contexts 2048,8192 --batches 1 --new 40 ...

Without --model: SmolLM2-135M's shapes with random weights. Contenders take turns in one run:

    fox              as it decodes by default: over a cache that forgets, on a GPU in a captured step
    fox-full         a cache that keeps all keys
    fox-dense        the same without the horizon: all keys are kept and read
    base             transformers' dynamic cache and SDPA, whose kernel is FlashAttention
    base-flash       the base at its best: a compiled step in a CUDA graph, FlashAttention over keys that stay in place
    base-fp8         keys and values in float8_e4m3, read in the model's dtype
    base-streaming   StreamingLLM's: the first 4 keys and the latest, 2048 in all; positions stay as they are

`first_ms` is the time to the first token, the least of the rounds: the first compiles; `wall_ms` the median between
later tokens, after compiling and capturing; `gpu_ms` the sum of a step's kernels and `launches` their number, from
torch.profiler over the last steps. `cpu_ms`, on a CPU, is the processor's time, which other users of the machine
disturb less. `cache_mb`: what the allocator counts less once the cache is let go; on a CPU the bytes of its tensors.
`peak_gb` is the allocator's peak, weights of both models included.

Where a cell has more than --prefill tokens, its cache is filled with random keys, and with the gates that the model has
on the text; nothing is read. base-flash is always filled. Without --text the tokens are random.

The result is written after every measurement, and measurements that the file has in full are left out: cells can be
measured in several runs. None begins after --seconds or takes longer than --cell-seconds; one that fails stands as an
error, which a later run tries again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from model_shapes import PICO, SMOLLM2
from provenance import at_most, out_file, provenance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import retrofox
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.anatomy import attentions, inner_model
from retrofox.evaluation.needle_prompts import read_haystack
from retrofox.generation.generate import cache_bytes, new_cache, part_tokens
from retrofox.loading.loaded_model import open_model
from retrofox.model.modeling_fox import CACHE, GateCache

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = ("fox", "fox-full", "fox-dense", "base", "base-flash", "base-fp8", "base-streaming")
PROFILED = 8  # steps
WARM = 12  # tokens before steps are timed: compiled and captured by then
LEAST_NEW = WARM + PROFILED + 10
FIRST, KEPT = 4, 2048  # keys of StreamingLLM
BEST = "in_place"  # name of base-flash's attention; transformers would look for a library with "flash" in it


# -- Caches and attention of the peers --
class Float8Layer(DynamicLayer):
    """Keys and values in float8_e4m3 without scales, vLLM's default for 8 bits."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any):  # type: ignore[override]
        held: list[Any] = [self.keys, self.values]
        for place, new in enumerate((key_states, value_states)):
            narrow = new.to(torch.float8_e4m3fn).view(torch.uint8)
            if self.is_initialized:
                narrow = torch.cat((held[place].view(torch.uint8), narrow), 2)
            held[place] = narrow.view(torch.float8_e4m3fn)
        self.is_initialized = True
        self.keys, self.values = held
        return tuple(x.to(key_states.dtype) for x in held)


class StreamingLayer(DynamicLayer):
    """The first FIRST keys and the latest, KEPT in all."""

    seen = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any):  # type: ignore[override]
        whole = super().update(key_states, value_states)
        self.seen += key_states.shape[2]
        if whole[0].shape[2] > KEPT:
            cut = [torch.cat((x[:, :, :FIRST], x[:, :, FIRST - KEPT :]), 2) for x in whole]
            self.keys, self.values = cut
        return whole

    def get_seq_length(self) -> int:
        return self.seen


ROOMS: list[Sequence[torch.Tensor]] = []
"""Of base-flash, by layer: keys, values (B, Hkv, S, D) and (1,) the place of the step's token."""


@torch.library.custom_op("benchmark::attend_in_place", mutates_args=())
def attend_in_place(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """A token's attention (B, H, 1, D) over a room. No shape of the compiled step hangs on how long the room is."""
    keys, values, at = ROOMS[layer]
    keys.index_copy_(2, at, key)
    values.index_copy_(2, at, value)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH):
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True).contiguous()


@attend_in_place.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    return query.new_empty(query.shape)


def best_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any):
    return attend_in_place(query, key, value, module.layer_idx).transpose(1, 2), None


AttentionInterface.register(BEST, best_attention)


# -- Models and caches --
def models(arguments: argparse.Namespace) -> dict[str, Any]:
    """The base and its converted form, both on the device in the dtype."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is None:
        torch.manual_seed(0)
        base: Any = LlamaForCausalLM(LlamaConfig(**(PICO if arguments.pico else SMOLLM2)))
        fox = {"rope": "interpolate", "half_life": (16.0, 512.0), "horizon": 8.0, "sink_tokens": 1, "gate_heads": "kv"}
        converted = retrofox.convert(base, fox=retrofox.FoxSpec(**fox))
    else:
        base, converted = (open_model(x, dtype=dtype, device="cpu").model for x in (arguments.base, arguments.model))
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


def cache_of(model: Any, contender: str) -> Any:
    """An empty cache."""
    if contender in ("base-fp8", "base-streaming"):
        cache: Any = DynamicCache()
        cache.layer_class_to_replicate = Float8Layer if contender == "base-fp8" else StreamingLayer
        return cache
    return new_cache(model, "auto" if contender == "fox" else "full")


@torch.no_grad()
def fill(cache: Any, model: Any, batch: int, context: int, gates: dict[int, torch.Tensor]) -> None:
    """Puts random keys and values of `context` tokens into a cache, of a converted model with gates, a part at a time.

    A cache that forgets frees after each part what it would free after reading it.
    """
    config, converted = model.config, model.config.model_type.startswith("fox_")
    kv = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part = (part_tokens(model, batch) or context) if isinstance(cache, ForgettingCache) else context
    generator = torch.Generator(model.device).manual_seed(0)
    made = {"generator": generator, "device": model.device, "dtype": model.dtype}
    layers: list[Any] = [x for _, x in attentions(model)] if converted else [None] * config.num_hidden_layers
    for begin in range(0, context, part):
        end = min(context, begin + part)
        for index, attention in enumerate(layers):
            k, v = (torch.randn((batch, kv, end - begin, width), **made) for _ in range(2))
            if not converted:
                cache.update(k, v, index)
                continue
            log_f = gates[index][:, begin:end]
            GateCache(cache, log_f.expand(batch, -1, -1).contiguous()).update(k, v, index)
            if isinstance(cache, ForgettingCache):
                layer: Any = cache.layers[index]
                layer.options = {"horizon": attention.horizon, "sink": attention.sink_tokens, "window": None}
                layer.find(None)


@contextlib.contextmanager
def without_horizon(model: Any) -> Iterator[None]:
    before = [(attention, attention.horizon) for _, attention in attentions(model)]
    for attention, _ in before:
        attention.horizon = None
    try:
        yield
    finally:
        for attention, horizon in before:
            attention.horizon = horizon


# -- Measurements --
class Arrivals:
    """A streamer that notes when tokens come and, on a GPU, profiles the last steps but one."""

    def __init__(self, cuda: bool, new: int):
        self.cuda, self.profiled_from = cuda, new - PROFILED - 1 if cuda else new
        if cuda:
            torch.cuda.synchronize()
        self.begun = time.perf_counter()
        self.times: list[float] = []
        self.used: list[float] = []  # seconds of processors, by then
        self.recorder: Any = None
        self.seen: Any = None

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.used.append(time.process_time())
        count = len(self.times) - 1  # the prompt comes first
        if self.cuda and count == self.profiled_from:
            torch.cuda.synchronize()
            self.recorder = profile(activities=[ProfilerActivity.CUDA])
            self.recorder.start()
        elif self.cuda and count == self.profiled_from + PROFILED:
            torch.cuda.synchronize()
            self.recorder.stop()
            self.seen, self.recorder = self.recorder, None

    def end(self) -> None:
        pass

    def stopped(self) -> None:
        """Ends a recording that was interrupted."""
        if self.recorder is not None:
            self.recorder.stop()

    def figures(self) -> dict[str, Any]:
        first, last = 1, 1 + self.profiled_from
        tokens, spent = self.times[first:last], self.used[first:last]
        later = [b - a for a, b in zip(tokens[WARM:], tokens[WARM + 1 :], strict=False)]
        found: dict[str, Any] = {"first_ms": (tokens[0] - self.begun) * 1e3}
        found |= {"wall_ms": statistics.median(later) * 1e3, "least_ms": min(later) * 1e3}
        if not self.cuda:
            used = [b - a for a, b in zip(spent[WARM:], spent[WARM + 1 :], strict=False)]
            return found | {"cpu_ms": statistics.median(used) * 1e3}
        events = [e for e in self.seen.key_averages() if e.self_device_time_total > 0]
        largest = sorted(events, key=lambda e: -e.self_device_time_total)[:12]
        found["gpu_ms"] = sum(e.self_device_time_total for e in events) / 1e3 / PROFILED
        found["launches"] = sum(e.count for e in events) / PROFILED
        found["kernels"] = [
            {"name": e.key[:90], "us": e.self_device_time_total / PROFILED, "count": e.count / PROFILED}
            for e in largest
        ]
        return found


def generated(model: Any, contender: str, ids: torch.Tensor, new: int, cache: Any) -> dict[str, Any]:
    """One generation after the cache's tokens: times of its tokens, and what was profiled."""
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    part = part_tokens(model, len(ids))
    read = not cache.get_seq_length()
    if read and part is not None and ids.shape[1] > part:
        options["prefill_chunk_size"] = part
    dense = without_horizon(model) if contender == "fox-dense" else contextlib.nullcontext()
    arrivals = Arrivals(ids.is_cuda, new)
    try:
        with dense:
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=arrivals, **{CACHE: cache}, **options)
    finally:
        arrivals.stopped()
    found = arrivals.figures()
    if not read:
        del found["first_ms"]
    return found | ({"decoded_by": model.decoded_by} if contender.startswith("fox") else {})


@torch.no_grad()
def best_of_base(model: Any, batch: int, context: int, new: int) -> dict[str, Any]:
    """Greedy steps after `context` random keys, each a replay of one CUDA graph; on a CPU the steps themselves.

    They read the whole room, the `new` keys that are yet to come included.
    """
    config, cuda = model.config, model.device.type == "cuda"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, context + new, width)
    place = torch.full((batch, 1), context, device=model.device)
    for _ in range(config.num_hidden_layers):
        ROOMS.append([*(torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2)), place[0]])
    tokens = torch.zeros_like(place)
    before = config._attn_implementation
    model.set_attn_implementation(BEST)
    arrivals = Arrivals(cuda, new)
    if cuda and not hasattr(model, "compiled_step"):
        model.compiled_step = torch.compile(model.forward, dynamic=False)
    forward = model.compiled_step if cuda else model.forward

    def step() -> None:
        logits = forward(input_ids=tokens, position_ids=place, use_cache=False).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        place.add_(1)

    try:
        if cuda:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            place.fill_(context)
        arrivals.put(tokens)
        for _ in range(new):
            graph.replay() if cuda else step()
            arrivals.put(tokens.cpu())
    finally:
        arrivals.stopped()
        model.set_attn_implementation(before)
    found = arrivals.figures()
    del found["first_ms"]
    return found


def measure(
    model: Any,
    contender: str,
    batch: int,
    context: int,
    arguments: argparse.Namespace,
    text: torch.Tensor,
    gates: dict[int, torch.Tensor],
) -> dict[str, Any]:
    """A contender's figures in one cell and round."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if contender == "base-flash":
        found, cache = best_of_base(model, batch, context, arguments.new), None
    else:
        ids = text[:, : context + 1].expand(batch, -1).to(model.device)
        cache = cache_of(model, contender)
        if batch * context > arguments.prefill:
            cache.tokens_to_reserve = context + arguments.new + 1
            fill(cache, model, batch, context, gates)
        found = generated(model, contender, ids, arguments.new, cache)
    if not cuda:
        return found | ({} if cache is None else {"cache_mb": cache_bytes(cache) / 1e6})
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    gc.collect()
    held = torch.cuda.memory_allocated()
    ROOMS.clear()
    del cache
    gc.collect()
    return found | {"cache_mb": (held - torch.cuda.memory_allocated()) / 1e6}


def clean() -> None:
    ROOMS.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of rounds, the least of first_ms and least_ms; what isn't a number as the last round has it."""
    result = dict(rounds[-1])
    for name, value in result.items():
        values = [x[name] for x in rounds if isinstance(x.get(name), (int, float))]
        if values and isinstance(value, (int, float)):
            result[name] = min(values) if name in ("least_ms", "first_ms") else statistics.median(values)
    return result | {"rounds": len(rounds)}


def show(cells: dict[str, Any]) -> None:
    columns = ("first_ms", "wall_ms", "cpu_ms", "gpu_ms", "launches", "cache_mb", "peak_gb")
    print(f"{'batch x context':16} {'':16}" + "".join(f"{c:>13}" for c in columns))
    for name, cell in cells.items():
        for contender, row in cell.items():
            numbers = "".join(f"{row[c]:13.3f}" if isinstance(row.get(c), (int, float)) else " " * 13 for c in columns)
            print(f"{name:16} {contender:16}{numbers}  {row.get('error', row.get('decoded_by', ''))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub id or directory of a converted model; SmolLM2's shapes if not given")
    parser.add_argument("--base", help="of what it was converted")
    parser.add_argument("--pico", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--text", nargs="+", help="files whose text is read")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--contexts", default="2048,32768,131072")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--new", type=int, default=48, help=f"tokens to generate, at least {LEAST_NEW}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=8192, help="most tokens to read; more are filled in")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further measurement after so many"
    )
    parser.add_argument("--cell-seconds", type=float, default=90.0, help="stop a measurement after so many")
    parser.add_argument("--out", type=out_file, default=ROOT / "benchmarks" / "generate-horizon.json")
    arguments = parser.parse_args()
    contenders = arguments.contenders.split(",")
    if unknown := set(contenders) - set(CONTENDERS):
        parser.error(f"contenders are {', '.join(CONTENDERS)}; got {', '.join(sorted(unknown))}")
    if (arguments.model is None) != (arguments.base is None) or (arguments.text and arguments.model is None):
        parser.error("--model needs --base and the other way round; --text needs both")
    if arguments.new < LEAST_NEW:
        parser.error(f"--new must be at least {LEAST_NEW}: the first {WARM} and the last {PROFILED} aren't timed")
    started, built = time.perf_counter(), models(arguments)
    batches, contexts = ([int(x) for x in given.split(",")] for given in (arguments.batches, arguments.contexts))
    longest = max(contexts)
    if arguments.text:
        text = text_of(AutoTokenizer.from_pretrained(arguments.model), arguments.text, longest + 1)
    else:
        text = torch.randint(2, built["base"].config.vocab_size, (1, longest + 1))
    gates: dict[int, torch.Tensor] = {}
    if longest * max(batches) > arguments.prefill:
        gates = gates_on(built["fox"], text[:, :-1])
        clean()
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    settings = {"device": device, "dtype": arguments.dtype, "model": Path(arguments.model or "random weights").name,
                "threads": torch.get_num_threads(), "new": arguments.new}  # fmt: skip
    report: dict[str, Any] = {**provenance(), **settings, "cells": {}}
    if arguments.out.is_file():
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        if all(old.get(k) == v for k, v in settings.items()):
            report["cells"] = old["cells"]
            report["command"] = "; ".join(dict.fromkeys([*old["command"].split("; "), report["command"]]))
    for context in contexts:
        for batch in batches:
            cell = report["cells"].setdefault(f"{batch} x {context}", {})
            wanted = [x for x in contenders if "wall_ms" not in cell.get(x, {}) or cell[x]["rounds"] < arguments.rounds]
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
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
                    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    print(f"{time.perf_counter() - started:6.0f} s  {batch} x {context} {name} round {number}: "
                          f"{ {k: v for k, v in row.items() if k != 'kernels'} }", flush=True)  # fmt: skip
    show(report["cells"])


if __name__ == "__main__":
    main()
