"""A layer's MLP and output projection of a few rows on a CPU: over rows beside the MLP over columns.

    python benchmarks/few_rows.py [--sizes 576x1536,960x2560,2048x8192] [--rows 1,4,8,9,...] [--out FILE]

One thread, float32. Both are `retrofox/model/brief.py`'s: `rows` computes down(silu(gate(x)) * up(x)) by MKL's products
of rows, `columns` by oneDNN's of W x^T, filled up to a multiple of 16. Weights of several layers are used in turn, so
that they come from memory as in a model; the least of nine rounds, both in turns, in microseconds of the processor's
time for a layer. `chosen` is what a model takes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import retrofox
from retrofox.model import brief
from retrofox.support.files import write_json

MEMORY = 320 << 20  # bytes of weights, more than the caches of one core hold
ROUNDS = 9


def layers_of(hidden: int, inner: int) -> list[brief.Weights]:
    """Plain layers, as many as fill MEMORY, with as many heads as a matrix of 64 channels a head has."""
    count = max(2, MEMORY // (4 * hidden * (3 * inner + 2 * hidden)))
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=count, vocab_size=8,
                         num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64)  # fmt: skip
    model = retrofox.convert(LlamaForCausalLM(config), fox=retrofox.FoxSpec(half_life=(16.0, 1024.0)))
    return [brief.Weights(layer) for layer in model.model.layers]


def microseconds(layers: list[brief.Weights], rows: int) -> tuple[float, float]:
    """The least of some rounds over all layers, for what one does after its attention: (by rows, by columns)."""
    x, attended = torch.randn(2, rows, layers[0].gate[0].shape[1])
    for w in layers:
        w.columns = range(rows, rows + 1)
    room, least = brief.Room(layers[0].sizes, rows, x), {False: float("inf"), True: float("inf")}
    turned, found = brief.TURNED, {}
    for _ in range(ROUNDS):
        for columns in least:
            brief.TURNED = turned if columns else None
            begun = time.process_time()
            for w in layers:
                found[columns] = brief.leave(w, attended, x, room)
            least[columns] = min(least[columns], (time.process_time() - begun) / len(layers))
    torch.testing.assert_close(found[True], found[False], atol=1e-3, rtol=1e-3)
    brief.TURNED = turned
    return 1e6 * least[False], 1e6 * least[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="576x1536,960x2560,2048x8192", help="hidden x intermediate")
    parser.add_argument("--rows", default="1,4,6,8,10,12,14,16,17,20,24,28,32,33,40,48,56,64,65,80,96,128,160,192")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "few-rows.json")
    options = parser.parse_args()
    if brief.TURNED is None:
        parser.error("columns are for Intel's processors and for AVX-512, with MKL and oneDNN: one of these is missing")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = []
    table = Table("hidden x intermediate", "rows", "by rows", "by columns", "ratio", "chosen")
    for size in options.sizes.split(","):
        hidden, inner = map(int, size.split("x"))
        layers = layers_of(hidden, inner)
        chosen = layers[0].columns
        for number in map(int, options.rows.split(",")):
            one, other = microseconds(layers, number)
            name = "columns" if number in chosen else "rows"
            rows.append({"hidden": hidden, "intermediate": inner, "rows": number, "by_rows": one, "by_columns": other,
                         "chosen": name})  # fmt: skip
            table.add_row(size, str(number), f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}", name)
    write_json(options.out, {**provenance(), "threads": 1, "rows": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
