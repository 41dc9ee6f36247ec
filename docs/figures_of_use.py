"""Tables of the pages on using a model: decoding, caches that forget, vLLM. See figures.py."""

from __future__ import annotations

from figures import read, table


def serving() -> str:
    """vLLM's log-probabilities beside retrofox's: a row per case of `make test-vllm`, and the machine."""
    found = read("vllm-cpu.json")
    rows = []
    for name, case in found["cases"].items():
        if not case["passed_all"]:
            rows.append([name, *[""] * 5, "no"])
            continue
        rounds = case["rounds"]
        base = [f"{row['mean_difference']:.1e}" for row in case.get("base_rounds", [])[:1]]
        rows.append(
            [
                name,
                f"{sum(row['compared'] for row in rounds):,}",
                f"{max(row['longest_prompt'] for row in rounds):,}",
                sum(row["chosen_otherwise"] for row in rounds),
                f"{max(row['max_difference'] for row in rounds):.1e}",
                f"{rounds[0]['mean_difference']:.1e}" + (f" (base {base[0]})" if base else ""),
                "yes",
            ]
        )
    header = ["model", "tokens compared", "longest prompt", "other choices", "largest difference", "mean", "passed"]
    versions, machine = found["versions"], found["machine"]
    where = f"{machine['cpu']}, {found['date']}, torch {versions['torch']}, transformers {versions['transformers']}"
    return f"{table(header, rows)}\n\nDifferences of log-probabilities in nats; float32 unless said. {where}."


SHIPPED_TILE = "64 keys, 2 warps, 3 stages, 1056 programs"


def serving_on_gpu() -> str:
    """The bfloat16 proof on a GPU, round by round beside the base's, from vllm-gpu.json."""
    found = read("vllm-gpu.json")
    rows = []
    for number, row in enumerate(found["rounds"]):
        base = found["base_rounds"][number] if number < len(found["base_rounds"]) else None
        pairs = [
            (f"{of[key]:.2g}" if of else "") for key in ("mean_difference", "max_difference") for of in (row, base)
        ]
        rows.append([row["round"], f"{row['compared']:,}", *pairs])
    header = ["round", "tokens compared", "mean", "the base's", "largest", "the base's"]
    environment = found["environment"]
    versions = environment["versions"]
    where = f"{environment['gpu']['name']}, {environment['time'][:10]}, torch {versions['torch']}, vLLM {found['vllm']}"
    return f"{table(header, rows)}\n\nDifferences of log-probabilities in nats, bfloat16. {where}."


def vllm_throughput() -> str:
    """Tokens a second under vLLM beside the base, the slowest and fastest round, from vllm-throughput.json."""
    rows = []
    for row in read("vllm-throughput.json")["rows"]:
        rounds = [[round_["tokens_per_second"] for round_ in row["rounds"][name]] for name in ("base", "retrofit")]
        ranges = [f"{min(speeds):,.0f} to {max(speeds):,.0f}" for speeds in rounds]
        rows.append([f"{row['length']:,}", *ranges, f"{row['ratio']:.2f}"])
    return table(["prompt", "base, slowest to fastest round", "retrofit", "ratio of the medians"], rows)


def vllm_steps() -> str:
    """Milliseconds of an engine's steps by what they hold, from vllm-throughput.json."""
    found = read("vllm-throughput.json")["steps"]
    models = {name: row for name, row in found.items() if isinstance(row, dict) and "steps" in row}
    kinds = {"prompts": "prompts", "both": "prompts and decoding", "decoding": "decoding"}
    rows = [
        [said, *(f"{model['steps'][kind]['milliseconds']:.1f}" for model in models.values())]
        for kind, said in kinds.items()
    ]
    return table(["a step that holds", *(f"{name}, ms" for name in models)], rows)


def paged_attention() -> str:
    """Microseconds of a decoding step's attention beside FlashAttention 3's, from paged-attention.json."""
    rows = []
    for row in read("paged-attention.json")["rows"]:
        heads, kv_heads, dim = row["shape"].split(",")
        times = row["microseconds"]
        flash, ours = times["FlashAttention 3"], times["ours"]
        if "tiles" in row:  # timed before its own tile was chosen among these
            ours = row["tiles"][SHIPPED_TILE]
        lanes = next(time for name, time in times.items() if name.endswith("lanes"))
        shape = f"{heads} on {kv_heads} of {dim}"
        rows.append([shape, f"{row['length']:,}", *(f"{x:.0f}" for x in (flash, lanes, ours)), f"{ours / flash:.2f}"])
    header = ["heads", "tokens", "FlashAttention 3, no gates", "the same with lanes", "retrofox", "of no gates"]
    return table(header, rows)


def decoding() -> str:
    """Milliseconds a token, kernels' time, launches and memory of `generate`, from benchmarks/generate.json."""
    names = {"fox": "retrofit", "base": "base, dynamic cache", "base-static": "base, static cache, compiled"}
    columns = {"wall_ms": ".2f", "gpu_ms": ".2f", "launches": ".0f", "peak_gb": ".2f"}
    rows = []
    for cell, found in read("generate.json")["cells"].items():
        for name, row in found.items():
            if "wall_ms" in row:
                values = [format(row[c], f) if c in row else "-" for c, f in columns.items()]
                rows.append([cell, names.get(name, name), *values])
    header = ["batch x context", "model", "ms a token", "of it kernels, ms", "launches a token", "peak memory, GB"]
    return table(header, rows, left=2)


def long_context() -> str:
    """Prefill, tokens a second and cache against the context, from benchmarks/long-context.json."""
    names = {
        "full": "retrofit, full cache",
        "base": "base, dynamic cache",
        "base-static": "base, static cache, compiled",
    }
    rows = []
    for length, found in read("long-context.json")["lengths"].items():
        for name, row in found.items():
            if "cache_gb" in row:
                columns = {"prefill_s": ".1f", "tokens_per_second": ".0f"}
                values = [format(row[c], f) if c in row else "-" for c, f in columns.items()]
                memory = [f"{row[c]:.2f}" if c in row else "-" for c in ("cache_gb", "peak_gb")]
                rows.append([f"{int(length):,}", names[name], *values, *memory])
    header = ["context", "model", "prefill, s", "tokens/s", "cache, GB", "peak memory, GB"]
    return table(header, rows, left=2)
