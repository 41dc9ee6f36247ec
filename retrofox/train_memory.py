"""Memory of a training step by component, from the model's own forward instead of a formula.

What the backward keeps of a token is counted: one- and two-layer copies of the model, at its real width, run forward
on a few tokens with autograd's saved tensors watched. The differences give bytes per token and layer, and per token
outside the layers, whatever the family. Everything else is arithmetic.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from retrofox.config import Recipe, Stage
from retrofox.objectives import OBJECTIVES, Extend, causal_lm, chunk_rows, is_plain_head
from retrofox.train_groups import set_trainable

STATE_BYTES = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_bnb_8bit": 2,
    "paged_adamw_8bit": 2,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "adafactor": 0,
    "sgd": 0,
    "rmsprop": 4,
    "adagrad": 4,
}
"""Optimizer state per trained parameter, by optim; 8 (two float32 moments) where it is not listed."""
PROBE = (32, 64)
_counted: dict[str, tuple[float, float]] = {}


def memory(recipe: Recipe, stage: Stage, model: Any, shards: int, device: torch.device) -> dict[str, float]:
    """Peak bytes on one device by component: weights, gradients, optimizer, activations, logits.

    Args:
        model: on the meta device, requires_grad set as it will be trained.
        shards: devices the weights, gradients and optimizer are sharded over (1 = whole on each).
        device: where it will run: logits come in larger pieces on a GPU.
    """
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    mixed = recipe.precision != "fp32"
    lm = causal_lm(model)
    config = lm.config
    tokens = stage.micro_batch * stage.sequence_length
    if recipe.lora is None:
        weights = 4 * total / shards + (2 * total if mixed else 0)  # autocast keeps 16-bit copies through a pass
    else:
        frozen = 0.55 if recipe.lora.quantize else (2 if mixed else 4)  # nf4: half a byte, and its scales
        weights = (4 * trained + frozen * (total - trained)) / shards
    per_layer, outside = activation_bytes(lm, stage, recipe)
    layers = config.num_hidden_layers
    hidden = config.hidden_size * (2 if mixed else 4)
    every = {"none": 0, "full": 1}.get(str(stage.gradient_checkpointing), stage.gradient_checkpointing)
    assert isinstance(every, int)
    recomputed = 0 if every == 0 else -(-layers // every)
    kept = (layers - recomputed) * per_layer + recomputed * hidden + (per_layer if recomputed else 0)
    head = lm.get_output_embeddings().weight
    rows = min(tokens, chunk_rows(config.vocab_size, device))
    number = 2 if mixed else 4
    logits = 0.0
    if stage.objective != "align":
        plain = stage.objective == "extend" and is_plain_head(lm)
        copies = (number + 4) if plain else (number + 4 * 4)
        logits = rows * config.vocab_size * copies + tokens * hidden
        logits += head.numel() * (4 + number) if head.requires_grad else 0
    return {
        "weights": float(weights),
        "gradients": 4.0 * trained / shards,
        "optimizer": float(STATE_BYTES.get(recipe.optim, 8)) * trained / shards,
        "activations": float(tokens * (kept + outside)),
        "logits": float(logits),
    }


def activation_bytes(lm: Any, stage: Stage, recipe: Recipe) -> tuple[float, float]:
    """(bytes per token and layer, bytes per token outside the layers) that a forward pass leaves for the backward."""
    key = repr(
        (type(lm).__name__, lm.config.to_json_string(), stage.objective, stage.rates, recipe.precision, recipe.lora)
    )
    if key not in _counted:
        one = _slope(lm, 1, stage, recipe)
        two = _slope(lm, 2, stage, recipe)
        _counted[key] = (two - one, max(0.0, 2 * one - two))
    return _counted[key]


def _slope(lm: Any, layers: int, stage: Stage, recipe: Recipe) -> float:
    few, more = (_saved(lm, layers, tokens, stage, recipe) for tokens in PROBE)
    return (more - few) / (PROBE[1] - PROBE[0])


def _saved(lm: Any, layers: int, tokens: int, stage: Stage, recipe: Recipe) -> int:
    """Bytes of distinct memory that autograd keeps after a forward of `tokens` tokens through `layers` layers."""
    from retrofox.train_speed import fuse_norms, lower_precision_stream

    config = copy.deepcopy(lm.config)
    config.num_hidden_layers = layers
    config.vocab_size = 64
    for key in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        setattr(config, key, value[:layers] if isinstance(value, list) and key == "layer_types" else None)
    small = type(lm)(config)
    if recipe.lora is not None:
        from retrofox.lora import add_adapters

        small = add_adapters(small, recipe.lora, "")
    set_trainable(small, stage.model_copy(update={"trainable": None}), adapters=recipe.lora is not None)
    mixed = recipe.precision != "fp32"
    if mixed:
        lower_precision_stream(small, torch.bfloat16)
        fuse_norms(small)
    ids = torch.arange(tokens)[None] % 64
    batch = {
        "input_ids": ids,
        "position_ids": torch.arange(tokens)[None],
        "targets": ids,
    }
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    device = torch.device("cpu")
    quick = stage.model_copy(update={"cross_entropy": "chunked"})
    objective = OBJECTIVES[stage.objective](small, quick, device)
    if isinstance(objective, Extend):
        objective.kind = "chunked"
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        loss, _ = objective(small, batch)
    # Counted while the graph is alive, so that no address is used twice.
    found = sum(storages.values())
    del loss
    return found
