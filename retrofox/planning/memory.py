"""Peak memory of a training step, in closed form, by part.

A layer whose activations are kept takes, per token, with d channels, H query and Hkv kv heads of width D, an MLP of
width f and numbers of n bytes (2 in bfloat16),

    n (5 d + (2 H + 2 Hkv) D + 4 f) + 24 H

bytes: inputs of both norms, of q, k, v and of the MLP; q, k, v and the attention's output, once more as o_proj reads
it; gate, up, SiLU and product; sums of log f and of the softmax; each adapter of rank r adds n r. One that is
recomputed takes n d, its input, and in its backward the above and two gradients as wide as the MLP. The peak is the
largest of four moments: at the logits, in the backward of the last layer, in that of the first, in the optimizer's
step. It is within 10 % of the training runs in benchmarks/, which `tests/planning/test_memory.py` compares.
"""

from __future__ import annotations

from retrofox.config import LoraConfig, Recipe, Stage, TaughtStage
from retrofox.planning.hardware import Hardware
from retrofox.planning.shape import Shape, products
from retrofox.planning.steps import STATE_BYTES, auto_tile, chunk_rows, readers_of, recomputed_layers, tokens_per_step

NF4_BYTES = 0.52
"""Per weight of a base quantised to nf4 with double quantisation: half a byte, and the scales of its blocks."""
TILE_TENSORS = 7
"""Tensors as wide as the MLP in the backward of a tile."""
GATHERED = 24_000_000
"""Parameters that FSDP2 gathers at a time, two such units at once."""
PARTS = ("weights", "teacher", "gradients", "optimizer", "activations", "logits", "other")


def trained_parameters(shape: Shape, lora: LoraConfig | None, stage: Stage) -> dict[str, int]:
    """Role -> parameters that a stage trains."""
    counts = {"gate_bias": shape.gates[1], "gate_weight": shape.gates[0], "pro": shape.pro}
    counts = {role: shape.layers * count for role, count in counts.items()}
    if lora is None:
        inside = shape.layers * shape.attention
        counts |= {"attention": inside, "rest": shape.base - inside}
    else:
        counts |= adapter_parameters(shape, lora)
    return {role: count for role, count in counts.items() if count and stage.rate(role) > 0}


def adapter_parameters(shape: Shape, lora: LoraConfig) -> dict[str, int]:
    """Role -> parameters of the adapters."""
    found = {"attention": 0, "rest": 0}
    for name in adapted(shape, lora):
        inputs, outputs = shape.matrices[name]
        role = "rest" if name in ("gate_proj", "up_proj", "down_proj") else "attention"
        found[role] += shape.layers * (lora.rank * (inputs + outputs) + (outputs if lora.dora else 0))
    return found


def adapted(shape: Shape, lora: LoraConfig) -> list[str]:
    """Names of a layer's matrices that have adapters."""
    return [name for name in shape.matrices if lora.targets == "all-linear" or name in lora.targets]


def has_teacher(recipe: Recipe, stage: Stage) -> bool:
    """Whether the original is there as a second model: the stage learns from weights that it, or one before, moves."""
    if not isinstance(stage, TaughtStage) or recipe.lora is not None:  # adapters leave the pretrained weights alone
        return False
    until = next((place for place, other in enumerate(recipe.stages) if other is stage), 0)
    return any(one.rate("attention") > 0 or one.rate("rest") > 0 for one in (*recipe.stages[:until], stage))


def memory(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> dict[str, float]:
    """Bytes on one device at the peak of a step, by PARTS."""
    number = 4 if recipe.precision == "fp32" else 2
    lora, adapts = recipe.lora, recipe.lora is not None
    tokens = stage.micro_batch * (stage.sequence_length // recipe.parallel.context)
    trained = sum(trained_parameters(shape, lora, stage).values())
    readers = readers_of(recipe.parallel, on.gpus)
    micro_batches = tokens_per_step(stage, readers) // (stage.micro_batch * stage.sequence_length * readers)
    learns_head = not adapts and stage.rate("rest") > 0 and stage.objective != "align"
    head_size = shape.embedding  # a tied head is as large

    if lora is None:
        weights = 4.0 * shape.parameters
    else:
        packed = shape.layers * products(shape.matrices) if lora.quantize else 0
        weights = number * (shape.base - packed) + NF4_BYTES * packed + 4.0 * (trained + shape.added)
    gradients, buckets = 4.0 * trained / on.shards, 4.0 * trained if on.gpus > 1 and on.shards == 1 else 0.0
    optimizer = float(STATE_BYTES.get(recipe.optim, 8)) * trained / on.shards
    shared: dict[str, float] = {
        "weights": weights / on.shards,
        "teacher": float(number * shape.base) if has_teacher(recipe, stage) else 0.0,
        "optimizer": 0.0 if is_paged(recipe.optim) and on.gpu else optimizer,
    }

    # numbers that autocast makes of float32 weights, or FSDP2 of its parts
    again = len(recomputed_layers(stage.gradient_checkpointing, shape.layers))
    mixed = recipe.precision != "fp32"
    copied = number * (trained / shape.layers if adapts else shape.in_layer) if mixed else 0.0
    copies = (shape.layers - again) * copied
    head_copy = number * head_size if mixed and not adapts else 0.0
    if on.shards > 1:
        copies = number * (2 * max(GATHERED, shape.in_layer) + shape.embedding + shape.head)
        copied = head_copy = 0.0
        copies *= 2 if on.sharding == "zero3" else 1  # gathered in float32

    layer, working, behind = _layer(shape, stage, tokens, number, lora)
    checkpoint = float(tokens * number * shape.hidden)
    here = again if not (stage.offload_activations and on.gpu) else min(again, 2)
    log = 4.0 * tokens * shape.layers * shape.heads if shape.gates != (0, 0) else 0.0
    kept = (shape.layers - again) * layer + here * checkpoint + log + 2 * checkpoint

    distills = stage.objective == "distill"
    rows = min(tokens, chunk_rows(shape.vocabulary, on.gpu, distills))
    each = 26 if distills else number + 8
    logits = 0.0 if stage.objective == "align" else float(rows * shape.vocabulary * each)
    kept_head = 4.0 * head_size if learns_head else 0.0
    product = number * head_size if learns_head else 0.0

    waiting = buckets + (gradients if micro_batches > 1 else 0.0)
    ends = {"activations": kept, "gradients": waiting, "logits": 0.0}
    first = log + (working + 2 * checkpoint if again else layer + behind)
    moments = (
        {**ends, "logits": logits, "other": copies + kept_head + product + head_copy},  # at the logits
        {  # in the backward of the last layer
            **ends,
            "activations": kept + (working if again else behind),
            "other": copies + copied + kept_head,
        },
        {"activations": first, "gradients": gradients + buckets, "other": copied},  # in that of the first
        {"gradients": gradients + buckets},  # in the optimizer's step
    )
    peak = max(({**shared, **parts} for parts in moments), key=lambda parts: sum(parts.values()))
    return {part: peak.get(part, 0.0) for part in PARTS}


def _layer(shape: Shape, stage: Stage, tokens: int, number: int, lora: LoraConfig | None) -> tuple[float, float, float]:
    """Bytes of a layer's activations: kept; in the backward, if recomputed; on top of kept ones in that backward."""
    hidden, inner = number * shape.hidden, number * shape.width
    outputs = 5 if shape.converted and lora is None and stage.objective != "align" else 4
    attention = outputs * hidden + number * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention += number * shape.pro_kept + (24 if shape.converted else 4) * shape.heads
    if lora is not None:
        attention += number * lora.rank * len(adapted(shape, lora))
    if stage.objective == "align":  # the MLPs only pass through
        return float(tokens * attention), tokens * float(attention + 4 * inner), float(tokens * 4 * inner)
    tile = tile_tokens(shape, stage)
    if tile and tokens > tile:
        tiles = float(TILE_TENSORS * tile * inner)
        return float(tokens * attention), tokens * (attention + hidden) + tiles, tokens * 2 * hidden + tiles
    mlp = (4 if shape.gated else 2) * inner
    back = mlp + 2 * inner
    return float(tokens * (attention + mlp)), float(tokens * (attention + back)), float(tokens * (back - mlp + hidden))


def tile_tokens(shape: Shape, stage: Stage) -> int:
    """Tokens of a tile of the MLPs; 0 without tiles."""
    if stage.tiled_mlp == "none" or not shape.matrices:
        return 0
    if isinstance(stage.tiled_mlp, int):
        return stage.tiled_mlp
    return auto_tile(max(shape.width, shape.hidden))


def is_paged(optim: str) -> bool:
    """Whether the optimizer's state is in CPU memory where the GPU's is short: bitsandbytes' paged optimizers."""
    return optim.startswith("paged")


def cpu_memory(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> dict[str, float]:
    """Bytes of CPU memory that one process's offloads take; {} without them."""
    number = 4 if recipe.precision == "fp32" else 2
    found = {}
    if stage.offload_activations and on.gpu:
        rows = stage.micro_batch * (stage.sequence_length // recipe.parallel.context)
        gone = max(0, len(recomputed_layers(stage.gradient_checkpointing, shape.layers)) - 2)
        found["activations"] = float(gone * number * rows * shape.hidden)
    if is_paged(recipe.optim) and on.gpu:
        trained = sum(trained_parameters(shape, recipe.lora, stage).values())
        found["optimizer"] = float(STATE_BYTES.get(recipe.optim, 8)) * trained
    return found
