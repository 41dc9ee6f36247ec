"""Files of a finished calibration: tables per layer and per head, a figure, the report, the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from retrofox.calibration.half_life import LONGEST
from retrofox.support.files import replacing, write_result
from retrofox.support.plots import half_life_figure, save_csv, save_figure

COLUMNS = ("layer", "kl_before", "kl_after", "loss_before", "loss_after", "heads_fitted", "seconds")
HEAD_COLUMNS = ("layer", "head", "kl_before", "kl_after", "half_life_before_tokens", "half_life_after_tokens")


def write_tables(rows: list[dict[str, Any]], length: int, out: Path) -> dict[str, str]:
    """calibration.csv, calibration_heads.csv, and the half-lives in it as .png and .svg; returns file names by kind."""
    save_csv(out / "calibration.csv", COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    table, by_layer = [], []
    for row in rows:
        heads = len(row["kl_after_by_head"])
        before, after = (row[f"half_life_{when}_by_head"] or [None] * heads for when in ("before", "after"))
        columns = (range(heads), row["kl_before_by_head"], row["kl_after_by_head"], before, after)
        table += [(row["layer"], *head) for head in zip(*columns, strict=True)]
        by_layer.append([value for value in after if value is not None])
    save_csv(out / "calibration_heads.csv", HEAD_COLUMNS, table)
    files = {"csv": "calibration.csv", "heads_csv": "calibration_heads.csv"}
    if any(by_layer):
        figure = half_life_figure(
            by_layer,
            local_below=length / 16,
            global_from=length,
            ceiling=float(LONGEST * length),
            title="Half-lives of the fitted gates",
            subtitle=f"ln 2 / mean(-log f) on held-out windows of {length} tokens",
        )
        save_figure(figure, out / "calibration_heads")
        files |= {f"heads_{kind}": f"calibration_heads.{kind}" for kind in ("png", "svg")}
    return files


def write_tensors(values: dict[str, torch.Tensor], report: dict[str, Any], files: dict[str, str], out: Path) -> None:
    """calibration.safetensors and calibration.json, each whole or not at all, the JSON last; completes `files`."""
    with replacing(out / "calibration.safetensors") as partial:
        save_file({name: value.contiguous() for name, value in values.items()}, partial, metadata={"format": "pt"})
    files |= {kind: f"calibration.{kind}" for kind in ("safetensors", "json")}
    write_result(out / "calibration.json", (json.dumps({**report, "files": files}, indent=1) + "\n").encode())
