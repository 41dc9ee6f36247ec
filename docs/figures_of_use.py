"""Tables of the pages on using a model: decoding and vLLM. See figures.py."""

from __future__ import annotations

import math

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
        rows.append([row["model"], f"{row['length']:,}", row["vllm"], *ranges, f"{row['ratio']:.2f}"])
    header = ["model", "prompt", "vLLM", "base, slowest to fastest round", "model's", "ratio of the medians"]
    return table(header, rows)


def shown(value: float | None, as_format: str = ".2f") -> str:
    return "-" if value in (None, math.inf) else format(value, as_format)


def over(value: float | None, other: float | None) -> float | None:
    """A ratio; None where either wasn't measured."""
    return None if value is None or other in (None, math.inf) else value / other


def of_base(cell: dict) -> list[float]:
    """Milliseconds of the GPU for a token: a dynamic cache without the time in which it copies itself, and in place."""
    row, best = cell.get("base", {}), cell.get("base-flash", {})
    copies = sum(kernel["us"] for kernel in row.get("kernels", ()) if "CatArray" in kernel["name"])
    return [
        row["gpu_ms"] - copies / 1000 if "gpu_ms" in row else math.inf,
        best.get("gpu_ms", math.inf),
    ]


def decoding_with_a_horizon() -> str:
    """Milliseconds for a token, of kernels and from token to token: the base and a trained model with gates."""
    rows = []
    for cell, found in read("generate-horizon.json")["cells"].items():
        best, dense, fox = (found.get(name, {}) for name in ("base-flash", "fox-dense", "fox"))
        kernels = [*of_base(found), dense.get("gpu_ms"), fox.get("gpu_ms")]
        walls = [best.get("wall_ms"), fox.get("wall_ms")]
        ratios = [over(fox.get("gpu_ms"), min(of_base(found))), over(walls[1], walls[0])]
        rows.append([cell, *map(shown, (*kernels, ratios[0], *walls, ratios[1]))])
    header = [
        "batch x context",
        "base without copies",
        "base in place",
        "no horizon",
        "gates",
        "gates / faster base",
    ]
    return table([*header, "token to token: base in place", "gates", "ratio"], rows)


def cache_left() -> str:
    """Megabytes that the allocator counts for a cache, from generate-horizon.json."""
    rows = []
    for cell, found in read("generate-horizon.json")["cells"].items():
        whole, left, base = (found.get(name, {}).get("cache_mb") for name in ("fox-full", "fox", "base"))
        share = over(left, whole)
        rows.append([cell, *(shown(x, ".0f") for x in (whole, left, share and 100 * share, base))])
    return table(["batch x context", "all keys, MB", "forgetting, MB", "left, %", "base, MB"], rows)


def one_row() -> str:
    """One row in one run, from generate-horizon.json: decoding, bytes and the first token.

    Bytes of the base's smaller caches are of generate-peers.json. Their times are transformers' loop's, not shown.
    """
    rows, peers = [], read("generate-peers.json")["cells"]
    for cell, found in read("generate-horizon.json")["cells"].items():
        if not cell.startswith("1 x ") or "first_ms" not in found["fox"]:
            continue
        fox, full, dense, base = (found[name] for name in ("fox", "fox-full", "fox-dense", "base-flash"))
        smaller = [peers.get(cell, {}).get(name, {}) for name in ("base-fp8", "base-streaming")]
        times = [row["gpu_ms"] for row in (base, dense, full, fox)]
        ratios = [over(fox[name], base[name]) for name in ("gpu_ms", "wall_ms")]
        first = [row["first_ms"] / 1000 for row in (dense, full, fox)]
        left = f"{100 * fox['cache_mb'] / full['cache_mb']:.1f}"
        megabytes = [shown(row.get("cache_mb"), ".0f") for row in (base, *smaller, fox)]
        rows.append([cell.removeprefix("1 x "), *map(shown, (*times, *ratios)), *megabytes, left, *map(shown, first)])
    header = ["context", "kernels, ms: base", "no horizon", "all keys kept", "forgetting", "forgetting / base"]
    header += ["token to token: forgetting / base"]
    header += ["cache, MB: base", "8 bits", "StreamingLLM", "forgetting", "left of all keys kept, %"]
    return table([*header, "first token, s: no horizon", "all keys kept", "forgetting"], rows)


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
