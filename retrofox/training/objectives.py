"""The objectives of a retrofit; none holds the logits of all positions at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from retrofox.anatomy import attention_mode, attentions, causal_lm, inner_model, is_converted
from retrofox.config import DistillStage, Stage
from retrofox.data.packed import IGNORE
from retrofox.planning.steps import chunk_rows, recomputed_layers
from retrofox.training.chunked_loss import (
    Head,
    by_autograd,
    choose_cross_entropy,
    is_plain_head,
    plain_cross_entropy,
    plain_distillation,
    sum_over_rows,
)
from retrofox.training.document_attention import attends_by_document


def hidden_states(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The last hidden state (B, T, hidden_size) of a batch of packed documents.

    A batch without cu_seqlens has one document a row and needs no positions; with them, converted models take the
    boundaries as they are, as do plain ones that attend by document. Others find them where position_ids are not
    consecutive. A batch with `shards` is this process's part of rows that several share.
    """
    lm = causal_lm(model)
    packed = {}
    if batch.get("shards") is not None:
        packed = {"position_ids": batch["position_ids"], "shards": batch["shards"]}
    elif batch.get("cu_seqlens") is not None:
        packed["position_ids"] = batch["position_ids"]
        if is_converted(lm):
            packed["cu_seqlens"] = batch["cu_seqlens"]
        elif attends_by_document(lm):
            packed["document_ends"] = batch["cu_seqlens"].tolist()
    return inner_model(lm)(input_ids=batch["input_ids"], use_cache=False, return_dict=True, **packed).last_hidden_state


class Extend:
    """Cross-entropy: L = sum_t -log p(x_{t+1} | x_{<=t}) / number of targets, over targets inside documents."""

    metrics: tuple[str, ...] = ()

    def __init__(self, model: Any, stage: Stage, device: torch.device):
        self.kind, self.reason = choose_cross_entropy(stage.cross_entropy, model, device)
        self.rows = chunk_rows(causal_lm(model).config.vocab_size, device.type == "cuda")
        self.plain = is_plain_head(model)

    def __call__(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss summed over targets, metrics summed over targets)."""
        hidden, targets = hidden_states(model, batch).flatten(0, 1), batch["targets"].flatten()
        if self.kind == "chunked":

            def cross_entropy_of(logits: torch.Tensor, part: slice) -> torch.Tensor:
                return F.cross_entropy(logits, targets[part], reduction="sum", ignore_index=IGNORE)[None]

            loss_of = plain_cross_entropy(targets) if self.plain else by_autograd(cross_entropy_of)
            return sum_over_rows(model, hidden, loss_of, self.rows)
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        weight = causal_lm(model).get_output_embeddings().weight
        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", ignore_index=IGNORE)(weight, hidden, targets)
        return loss.float(), loss.new_zeros(0)


class Distill:
    """L = (1 - a) tau^2 KL(p_original(tau) || p_retrofit(tau)) + a CE, full vocabulary, mean over targets.

    The original is `teacher` (a second model), or with teacher=None the very same weights in attention mode
    "original" with adapters off: right only while they are the original's and frozen (`teacher.needs_teacher`).
    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (2015), eq. 1 and section 2.
    """

    metrics = ("kl", "cross_entropy")

    def __init__(self, model: Any, stage: DistillStage, device: torch.device, teacher: Any = None):
        self.teacher = teacher
        self.temperature = stage.temperature
        self.ce_weight = stage.ce_weight
        self.rows = chunk_rows(causal_lm(model).config.vocab_size, device.type == "cuda", distills=True)
        self.plain = self.temperature == 1 and is_plain_head(model)
        self.kind, self.reason = "chunked", "KL needs both distributions of a row"

    def __call__(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        original = self.teacher if self.teacher is not None else model
        with torch.no_grad(), original_form(original):
            taught = hidden_states(original, batch).flatten(0, 1)
        lm = causal_lm(original)
        module = lm.get_output_embeddings()
        device = taught.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else module.weight.dtype
        targets = batch["targets"].flatten()
        tau = self.temperature

        def teach(part: slice) -> torch.Tensor:
            return Head(lm.config, module.weight.to(dtype)).logits(taught[part].to(dtype))

        def loss_of(logits: torch.Tensor, part: slice) -> torch.Tensor:
            with torch.no_grad():
                log_p = torch.log_softmax(teach(part).float() / tau, -1)
            log_q = torch.log_softmax(logits / tau, -1)
            valid = (targets[part] >= 0).float()
            kl = tau * tau * ((log_p.exp() * (log_p - log_q)).sum(-1) * valid).sum()
            ce = F.cross_entropy(logits, targets[part], reduction="sum", ignore_index=IGNORE)
            return torch.stack(((1 - self.ce_weight) * kl + self.ce_weight * ce, kl, ce))

        hidden = hidden_states(model, batch).flatten(0, 1)
        if self.plain:
            return sum_over_rows(model, hidden, plain_distillation(targets, teach, self.ce_weight), self.rows)
        return sum_over_rows(model, hidden, by_autograd(loss_of), self.rows)


class Align:
    """L = mean over layers and rows of |A_fox(x_l) - A(x_l)|^2 / |A(x_l)|^2, x_l the original's own input to layer l.

    Norms are over a row's tokens and channels, and a row weighs as many units as it has targets, so the loss does not
    depend on which rows share a micro-batch or a device.

    One pass of the original runs through all layers; in each, the retrofitted block is run beside it on the same
    input. With teacher=None the original is the same module in mode "original": no second copy of anything.
    Source: the alignment stages of RADLADS (arXiv 2505.03005) and PaTH (arXiv 2505.16381); the division by the
    output's own power, so that all layers weigh the same, is ours.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, model: Any, stage: Stage, device: torch.device, teacher: Any = None):
        self.teacher = teacher
        self.kind, self.reason = "none", "align computes no logits"
        self.recomputed = recomputed_layers(stage.gradient_checkpointing, len(list(attentions(causal_lm(model)))))

    def __call__(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        lm = causal_lm(model)
        original = lm if self.teacher is None else self.teacher
        if self.teacher is not None:  # the layers' own forwards, in which FSDP2 would gather their weights, don't run
            for module in lm.modules():
                if isinstance(module, FSDPModule) and module is not lm:
                    module.unshard()
        students = [module for _, module in attentions(lm)]
        teachers = [module for _, module in attentions(original)]
        errors: list[torch.Tensor] = []
        shards = batch.get("shards")
        with contextlib.ExitStack() as hooks, torch.no_grad(), original_form(original):
            for index, (module, student) in enumerate(zip(teachers, students, strict=True)):
                beside = _beside(student, errors, index in self.recomputed, shards)
                hooks.enter_context(module.register_forward_hook(beside, with_kwargs=True))
            hidden_states(original, batch)
        # Summed like the other objectives' losses: one unit per target, so that packing does not change the weight.
        counts = (batch["targets"] >= 0).sum(1) if shards is None else shards.row_targets
        return torch.stack(errors).mean(0) @ counts.float(), errors[0].new_zeros(0)


def _beside(student: Any, errors: list[torch.Tensor], recomputed: bool, shards: Any = None) -> Any:
    """A forward hook that runs `student` in mode "fox" on the inputs its original just had.

    Where several processes share rows, each adds its part of a row's error, divided by the power of the whole row.
    """

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        wanted = output[0].float()
        power = wanted.square().sum((1, 2))
        power = (power if shards is None else shards.mesh.sum(power)).clamp_min(1e-20)

        def error() -> torch.Tensor:
            before, student.mode = student.mode, "fox"
            try:
                found = student.forward(*args, **kwargs)[0].float()
            finally:
                student.mode = before
            return (found - wanted).square().sum((1, 2)) / power

        with torch.enable_grad():
            errors.append(checkpoint(error, use_reentrant=False) if recomputed else error())  # type: ignore[arg-type]

    return hook


@contextlib.contextmanager
def original_form(model: Any) -> Iterator[None]:
    """The model as it was before its retrofit: attention mode "original", adapters off."""
    if not is_converted(causal_lm(model)):
        yield
        return
    with _adapters_off(model), attention_mode(causal_lm(model), "original"):
        yield


@contextlib.contextmanager
def _adapters_off(model: Any) -> Iterator[None]:
    """Turns adapters off. peft alone would make those trainable afterwards that a stage has frozen."""
    if not hasattr(model, "disable_adapter"):
        yield
        return
    before = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    try:
        with model.disable_adapter():
            yield
    finally:
        for name, now in model.named_parameters():  # others than before where FSDP2 gathered them in between
            then, trained = before[name]
            then.requires_grad_(trained)
            now.requires_grad_(trained)


def stage_objective(model: Any, stage: Stage, device: torch.device, teacher: Any = None) -> Any:
    """The objective of a stage, for a model on a device; `teacher`: the original, where it is a second model."""
    if isinstance(stage, DistillStage):
        return Distill(model, stage, device, teacher)
    if stage.objective == "align":
        return Align(model, stage, device, teacher)
    return Extend(model, stage, device)
