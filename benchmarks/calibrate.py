"""What calibration recovers: loss of a converted model before and after, by rotary pairs kept and sink tokens.

    python benchmarks/calibrate.py MODEL --calibrate TEXT... --evaluate TEXT... --rows 16:1 8:1 4:1 --out results.json

A row "16:1" keeps the 16 fastest rotary pairs and exempts 1 sink token; "16:1:gates" leaves the queries as they are.
"16:1:init" only measures half-lives. Windows of both texts are cut at `--length` tokens; the documents must differ.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrofox.calibrate import apply_to, calibrate
from retrofox.evaluate import choose_windows
from retrofox.model.configuration_fox import FoxSpec
from retrofox.per_token_loss import token_losses
from retrofox.plots import write_atomic
from retrofox.report import environment
from retrofox.surgery import apply, attention_mode, load_base, make_plan


def main() -> None:
    options = _options()
    base, tokenizer = load_base(options.model)
    base = base.float().eval()
    fitted = _windows(options.calibrate, tokenizer, options.length, options.windows + 2, seed=0)
    judged = _windows(options.evaluate, tokenizer, options.length, options.judged, seed=1)
    results = {
        "environment": environment(),
        "length_tokens": options.length,
        "windows": {"fitted": options.windows, "held_out": 2, "evaluated": options.judged},
        "steps": options.steps,
        "loss_base": None,
        "rows": [],
    }
    if options.out.exists():
        results = json.loads(options.out.read_text())
    losses = _losses(base, judged)
    results["loss_base"] = round(float(losses.mean()), 4)
    for row in options.rows:
        if any(done["row"] == row for done in results["rows"]):
            continue
        results["rows"].append(_row(row, base, fitted, judged, losses, options))
        print({key: value for key, value in results["rows"][-1].items() if key != "layers"}, flush=True)
        write_atomic(options.out, (json.dumps(results, indent=1) + "\n").encode())


def _row(row: str, base: Any, fitted: torch.Tensor, judged: torch.Tensor, losses: torch.Tensor, options: Any) -> dict:
    kept, sink, *how = row.split(":")
    spec = _spec(base.config, int(kept), int(sink), "calibrated" if how == ["init"] else "slopes")
    result = calibrate(
        base,
        spec,
        fitted,
        out_dir=options.work / row.replace(":", "-"),
        steps=0 if how == ["init"] else options.steps,
        refit_queries=not how,
        layer_losses=options.layer_losses,
    )
    model = apply(base, make_plan(base.config, FoxSpec(**{**spec.to_dict(), "init": "slopes"})))
    before = _losses(model, judged)
    after = _losses(apply_to(model, result), judged)
    opened = None
    if options.gates_open:
        with attention_mode(model, "open"):
            opened = round(float(_losses(model, judged).mean()), 4)
    difference = (after - losses).mean(1)
    return {
        "row": row,
        "pairs_kept": int(kept),
        "sink_tokens": int(sink),
        "refit_queries": not how,
        "loss_before": round(float(before.mean()), 4),
        "loss_after": round(float(after.mean()), 4),
        "loss_after_gates_open": opened,
        "difference": round(float(difference.mean()), 4),
        "standard_error": round(float(difference.std() / len(difference) ** 0.5), 4),
        "seconds": result.report["seconds"],
        "kl": {k: v for k, v in result.report["summary"].items() if k.startswith("kl")},
        "layers": result.report["layers"],
    }


def _spec(config: Any, kept: int, sink: int, init: str) -> FoxSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    if kept == head_dim // 2:
        return FoxSpec(rope="keep", sink_tokens=sink, init=init)
    if kept == 0:
        return FoxSpec(rope="drop", sink_tokens=sink, init=init)
    longest = 2 * math.pi * theta ** (2 * (kept - 1) / head_dim)
    return FoxSpec(rope="partial", max_wavelength=longest * 1.001, sink_tokens=sink, init=init)


@torch.no_grad()
def _losses(model: Any, windows: torch.Tensor) -> torch.Tensor:
    return torch.cat([token_losses(model, row[None]) for row in windows])


def _windows(files: list[str], tokenizer: Any, length: int, count: int, seed: int) -> torch.Tensor:
    found = [w.token_ids for w in choose_windows(files, tokenizer, length, windows=None, min_tokens=length)]
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return torch.from_numpy(np.stack([found[i] for i in order]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True)
    parser.add_argument("--evaluate", nargs="+", required=True)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory for the unfinished work of each row")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--judged", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gates-open", action="store_true", help="also measure with the gates forced open")
    parser.add_argument("--layer-losses", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
