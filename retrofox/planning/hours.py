"""Operations and hours of a stage, from the MFU of measured runs: the share of a GPU's peak that they reached."""

from __future__ import annotations

import math
from typing import NamedTuple

from retrofox.config import LoraConfig, Stage
from retrofox.planning.hardware import Hardware
from retrofox.planning.memory import adapter_parameters
from retrofox.planning.shape import Shape


class MeasuredMfu(NamedTuple):
    """MFU of training on an H100 or H200, lowest and highest of the runs in a file of benchmarks/."""

    objective: str
    adapts: bool
    parameters: float
    low: float
    high: float
    file: str


MEASURED_MFU = (
    MeasuredMfu("extend", False, 135e6, 0.287, 0.379, "train_memory.json"),
    MeasuredMfu("extend", True, 135e6, 0.242, 0.242, "train_memory.json"),
    MeasuredMfu("distill", False, 135e6, 0.173, 0.173, "train_memory.json"),
    MeasuredMfu("align", False, 135e6, 0.102, 0.102, "train_memory.json"),
    MeasuredMfu("extend", False, 1.2e9, 0.273, 0.427, "shapes.json, long-training.json"),
    MeasuredMfu("extend", True, 8.2e9, 0.256, 0.340, "shapes.json, long-training.json"),
)
SCALING = {"ddp": 0.94, "fsdp2": 0.87, "zero3": 0.87}
"""Lowest speed of one of several GPUs, in parts of a lone one's (two H200s, benchmarks/fsdp.json; zero3: as fsdp2)."""


class Hours(NamedTuple):
    """Hours of a stage, from the fastest run measured to the slowest, and the file they come from."""

    low: float
    high: float
    file: str


def flops_per_token(shape: Shape, lora: LoraConfig | None, stage: Stage) -> float:
    """Operations per training token, without what recomputation adds: the log's MFU counts by it, too.

    A product with n parameters costs 2n forward, 2n for its input's gradient and 2n for its own where it is trained;
    attention over T tokens, of which a window w shows the last, costs 4 H D (w - w^2 / 2T) forward, w = T without one,
    and twice that backward. distill adds a forward of the original; align is that and attention alone.
    """
    matrices = float(shape.layers * shape.used + shape.embedding)
    length, attention = stage.sequence_length, 0.0
    for window in shape.windows:
        seen = min(window or length, length)
        attention += 4.0 * shape.heads * shape.head_dim * (seen - seen * seen / (2 * length))
    forward = 2 * matrices + attention
    if stage.objective == "align":
        return forward + 4.0 * shape.layers * shape.attention + 3 * attention
    if lora is None:
        trained = matrices if stage.rate("rest") else 0.0
        training = forward + 2 * matrices + 2 * trained + 2 * attention
    else:
        training = forward + 2 * matrices + 6.0 * sum(adapter_parameters(shape, lora).values()) + 2 * attention
    return training + (forward if stage.objective == "distill" else 0.0)


def hours_of(shape: Shape, lora: LoraConfig | None, stage: Stage, tokens: int, on: Hardware) -> Hours | None:
    """Hours of `tokens` training tokens at the MFU of the runs most like this one; None where the peak is unknown."""
    if on.flops is None:
        return None
    rows = [row for row in MEASURED_MFU if row.objective == stage.objective]
    rows = [row for row in rows if row.adapts == (lora is not None)] or rows
    found = min(rows, key=lambda row: abs(math.log(row.parameters / shape.parameters)))
    ideal = tokens * flops_per_token(shape, lora, stage) / (on.flops * on.gpus) / 3600
    return Hours(ideal / found.high, ideal / found.low / (SCALING[on.sharding] if on.gpus > 1 else 1.0), found.file)
