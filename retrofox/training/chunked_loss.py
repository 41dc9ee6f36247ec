"""The choice of a cross-entropy, and losses summed over rows of hidden states, a chunk of logits at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from retrofox.anatomy import causal_lm, logits_from_hidden
from retrofox.support.processes import shards_weights

ChunkLoss = Callable[..., tuple[torch.Tensor, Any]]
"""(head, hidden, rows, whether gradients are needed) -> (loss and metrics of these rows, (d hidden, dW) or ())."""


class Head:
    """The language-model head with a given weight, in place of a model for `logits_from_hidden`."""

    def __init__(self, config: Any, weight: torch.Tensor, linear: Any = F.linear):
        self.config, self.weight, self.linear = config, weight, linear

    def get_output_embeddings(self) -> Any:
        return self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_from_hidden(self, hidden)  # type: ignore[arg-type]


def is_plain_head(model: Any) -> bool:
    """Whether logits are W h: no bias, no scale, no cap (found by passing numbers through the family's rules)."""
    lm = causal_lm(model)
    probe = torch.tensor([-300.0, -0.5, 0.25, 40.0])
    through = Head(lm.config, torch.zeros(1), linear=lambda hidden, weight: hidden).logits(probe)
    return getattr(lm.get_output_embeddings(), "bias", None) is None and torch.equal(through, probe)


def choose_cross_entropy(requested: str, model: Any, device: torch.device) -> tuple[str, str]:
    """(name, reason) of the cross-entropy to run: ours, "chunked", or "liger"; ValueError names what liger's lacks."""
    lacks = (
        ("liger-kernel: pip install '.[liger]' in a clone", importlib.util.find_spec("liger_kernel") is None),
        ("a GPU", device.type != "cuda"),
        ("the head's whole weight, which sharding splits", shards_weights()),
        ("logits without scale, cap or bias, which this family has", not is_plain_head(model)),
    )
    lacking = [part for part, is_lacking in lacks if is_lacking]
    if requested == "liger" and lacking:
        raise ValueError(f"cross_entropy=liger needs {lacking[0]}; or use chunked")
    if requested == "chunked" or lacking:
        return "chunked", "requested" if requested == "chunked" else "auto: knows every family's logit rules"
    # 65536 tokens x 128256 words x 2048, bfloat16 on an H200 (commit 87b801e): liger 179 ms, 2.9 GB;
    # chunked 248 ms, 5.0 GB.
    return "liger", "requested" if requested == "liger" else "auto: 1.4x as fast as chunked on a GPU"


class SumOverRows(torch.autograd.Function):
    """Sum of a loss over rows of hidden states, gradients made chunk by chunk in the forward and kept for the backward.

    Memory: one chunk of logits, d hidden (N, d) and dW (V, d) float32. Three products with W instead of the four that
    recomputing logits in the backward costs.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Any, loss_of: Any, rows: int):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        total: Any = 0.0
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, min(start + rows, hidden.shape[0]))
            stats, grads = loss_of(head, hidden[part].detach(), part, need_hidden or need_weight)
            total = total + stats
            if d_hidden is not None:
                d_hidden[part] = grads[0]
            if d_weight is not None:
                d_weight += grads[1]
        ctx.grads = (d_hidden, d_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        metrics = total[1:].clone()
        ctx.mark_non_differentiable(metrics)
        return total[0].clone(), metrics

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor):  # type: ignore[override]
        if ctx.grads is None:
            raise RuntimeError("the chunked loss has no second backward: its first one gives its gradients away")
        # In place, and let go of: d hidden and dW would lie beside their copies until the whole backward is over.
        grads, ctx.grads = ctx.grads, None
        grads = [
            None if grad is None else grad.mul_(upstream[0]).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None)


def plain_cross_entropy(targets: torch.Tensor) -> ChunkLoss:
    """Cross-entropy of a plain head by hand: softmax turns into its own gradient inside the logits' memory."""

    def loss_of(head: Head, hidden: torch.Tensor, part: slice, need: bool) -> tuple[torch.Tensor, Any]:
        valid = targets[part] >= 0
        index = targets[part].clamp_min(0)[:, None]
        logits = hidden.to(head.weight.dtype) @ head.weight.T
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
        loss = -(log_p.gather(1, index)[:, 0] * valid).sum()
        if not need:
            return loss[None], ()
        d_logits = torch.exp(log_p, out=logits)
        d_logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=d_logits.dtype))
        mask = valid[:, None].to(d_logits.dtype)
        d_hidden = (d_logits @ head.weight) * mask
        return loss[None], (d_hidden, d_logits.T @ (hidden.to(d_logits.dtype) * mask))

    return loss_of


def plain_distillation(targets: torch.Tensor, teach: Callable[[slice], torch.Tensor], a: float) -> ChunkLoss:
    """(1 - a) KL(p || q) + a CE of a plain head by hand, p the teacher's softmax; metrics KL and CE.

    The gradient with respect to the logits is q - (1 - a) p - a onehot(target): no graph over the vocabulary.
    """

    def loss_of(head: Head, hidden: torch.Tensor, part: slice, need: bool) -> tuple[torch.Tensor, Any]:
        valid = (targets[part] >= 0)[:, None]
        index = targets[part].clamp_min(0)[:, None]
        log_q = torch.log_softmax(hidden.to(head.weight.dtype) @ head.weight.T, -1, dtype=torch.float32)
        log_p = torch.log_softmax(teach(part), -1, dtype=torch.float32)
        cross_entropy = -(log_q.gather(1, index) * valid).sum()
        p = log_p.exp()
        kl = (torch.linalg.vecdot(p, log_p.sub_(log_q)) * valid[:, 0]).sum()
        stats = torch.stack(((1 - a) * kl + a * cross_entropy, kl, cross_entropy))
        if not need:
            return stats, ()
        d_logits = log_q.exp_().sub_(p, alpha=1 - a)
        if a:
            d_logits.scatter_add_(1, index, torch.full_like(index, -a, dtype=d_logits.dtype))
        d_logits = d_logits.to(head.weight.dtype).mul_(valid)
        return stats, (d_logits @ head.weight, d_logits.T @ hidden.to(d_logits.dtype))

    return loss_of


def by_autograd(rows_loss: Callable[[torch.Tensor, slice], torch.Tensor]) -> ChunkLoss:
    """Any loss of logits, through one chunk's graph: `rows_loss(logits, rows)` gives (1 + metrics,), [0] the loss."""

    def loss_of(head: Head, hidden: torch.Tensor, part: slice, need: bool) -> tuple[torch.Tensor, Any]:
        if not need:
            return rows_loss(head.logits(hidden).float(), part), ()
        with torch.enable_grad():
            leaves = [hidden.requires_grad_(), head.weight.detach().requires_grad_()]
            stats = rows_loss(Head(head.config, leaves[1]).logits(leaves[0]).float(), part)
            grads = torch.autograd.grad(stats[0], leaves)
        return stats.detach(), grads

    return loss_of


def sum_over_rows(model: Any, hidden: torch.Tensor, loss_of: ChunkLoss, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss summed over rows, metrics summed over rows) of the head's logits on hidden states (N, hidden_size).

    The head module itself is called once, with our forward in place of its own, so that the hooks by which FSDP and
    ZeRO gather its weight run as for any forward.
    """
    lm = causal_lm(model)
    module = lm.get_output_embeddings()
    if not isinstance(module, nn.Linear) or module.bias is not None:
        raise ValueError(f"the language-model head, {module}, is no plain linear layer: no adapters on it, no bias")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else module.weight.dtype

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device, enabled=False):
            head = Head(lm.config, module.weight.detach().to(dtype))
            return SumOverRows.apply(hidden, module.weight, head, loss_of, rows)  # type: ignore[return-value]

    before = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[assignment]
    try:
        return module(hidden)
    finally:
        del module.forward
        if before is not None:
            module.forward = before
