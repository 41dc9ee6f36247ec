"""Memory of a training step by component: on its device, and in CPU memory where it moves some of it there."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.anatomy import causal_lm, is_converted
from retrofox.config import Recipe, Stage
from retrofox.training.arguments import STATE_BYTES
from retrofox.training.chunked_loss import is_plain_head
from retrofox.training.groups import tokens_per_step
from retrofox.training.memory_probe import Curve, probe, rows_of_logits, tile_of
from retrofox.training.objectives import recomputed_layers
from retrofox.training.optimizer_state import VISITING

NF4_BYTES = 0.52
"""Per weight of a base quantised to nf4 with double quantisation: half a byte, and the scales of its blocks."""


def memory(
    recipe: Recipe,
    stage: Stage,
    model: Any,
    devices: int,
    sharded: bool,
    device: torch.device,
    teacher: bool = False,
) -> dict[str, float]:
    """Peak bytes on one device by component: weights, teacher, gradients, optimizer, activations, logits, workspace.

    Args:
        model: on the meta device, requires_grad set as it will be trained.
        devices: processes of the run, one device each.
        sharded: whether weights, gradients and optimizer are sharded over them (FSDP2, ZeRO-3), or whole on each.
        device: where it will run.
        teacher: whether the original is there as a second model.
    """
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    mixed = recipe.precision != "fp32"
    lm = causal_lm(model)
    layers, rows, tokens = lm.config.num_hidden_layers, stage.micro_batch, stage.sequence_length
    shards = devices if sharded else 1
    if recipe.lora is None:
        weights = 4 * total / shards
    else:
        inside = sum(m.weight.numel() for m in lm.modules() if isinstance(m, torch.nn.Linear)) - _of_head(lm)
        packed = inside - trained if recipe.lora.quantize else 0
        weights = (4 * trained + (2 if mixed else 4) * (total - trained - packed) + NF4_BYTES * packed) / shards
    recomputed = len(recomputed_layers(stage.gradient_checkpointing, layers))
    again = probe(recipe, stage, model, True, device) if recomputed else None
    plain = (
        again if again and recomputed == layers and tile_of(stage, lm) else probe(recipe, stage, model, False, device)
    )
    again = again or plain
    # 16-bit copies of weights that the graph keeps do not grow with the tokens: they are weights, not activations.
    copies = 0.0
    if mixed:
        copies = (layers - recomputed) * plain.layer.constant + recomputed * again.layer.constant
        copies += plain.outside.constant
    here = recomputed - _gone(recomputed, stage, device)
    kept = [(layers - recomputed, plain.layer), (here, again.layer), (1, plain.outside)]
    activations = sum(count * curve._replace(constant=0).at(rows, tokens) for count, curve in kept)
    if device.type == "cuda" and is_converted(lm):  # the gates of every layer, which a log line reads
        activations += 4 * rows * tokens * layers * lm.config.num_attention_heads
    if sharded and mixed:
        # Two layers are gathered in 16 bits at a time; embedding and head stay gathered.
        copies = 4 * (total - 2 * _of_embedding(lm)) / layers + 2 * (_of_embedding(lm) + _of_head(lm))
    at_once = min(rows * tokens, rows_of_logits(stage, lm, device))
    logits = plain.head.at(1, at_once)
    if device.type == "cpu" and stage.objective != "align":
        logits = _head_bytes(stage, lm, at_once, rows * tokens, mixed)
    workspace = max(plain.backward.at(rows, tokens), again.backward.at(rows, tokens))
    gradients = 4.0 * trained / shards
    if devices > 1 and not sharded:
        gradients *= 2  # DDP's buckets
    if tokens_per_step(stage, devices) == rows * tokens * devices:
        # One micro-batch a step: gradients are made while the activations they come from are freed.
        gradients = max(0.0, gradients - activations)
    optimizer = float(STATE_BYTES.get(recipe.optim, 8)) * trained / shards
    if _moves_optimizer(stage, device):
        # In a step there are no activations, and the state of the largest parameter, or of a few small ones, is here.
        largest = max(VISITING // 4, *(p.numel() for p in parameters if p.requires_grad))
        optimizer = max(0.0, min(1.0, largest / trained) * optimizer - activations)
    return {
        "weights": float(weights + max(0.0, copies)),
        "teacher": float((2 if mixed else 4) * total) if teacher else 0.0,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": float(activations),
        "logits": float(logits),
        "workspace": float(max(0.0, workspace - logits)),
    }


def cpu_memory(recipe: Recipe, stage: Stage, model: Any, device: torch.device) -> dict[str, float]:
    """Bytes of CPU memory that a process's offloads take, by component: activations, optimizer; 0 without them."""
    layers = causal_lm(model).config.num_hidden_layers
    gone = _gone(len(recomputed_layers(stage.gradient_checkpointing, layers)), stage, device)
    curve = probe(recipe, stage, model, True, device).layer._replace(constant=0) if gone else Curve(0, 0, 0)
    moments = STATE_BYTES.get(recipe.optim, 8) * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "activations": gone * curve.at(stage.micro_batch, stage.sequence_length),
        "optimizer": float(moments) if _moves_optimizer(stage, device) else 0.0,
    }


def _gone(recomputed: int, stage: Stage, device: torch.device) -> int:
    """Checkpoints that are in CPU memory at the peak: all but two. On a CPU that is where they are anyway."""
    return max(0, recomputed - 2) if stage.offload_activations and device.type != "cpu" else 0


def _moves_optimizer(stage: Stage, device: torch.device) -> bool:
    return stage.offload_optimizer and device.type != "cpu"


def _of_embedding(lm: Any) -> int:
    return lm.get_input_embeddings().weight.numel()


def _of_head(lm: Any) -> int:
    return lm.get_output_embeddings().weight.numel()


def _head_bytes(stage: Stage, lm: Any, rows: int, tokens: int, mixed: bool) -> float:
    """Bytes of a chunk of logits and the head's gradients, where no allocator can be asked (CPUs)."""
    number = 2 if mixed else 4
    head = lm.get_output_embeddings().weight
    plain = stage.objective != "distill" and is_plain_head(lm)
    chunk = rows * lm.config.vocab_size * (number + 4 if plain else number + 4 * 4)
    return chunk + tokens * lm.config.hidden_size * number + (head.numel() * (4 + number) if head.requires_grad else 0)
