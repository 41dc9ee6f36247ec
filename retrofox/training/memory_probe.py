"""Memory of a training step, measured on small copies of a model instead of by a formula.

One- and two-layer copies of the model, at its real width, run the stage's objective on a few thousand tokens, on the
device that will train (on a CPU: a few hundred tokens, without the head). What stays allocated after the forward, and
how far the allocator rises above it in the head and in the backward, is fitted by a + b T + c T^2 over rows of T
tokens; the difference of the copies is the cost of a layer, with all that a kernel, a mask or a fused operator keeps.
"""

from __future__ import annotations

import copy
import gc
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.initialization import no_init_weights

from retrofox.anatomy import causal_lm
from retrofox.config import Recipe, Stage
from retrofox.loading.device import PRECISIONS
from retrofox.training.chunked_loss import chunk_rows
from retrofox.training.groups import set_trainable
from retrofox.training.live_bytes import LiveBytes
from retrofox.training.lora import add_adapters
from retrofox.training.model import lower_frozen, set_attention
from retrofox.training.objectives import Extend, stage_objective, trained_form
from retrofox.training.speed import compile_parts, fuse_norms, lower_precision_stream, save_memory
from retrofox.training.tiling import longest_tile

PROBE_ROWS = {"cuda": (512, 2048, 4096, 8192), "cpu": (64, 128, 192)}
"""Lengths of the rows the probes run, from the shortest that is trained: below its points a parabola leads astray."""
SHORT, LONGEST_PROBE = 32768, 131072
"""Rows longer than the first are probed at lengths near their own, up to the second: in short rows the peak is that of
the weights' gradients, which hide what each token takes."""


class Curve(NamedTuple):
    """Bytes as a function of the tokens T of a row: constant + linear T + square T^2."""

    constant: float
    linear: float
    square: float

    def at(self, rows: int, tokens: float) -> float:
        """Bytes of `rows` rows of `tokens` tokens, the constant once."""
        return max(0.0, self.constant + rows * (self.linear * tokens + self.square * tokens * tokens))


class Probe(NamedTuple):
    """Memory of a stage's passes: kept by a layer and outside the layers, and on top in the head and the backward."""

    layer: Curve
    outside: Curve
    head: Curve
    backward: Curve


_probes: dict[str, Probe] = {}


def tile_of(stage: Stage, lm: Any) -> int:
    """Tokens of a tile, where the stage's rows are computed in tiles; else 0."""
    if stage.tiled_mlp == "none":
        return 0
    tile = longest_tile(lm, stage.tiled_mlp)
    return tile if stage.micro_batch * stage.sequence_length > tile else 0


def probe_rows(device: torch.device, tile: int, tokens: int) -> tuple[int, ...]:
    """Lengths of the rows to probe for rows of `tokens`: near their own if they are long, and of several tiles.

    A quarter, a half and the whole of the largest power of two within the row, so that all long rows share few probes.
    """
    rows = PROBE_ROWS[device.type]
    if device.type == "cpu":
        return rows
    longest = min(LONGEST_PROBE, 1 << (tokens.bit_length() - 1))
    if tokens > SHORT and 2 * tile <= longest // 4:
        return longest // 4, longest // 2, longest
    return rows if 2 * tile <= rows[0] else (2 * tile, 3 * tile, 4 * tile, 6 * tile)


def rows_of_logits(stage: Stage, lm: Any, device: torch.device) -> int:
    """Rows of logits that exist at the same time, as the objectives choose them."""
    rows = chunk_rows(lm.config.vocab_size, device)
    return max(64, rows // 4) if stage.objective == "distill" else rows


def probe(recipe: Recipe, stage: Stage, model: Any, recomputed: bool, device: torch.device) -> Probe:
    """Measures one- and two-layer copies of the model; kept for the next stage that differs in lengths only."""
    lm = causal_lm(model)
    tile = tile_of(stage, lm)
    lengths = probe_rows(device, tile, stage.sequence_length)
    # On a CPU rows are too short for whole tiles; what is kept does not depend on their length.
    tiles = "none" if not tile else PROBE_ROWS["cpu"][0] // 2 if device.type == "cpu" else stage.tiled_mlp
    switches = {"gradient_checkpointing": "full" if recomputed else "none", "tiled_mlp": tiles}
    stage = stage.model_copy(update={**switches, "offload_activations": False, "offload_optimizer": False})
    trained = sorted({role for role, rate in stage.rates.model_dump().items() if rate})
    kind = (stage.objective,)
    shape = (type(lm).__name__, lm.config.to_json_string(), *kind, trained, stage.trainable)
    how = (
        stage.cross_entropy,
        stage.compile,
        recomputed,
        tiles,
        recipe.precision,
        recipe.lora,
        recipe.attention,
        device.type,
        lengths,
    )
    key = repr((*shape, *how))
    while key not in _probes:
        try:
            _probes[key] = _measured(lm, recipe, stage, lengths, tile, device)
        except torch.OutOfMemoryError:
            if lengths[-1] <= PROBE_ROWS[device.type][-1]:
                raise
            gc.collect()
            torch.cuda.empty_cache()
            lengths = tuple(length // 2 for length in lengths)
    return _probes[key]


def _measured(
    lm: Any, recipe: Recipe, stage: Stage, lengths: tuple[int, ...], tile: int, device: torch.device
) -> Probe:
    """Runs the copies of one and of two layers over rows of all lengths."""
    measure = _allocated if device.type == "cuda" else _alive
    found = np.zeros((2, len(lengths), 3))
    for layers in (1, 2):
        gc.collect()  # else garbage of an earlier copy is freed while this one is measured
        small = _small(lm, layers, recipe, stage, device)
        for index, tokens in enumerate(lengths):
            with trained_form(small, stage):
                found[layers - 1, index] = measure(small, recipe, stage, tokens, device)
        del small
    kept, head, backward = (found[:, :, kind] for kind in range(3))
    layer = kept[1] - kept[0]
    at_once = np.minimum(lengths, rows_of_logits(stage, lm, device))  # a piece of logits grows no further
    head_curve = Curve(float(head[1, 0] if tile else head[1].max()), 0.0, 0.0)
    if len(set(at_once)) > 1:
        linear, constant = np.polyfit(at_once, head[1], 1).tolist()
        head_curve = Curve(constant, linear, 0.0)
    curves = [_fit(lengths, values) for values in (layer, kept[0] - layer, backward[1])]
    if device.type == "cpu":  # these rows are shorter than attention's blocks: a parabola would go on growing
        curves[2] = Curve(0.0, float(backward[1, -1]) / lengths[-1], 0.0)
    return Probe(curves[0], curves[1], head_curve, curves[2])


def _fit(lengths: tuple[int, ...], values: np.ndarray) -> Curve:
    square, linear, constant = np.polyfit(np.asarray(lengths, float), values, 2).tolist()
    longest = lengths[-1]
    if abs(square) * longest * longest < 0.02 * max(1.0, abs(linear) * longest):  # rounding to the allocator's blocks
        linear, constant = np.polyfit(np.asarray(lengths, float), values, 1).tolist()
        square = 0.0
    return Curve(constant, linear, square)


def _small(lm: Any, layers: int, recipe: Recipe, stage: Stage, device: torch.device) -> Any:
    """The model at its width with any weights and few layers, prepared as `train` prepares it."""
    config = copy.deepcopy(lm.config)
    config.num_hidden_layers = layers
    if device.type == "cpu":
        config.vocab_size = 64  # the head is counted by `_head_bytes`
    for key in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        setattr(config, key, value[:layers] if isinstance(value, list) and key == "layer_types" else None)
    with torch.device(device), no_init_weights():  # a wide model takes a minute to draw, and sizes need no values
        small: Any = type(lm)(config)
    set_attention(small, recipe)
    if recipe.lora is not None:
        small = add_adapters(small, recipe.lora, "").to(device)
    set_trainable(small, stage.model_copy(update={"trainable": None}), adapters=recipe.lora is not None)
    dtype = PRECISIONS[recipe.precision]
    lower_frozen(small, recipe)
    if recipe.precision != "fp32":
        lower_precision_stream(small, dtype)
        fuse_norms(small)
    save_memory(small, stage)
    if device.type == "cuda":
        compile_parts(small, stage.compile)
    return small.train()


def _pass(small: Any, recipe: Recipe, stage: Stage, tokens: int, device: torch.device) -> torch.Tensor:
    """The loss of a row of two documents."""
    half = tokens // 2
    ids = torch.arange(tokens, device=device)[None] % 64
    batch = {
        "input_ids": ids,
        "position_ids": (torch.arange(tokens, device=device) % half)[None],
        "cu_seqlens": torch.tensor([0, half, tokens], dtype=torch.int32, device=device),
        "targets": ids,
    }
    # The small model stands for its teacher, too: whose weights are counted elsewhere.
    objective = stage_objective(small, stage, device, small)
    if isinstance(objective, Extend) and device.type == "cpu":
        objective.kind = "chunked"
    mixed = recipe.precision != "fp32"
    with torch.autocast(device.type, dtype=PRECISIONS[recipe.precision] if mixed else torch.bfloat16, enabled=mixed):
        return objective(small, batch)[0]


def _allocated(small: Any, recipe: Recipe, stage: Stage, tokens: int, device: torch.device) -> tuple[float, ...]:
    """(bytes kept after the forward, peak above them in the forward, peak above them in the backward) on a GPU."""
    kept = peak = behind = 0
    for _ in range(2):  # the first pass loads kernels and their workspaces
        small.zero_grad(set_to_none=True)
        before, _ = _requested(device)
        torch.cuda.reset_peak_memory_stats(device)
        loss = _pass(small, recipe, stage, tokens, device)
        kept, peak = (bytes_ - before for bytes_ in _requested(device))
        torch.cuda.reset_peak_memory_stats(device)
        loss.backward()
        behind = _requested(device)[1] - before
        del loss
    small.zero_grad(set_to_none=True)
    return kept, peak - kept, max(0, behind - kept)


def _requested(device: torch.device) -> tuple[int, int]:
    """(bytes of live GPU tensors, their peak) as they were asked for.

    What is allocated for them is up to 1 MB more each: nothing for the tensors of a training step, a third for those of
    a probe, and the slope that is fitted through it wrong by as much.
    """
    statistics = torch.cuda.memory_stats(device)
    return statistics["requested_bytes.all.current"], statistics["requested_bytes.all.peak"]


def _alive(small: Any, recipe: Recipe, stage: Stage, tokens: int, device: torch.device) -> tuple[float, ...]:
    """(bytes kept after the forward, 0, peak above them in either pass) on a CPU, whose allocator tells nothing.

    Without gradients of parameters, which hide in short rows what each token takes, and are counted elsewhere.
    """
    trained = [p for p in small.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
    with LiveBytes() as live:
        loss = _pass(small, recipe, stage, tokens, device)
        kept = live.now
        loss.backward()
    for handle in handles:
        handle.remove()
    return kept, 0.0, live.peak - kept
