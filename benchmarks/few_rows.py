"""A gated MLP of a few rows on a CPU: linear layers over rows beside the same products over columns.

    python benchmarks/few_rows.py [--sizes 576x1536,960x2560,2048x8192] [--rows 1,4,8,9,...] [--out FILE]

One thread, float32. `rows` is down(silu(gate(x)) * up(x)) by F.linear, `columns` W x^T for each of the three, as
`retrofox/model/brief.py` has both. Weights of several layers are used in turn, so that they come from memory as in a
model; the least of five rounds, in microseconds of the processor's time for a layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from provenance import provenance
from rich.console import Console
from rich.table import Table

from retrofox.support.files import write_json

MEMORY = 64 << 20  # bytes of weights, more than caches hold
ROUNDS = 5


def by_rows(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)).mul_(F.linear(x, up)), down)


def by_columns(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    columns = x.t().contiguous()
    return torch.mm(down, F.silu(torch.mm(gate, columns)).mul_(torch.mm(up, columns))).t()


def microseconds(mlp: Callable, layers: list[tuple[torch.Tensor, ...]], x: torch.Tensor) -> float:
    """The least of some rounds over all layers, for one layer."""
    least = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for weights in layers:
            mlp(*weights, x)
        least = min(least, (time.process_time() - begun) / len(layers))
    return 1e6 * least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="576x1536,960x2560,2048x8192", help="hidden x intermediate")
    parser.add_argument("--rows", default="1,4,8,9,10,12,14,16,20,24,32,48,64")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "few-rows.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = []
    table = Table("hidden x intermediate", "rows", "by rows", "by columns", "ratio")
    for size in options.sizes.split(","):
        hidden, inner = map(int, size.split("x"))
        count = max(2, MEMORY // (3 * 4 * hidden * inner))
        layers = [
            (torch.randn(inner, hidden) / 24, torch.randn(inner, hidden) / 24, torch.randn(hidden, inner) / 24)
            for _ in range(count)
        ]
        for number in map(int, options.rows.split(",")):
            x = torch.randn(number, hidden)
            torch.testing.assert_close(by_columns(*layers[0], x), by_rows(*layers[0], x), atol=1e-3, rtol=1e-3)
            one, other = (microseconds(mlp, layers, x) for mlp in (by_rows, by_columns))
            rows.append({"hidden": hidden, "intermediate": inner, "rows": number, "by_rows": one, "by_columns": other})
            table.add_row(size, str(number), f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}")
    write_json(options.out, {**provenance(), "threads": 1, "rows": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
