"""What attention loses where only some rotary pairs turn, by how they are chosen; nothing fitted, nothing trained.

    python benchmarks/rotary_pairs.py MODEL --data TEXT... [--keep 16] [--length 4096] [--every 3] [--out FILE.json]

For every third layer, on the original's own inputs, the mean over heads of KL plus output error, as calibration counts
it (`retrofox.calibration.pairs`), of keeping as many pairs as asked: the fastest; those of the largest mean |q| |k|,
the 2-norm contribution of MHA2MLA (Ji et al., arXiv 2502.14837), in a layer's heads together; those that calibration
chooses. Pairs are chosen on one window and judged on another. Mean turns of the pairs that went are made up for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from retrofox.anatomy import attentions
from retrofox.calibration import capture, pairs
from retrofox.calibration.source import open_source
from retrofox.calibration.windows import documents_of, fitting_windows
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.support.files import write_result
from retrofox.support.report import environment


@torch.no_grad()
def main() -> None:
    options = _options()
    base, tokenizer = load_base(options.model)
    source = open_source(base.float().eval(), FoxSpec(rope="keep"), None, None)
    found = documents_of(options.data, tokenizer)
    windows = fitting_windows(found, tokenizer, [options.length], 2, 2, seed=0)
    hidden, calls = capture.enter(source.model, windows)
    rows = []
    for number, (_, attention) in enumerate(attentions(source.model)):
        layer = capture.decoder_layers(source.model)[number]
        hidden, captured = capture.run_original(layer, hidden, calls[number])
        if number % options.every == 0 and attention.rotary_fade is not None:
            rows.append({"layer": number, **_row(attention, captured, options.keep)})
            print(rows[-1], flush=True)
    mean = {way: sum(row["cost"][way] for row in rows) / len(rows) for way in rows[0]["cost"]}
    result = {"keep": options.keep, "length_tokens": options.length, "mean_cost": mean, "layers": rows}
    if options.out:
        write_result(options.out, (json.dumps({"environment": environment(), **result}, indent=1) + "\n").encode())
    table = Table("pairs kept", *mean)
    table.add_row(str(options.keep), *(f"{value:.3f}" for value in mean.values()))
    Console().print(table)


def _row(attention: Any, captured: list[Any], keep: int) -> dict[str, Any]:
    """The pairs that each way keeps, chosen on the first window, and what they cost on the second."""
    (original, block), (other, its_block) = captured
    query, key = (pairs.as_complex(x, attention.rotary_fade).abs().mean(1) for x in (original.query, original.key))
    norm = (query * key.repeat_interleave(len(query) // len(key), 0)).mean(0)
    ways = {
        "fastest": list(range(keep)),
        "2-norm": sorted(norm.topk(keep).indices.tolist()),
        "chosen": pairs.left_of(pairs.samples_of(attention, original, block, 1, True), keep),
    }
    judges, cost = pairs.samples_of(attention, other, its_block, 1, True), {}
    whole = sum(judge.cost([]) for judge in judges)
    for way, kept in ways.items():
        gone = [pair for pair in range(len(norm)) if pair not in kept]
        cost[way] = round(sum(judge.cost(gone) for judge in judges) - whole, 4)
    return {"cost": cost, "kept": ways}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--keep", type=int, default=16, help="pairs that turn")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a window")
    parser.add_argument("--every", type=int, default=3, help="layers from one that is looked at to the next")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
