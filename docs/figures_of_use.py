"""Tables of the pages on using a model: decoding and vLLM. See figures.py."""

from __future__ import annotations

from figures import read, table


def serving() -> str:
    """vLLM's log-probabilities beside retrofox's, of `make test-vllm`: tiny models in one row, SmolLM2 in two."""
    found = read("vllm-cpu.json")
    tiny = {name: case for name, case in found["cases"].items() if case["passed_all"] and "SmolLM2" not in name}
    rows = [[f"{len(tiny)} tiny models", *_differences(list(tiny.values()))]]
    for name, case in found["cases"].items():
        if not case["passed_all"]:
            rows.append([name, *["FAILED"] * 5])
        elif name not in tiny:
            rows.append([name, *_differences([case])])
    header = ["model", "tokens compared", "longest prompt", "other choices", "largest difference", "mean"]
    versions, machine = found["versions"], found["machine"]
    where = f"{machine['cpu']}, {found['date']}, torch {versions['torch']}, transformers {versions['transformers']}"
    return f"{table(header, rows)}\n\nDifferences of log-probabilities in nats; float32 unless said. {where}."


def _differences(cases: list[dict]) -> list:
    """Counts and differences over all rounds of some cases; the mean is the largest of their first rounds'."""
    rounds = [row for case in cases for row in case["rounds"]]
    base = [f" (base {row['mean_difference']:.1e})" for row in cases[0].get("base_rounds", [])[:1]]
    return [
        f"{sum(row['compared'] for row in rounds):,}",
        f"{max(row['longest_prompt'] for row in rounds):,}",
        sum(row["chosen_otherwise"] for row in rounds),
        f"{max(row['max_difference'] for row in rounds):.1e}",
        f"{max(case['rounds'][0]['mean_difference'] for case in cases):.1e}" + "".join(base),
    ]


def vllm_throughput() -> str:
    """Tokens a second under vLLM beside the base, the slowest and fastest round, from vllm-throughput.json."""
    rows = []
    for row in read("vllm-throughput.json")["rows"]:
        rounds = [[round_["tokens_per_second"] for round_ in row["rounds"][name]] for name in ("base", "retrofit")]
        ranges = [f"{min(speeds):,.0f} to {max(speeds):,.0f}" for speeds in rounds]
        rows.append([f"{row['length']:,}", *ranges, f"{row['ratio']:.2f}"])
    return table(["prompt", "base, slowest to fastest round", "retrofit", "ratio of the medians"], rows)


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


def without_copies(row: dict) -> float:
    """Milliseconds of the GPU for a token, without what a dynamic cache takes to append by copying itself."""
    copies = sum(kernel["us"] for kernel in row["kernels"] if "CatArray" in kernel["name"])
    return row["gpu_ms"] - copies / 1000


def decoding_with_a_horizon() -> str:
    """Milliseconds of the GPU for a token: the base and a trained default."""
    rows = []
    for cell, found in read("generate-horizon.json")["cells"].items():
        base, fox = without_copies(found["base"]), found["fox"]["gpu_ms"]
        rows.append([cell, f"{found['base']['gpu_ms']:.2f}", f"{base:.2f}", f"{fox:.2f}", f"{fox / base:.2f}"])
    header = ["batch x context", "base", "base without copies", "default", "default / base without copies"]
    return table(header, rows)


def of_layers(rows: list[dict]) -> dict[tuple[int, int], dict[str, float]]:
    """Microseconds of a layer by batch and cache: near, open; dense and mixed, means of 21 near and 9 open layers."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        cell = found.setdefault((row["batch"], row["cache"]), {"dense": 0.0, "mixed": 0.0})
        share = {"near": 21, "open": 9}[row["layers"]] / 30
        cell[row["layers"]] = row["horizon_us"]
        cell["dense"] += share * row["dense_us"]
        cell["mixed"] += share * row["horizon_us"]
    return found


def decoding_layers() -> str:
    """Microseconds of the GPU for a layer, with and without a horizon, now and before, from decode-layers.json."""
    found = read("decode-layers.json")
    now, before = of_layers(found["rows"]), of_layers(found["before"]["rows"])
    rows = []
    for (batch, cache), cell in now.items():
        times = [cell[name] for name in ("dense", "near", "open", "mixed")]
        ratio, earlier = cell["mixed"] / cell["dense"], [before[batch, cache][name] for name in ("dense", "mixed")]
        rows.append(
            [f"{batch} x {cache}", *(f"{us:.1f}" for us in times), f"{ratio:.2f}", *(f"{us:.1f}" for us in earlier)]
        )
    header = [
        "batch x context",
        "no horizon",
        "near",
        "open",
        "mixed",
        "mixed / no horizon",
        "before: no horizon",
        "before: mixed",
    ]
    return table(header, rows)


def horizon_kernels() -> str:
    """Attention at 32768 tokens by the share of pairs within the horizon, beside FlashAttention and itself, dense."""
    rows = [row for row in read("horizon.json")["rows"] if row.get("rows") == "1 x 32768" and row["heads"][2] == 64]
    rows = [row for row in rows if row["documents"] == 1]
    flash = next(row for row in rows if row["what"] == "flash")
    names = {
        "flash": "FlashAttention, no gates",
        "dense": "gates, no horizon",
        "equal": "heads alike",
        "unequal": "unequal heads",
    }
    cells = []
    for row in rows:
        both = row["forward_ms"] + row["backward_ms"]
        ratio = both / (flash["forward_ms"] + flash["backward_ms"])
        share = f"{100 * row['share']:.0f}" if "share" in row else "-"
        cells.append(
            [names[row["what"]], share, f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", f"{ratio:.2f}"]
        )
    return table(["", "pairs within the horizon, %", "forward, ms", "backward, ms", "both, of FlashAttention"], cells)


def quantised() -> str:
    """Loss of base and retrofit, quantised while loading, and the difference to their own in float32."""
    rows = read("quantised.json")["rows"]
    whole = rows[0]
    cells = []
    for row in rows:
        losses = [f"{row[name]:.3f} ({row[name] - whole[name]:+.3f})" for name in ("base", "retrofit")]
        cells.append([row["way"], *losses])
    return table(["weights", "base", "retrofit"], cells)
