"""What calibration recovers: loss of a converted model over its base's, by rotary pairs kept and sink tokens.

    python benchmarks/calibrate.py MODEL --calibrate TEXT... --evaluate TEXT... --rows 16:1 8:1 --work DIR --out JSON

A row "16:1" keeps the 16 fastest rotary pairs and exempts 1 sink token, and fits gates and queries; "16:1:gates" leaves
the queries as they are; "16:1:slopes" fits one constant slope per head and nothing else; "16:1:init" only measures
half-lives. Windows of both texts are cut at `--length` tokens; the documents must differ. "difference" is on the second
text, "difference_same_text" on windows of the first that were not fitted.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrofox.anatomy import attention_mode, token_losses
from retrofox.calibration.calibrate import apply_to, calibrate
from retrofox.calibration.windows import documents_of, fitting_windows
from retrofox.data.windows import choose_windows
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.support.files import write_result
from retrofox.support.report import environment
from retrofox.surgery import apply, make_plan

HELD_OUT = 2
FITTED = {
    "refit": "slopes, gate weights, queries",
    "gates": "slopes, gate weights",
    "slopes": "slopes",
    "init": "half-lives only",
}


def main() -> None:
    options = _options()
    base, tokenizer = load_base(options.model)
    base = base.float().eval()
    count = options.windows + HELD_OUT + options.judged
    found = documents_of(options.calibrate, tokenizer)
    fitted, same_text = fitting_windows(found, tokenizer, [options.length], count, count, seed=0).split(
        [options.windows + HELD_OUT, options.judged]
    )
    judged = torch.cat([_windows(options.evaluate, tokenizer, options.length, options.judged), same_text])
    results = {
        "environment": environment(),
        "length_tokens": options.length,
        "windows": {"evaluated": options.judged},
        "loss_base": None,
        "rows": [],
    }
    if options.out.exists():
        results = json.loads(options.out.read_text())
    losses = _losses(base, judged)
    results["loss_base"] = round(float(losses[: options.judged].mean()), 4)
    results["loss_base_same_text"] = round(float(losses[options.judged :].mean()), 4)
    for row in options.rows:
        if any(done["row"] == row for done in results["rows"]):
            continue
        results["rows"].append(_row(row, base, fitted, judged, losses, options))
        print({key: value for key, value in results["rows"][-1].items() if key != "layers"}, flush=True)
        write_result(options.out, (json.dumps(results, indent=1) + "\n").encode())


def _row(row: str, base: Any, fitted: torch.Tensor, judged: torch.Tensor, losses: torch.Tensor, options: Any) -> dict:
    kept, sink, *rest = row.split(":")
    how = rest[0] if rest else "refit"
    spec = _spec(base.config, int(kept), int(sink), how)
    result = calibrate(
        base,
        spec,
        fitted,
        out_dir=options.work / row.replace(":", "-"),
        steps=0 if how == "init" else options.steps,
        refit_queries=how == "refit",
        choose_pairs=False,
        layer_losses=options.layer_losses,
    )
    model = apply(base, make_plan(base.config, FoxSpec.from_dict({**spec.to_dict(), "init": "slopes"})))
    after = _losses(apply_to(model, result), judged)
    opened = None
    if options.gates_open:
        with attention_mode(model, "open"):
            opened = round(float(_losses(model, judged)[: options.judged].mean()), 4)
    difference, same = (after - losses).mean(1).split(options.judged)
    shown = ("layer", "kl_before", "kl_after", "loss_before", "loss_after", "heads_fitted", "seconds")
    return {
        "row": row,
        "pairs_kept": int(kept),
        "sink_tokens": int(sink),
        "fitted": FITTED[how],
        "loss_after": round(float(after[: options.judged].mean()), 4),
        "loss_after_gates_open": opened,
        "difference": round(float(difference.mean()), 4),
        "standard_error": round(float(difference.std() / len(difference) ** 0.5), 4),
        "difference_same_text": round(float(same.mean()), 4),
        "standard_error_same_text": round(float(same.std() / len(same) ** 0.5), 4),
        "steps": options.steps,
        "windows": {"fitted": options.windows, "held_out": HELD_OUT},
        "seconds": result.report["seconds"],
        "held_out": result.report["summary"],
        "layers": [{key: layer[key] for key in shown} for layer in result.report["layers"]],
        "environment": result.report["environment"],
    }


def _spec(config: Any, kept: int, sink: int, how: str) -> FoxSpec:
    same: dict[str, Any] = {"sink_tokens": sink, "init": "calibrated" if how == "init" else "slopes"}
    same["gate"] = "bias" if how == "slopes" else "data"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    if kept == head_dim // 2:
        return FoxSpec(rope="keep", **same)
    if kept == 0:
        return FoxSpec(rope="drop", **same)
    longest = 2 * math.pi * theta ** (2 * (kept - 1) / head_dim)
    return FoxSpec(rope="partial", max_wavelength=longest * 1.001, **same)


@torch.no_grad()
def _losses(model: Any, windows: torch.Tensor) -> torch.Tensor:
    return torch.cat([token_losses(model, row[None]) for row in windows])


def _windows(files: list[str], tokenizer: Any, length: int, count: int) -> torch.Tensor:
    found = [w.token_ids for w in choose_windows(files, tokenizer, length, windows=None, min_tokens=length)]
    order = np.random.default_rng(1).permutation(len(found))[:count]
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
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--judged", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gates-open", action="store_true", help="also measure with the gates forced open")
    parser.add_argument("--layer-losses", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
