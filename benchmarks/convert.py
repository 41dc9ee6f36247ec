"""Measures `retrofox convert` on a synthetic sharded checkpoint with Llama-3.1-70B's shapes per tensor.

    python benchmarks/convert.py [--layers 4] [--out benchmarks/convert.json] [--dir build/convert]

Writes the checkpoint (bfloat16, about 1.7 GB a layer, 4.2 GB of embeddings and head), then runs, each in a process of
its own: `cp` of the files and a copying conversion, in turns and twice each, and a linking conversion; prints a table
and writes JSON, with the ratio of the two sums. Wall times end when everything written is on the disk. Needs about
twice the checkpoint's size on disk; removes it in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from provenance import provenance
from rich.console import Console
from rich.table import Table

SHARD_BYTES = 4_500_000_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint."""
    hidden, mlp, vocabulary, kv = 8192, 28672, 128256, 1024
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors |= {f"{p}self_attn.{n}_proj.weight": (hidden if n in "qo" else kv, hidden) for n in "qkvo"}
        tensors |= {f"{p}mlp.{n}_proj.weight": (mlp, hidden) for n in ("gate", "up")}
        tensors |= {f"{p}mlp.down_proj.weight": (hidden, mlp)}
        tensors |= {f"{p}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_checkpoint(directory: Path, layers: int) -> int:
    """Writes the sharded checkpoint and returns its bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(layers).items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        state = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shard.items()}
        save_file(state, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return total


def measure(command: list[str]) -> tuple[float, int]:
    """(wall seconds, peak resident MiB) of a command, everything it wrote flushed to disk."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status:
        raise SystemExit(f"failed: {command}")
    return time.perf_counter() - started, usage.ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/convert.json"))
    parser.add_argument("--dir", type=Path, default=Path("build/convert"))
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    source = options.dir / "source"
    # In a process of its own: what a child of a big process peaks at would count its parent's memory.
    maker = f"import convert; convert.write_checkpoint(convert.Path({str(source)!r}), {options.layers})"
    subprocess.run(
        [sys.executable, "-c", maker], env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, check=True
    )
    total = json.loads((source / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    convert = [sys.executable, "-m", "retrofox", "convert", str(source)]
    commands = {
        "cp": ["cp", "-r", str(source), str(options.dir / "cp")],
        "convert, copying": [*convert, str(options.dir / "copied"), "--no-verify", "--json"],
        "cp again": ["cp", "-r", str(source), str(options.dir / "cp")],
        "convert, copying again": [*convert, str(options.dir / "copied"), "--no-verify", "--json"],
        "convert, linking": [*convert, str(options.dir / "linked"), "--no-verify", "--json", "--link"],
    }
    rows = {}
    for name, command in commands.items():
        seconds, peak = measure(command)
        rows[name] = {"seconds": round(seconds, 2), "peak_mib": peak, "gb_per_s": round(total / seconds / 1e9, 3)}
        for made in ("cp", "copied"):
            shutil.rmtree(options.dir / made, ignore_errors=True)
    shutil.rmtree(options.dir)
    copying = rows["convert, copying"]["seconds"] + rows["convert, copying again"]["seconds"]
    report = {
        **provenance(),
        "checkpoint_bytes": total,
        "layers": options.layers,
        "rows": rows,
        "copying_over_cp": round(copying / (rows["cp"]["seconds"] + rows["cp again"]["seconds"]), 3),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    table = Table(title=f"converting {total / 1e9:.1f} GB, {options.layers} layers of Llama-3.1-70B's shapes")
    for column in ("what", "seconds", "peak MiB", "GB/s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, row in rows.items():
        table.add_row(name, str(row["seconds"]), str(row["peak_mib"]), str(row["gb_per_s"]))
    Console().print(table)
    print(f"copying takes {report['copying_over_cp']} times as long as cp")


if __name__ == "__main__":
    main()
