"""Fitting one layer's gates and queries so that the converted attention looks where the original's did."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from retrofox.calibration.student import (
    Student,
    Window,
    add_decay,
    blocks,
    hidden_keys,
    scores,
    student_cum_log_f,
    student_queries,
)

BLOCKS_PER_STEP = 2
LEARNING_RATE = {"bias": 0.06, "weight": 0.003, "refit": 0.015}
"""Adam's; per parameter, since a bias is counted in logits and a refit in whitened coordinates starts from zero."""
OUTPUT_WEIGHT = 2.0
"""Of the heads' output errors beside their KL, in mean squares of the values: KL alone weighs all keys alike.

SmolLM2-135M, loss over the base on held-out text. Half of the pairs, chosen by layer, one sink: 0.0093 with 2, 0.0105
with 8, 0.0140 with 32. The fastest 8 pairs, no sinks: 0.309 with 0, 0.292 with 4, 0.288 with 16.
"""
FLOOR = 0.2
"""Added to the eigenvalues of a head's queries, mean 1, before the root: directions they hardly use stay slow."""


class Fit:
    """Adam on KL(original's attention || student's) and the heads' output errors, BLOCKS_PER_STEP blocks per step.

    Learning rates fall to zero along a half cosine over all steps; the windows may come in groups, of which only one
    is in memory at a time. The refit is sought in whitened coordinates.
    """

    def __init__(self, windows: list[Window], student: Student, steps: int, generator: torch.Generator):
        """windows: the first group, whose queries the whitening is of. The student is changed in place by `run`."""
        self.student, self.generator, self.scratch = student, generator, Scratch()
        for _, value in student.parameters():
            value.requires_grad_()
        sought = dict(student.parameters())
        self.whitened = None if student.refit is None else _Whitened(student.refit, windows)
        if self.whitened is not None:
            sought["refit"] = self.whitened.place
        groups = [{"params": [value], "lr": LEARNING_RATE[name]} for name, value in sought.items()]
        self.optimizer = torch.optim.Adam(groups, betas=(0.8, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))
        )

    def run(self, windows: list[Window], steps: int) -> None:
        """The next `steps` steps, on these windows."""
        for work in _order(windows, steps, self.generator):
            for _, value in self.student.parameters():
                value.grad = None
            for window, start, stop in work:
                accumulate(window, self.student, start, stop, self.scratch)
            if self.whitened is not None:
                self.whitened.take_gradient()
            self.optimizer.step()
            self.schedule.step()
            if self.whitened is not None:
                self.whitened.give_value()

    def finish(self) -> None:
        """Ends the fit: the student's parameters take no more gradients."""
        for _, value in self.student.parameters():
            value.requires_grad_(False)


class _Whitened:
    """A refit as M = M_0 + C^(-1/2) A, C (H, D, D) the second moment of each head's projected queries.

    C's eigenvalues differ widely: a step in M changes the logits along directions of large queries only, a step in A
    along all. C is scaled to a mean eigenvalue of 1. 200 steps in A reach what
    400 to 600 in M do (SmolLM2-135M, 8 rotary pairs).
    """

    def __init__(self, refit: torch.Tensor, windows: list[Window]):
        moment = torch.zeros_like(refit, requires_grad=False)
        for window in windows:
            queries = window.converted.raw_queries
            assert queries is not None
            moment += queries.transpose(1, 2) @ queries
        values, vectors = torch.linalg.eigh(moment.double())
        values = values.clamp_min(0.0)
        scale = (values / values.mean(-1, keepdim=True).clamp_min(1e-30) + FLOOR).rsqrt()
        self.root = (vectors @ torch.diag_embed(scale) @ vectors.transpose(1, 2)).to(refit.dtype)
        self.refit, self.start = refit, refit.detach().clone()
        self.place = torch.zeros_like(self.start)

    def take_gradient(self) -> None:
        assert self.refit.grad is not None
        self.place.grad = self.root @ self.refit.grad

    def give_value(self) -> None:
        with torch.no_grad():
            self.refit.copy_(self.start + self.root @ self.place)


def _order(windows: list[Window], steps: int, generator: torch.Generator) -> Iterator[list[tuple[Window, int, int]]]:
    """Blocks in random order, every one once before any comes again."""
    everything = [(window, *block) for window in windows for block in blocks(window.length)]
    queue: list[int] = []
    for _ in range(steps):
        while len(queue) < BLOCKS_PER_STEP:
            queue += torch.randperm(len(everything), generator=generator).tolist()
        yield [everything[queue.pop(0)] for _ in range(BLOCKS_PER_STEP)]


class Scratch:
    """Memory for blocks of scores, used again and again: fresh pages for each cost more than the arithmetic."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, number: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Buffer `number`, of this shape, its content arbitrary."""
        size = math.prod(shape)
        while len(self._buffers) <= number:
            self._buffers.append(like.new_empty(0))
        if self._buffers[number].numel() < size:
            self._buffers[number] = like.new_empty(size)
        return self._buffers[number][:size].view(shape)


def accumulate(window: Window, student: Student, start: int, stop: int, scratch: Scratch) -> None:
    """Adds to the student's parameters the gradient of mean_i (KL(P_i || Q_i) + w |(Q_i - P_i) V|^2) over a block.

    P is the original's attention, Q the student's, V the original's values, w OUTPUT_WEIGHT over their mean square.
    With t = 2 w (Q - P) V V^T, row by row, the gradient by the logits is Q - P + Q (t - sum_j Q_j t_j), so neither
    softmax needs autograd; from it follow the queries' gradient, ds K, and that of c: row sums minus column sums over
    decayed keys.
    """
    original, converted = window.original, window.converted
    shape = (original.query.shape[0], stop - start, stop)
    buffers = [scratch.take(number, shape, original.query) for number in range(3)]
    with torch.no_grad():
        hidden = hidden_keys(start, stop, original.window, original.key.device)
        target = scores(original.query[:, start:stop], original.key, original, start, buffers[0])
        target = torch.softmax(target.masked_fill_(hidden, -math.inf), -1, out=buffers[2])
    query, cum_log_f = student_queries(window, student, start, stop), student_cum_log_f(window, student, stop)
    with torch.no_grad():
        logits = scores(query.detach(), converted.key, converted, start, buffers[0])
        slope = None if converted.softcap is None else 1 - (logits / converted.softcap).square()
        if cum_log_f is not None:
            logits = add_decay(logits, cum_log_f.detach(), window.exempt, start)
        found = torch.softmax(logits.masked_fill_(hidden, -math.inf), -1, out=buffers[1])
        by_logit = torch.sub(found, target, out=buffers[2])
        add_output_gradient(by_logit, found, original.value[:, :stop], buffers[0])
        by_logit.div_(stop - start)
        grown: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        if cum_log_f is not None:
            by_decay = -by_logit.sum(1, dtype=torch.float64)
            by_decay[:, : window.exempt] = 0.0
            by_decay[:, start:] -= by_logit[..., : window.exempt].sum(-1)
            grown, gradients = [cum_log_f], [by_decay]
        if query.requires_grad:
            by_score = by_logit if slope is None else by_logit.mul_(slope)
            key = converted.key[:, :stop]
            grown.append(query)
            gradients.append((by_score.view(key.shape[0], -1, stop) @ key).view(query.shape) * converted.scaling)
    torch.autograd.backward(grown, gradients)


def add_output_gradient(error: torch.Tensor, found: torch.Tensor, value: torch.Tensor, scratch: torch.Tensor) -> None:
    """Adds to error (H, n, stop), Q - P, the gradient of w |(Q - P) V|^2 by the logits of Q, `found`, in place.

    value: (Hkv, stop, D); scratch: as error, its content arbitrary.
    """
    groups = (value.shape[0], -1, value.shape[1])
    weight = 2 * OUTPUT_WEIGHT / value.square().sum(-1).mean(-1).clamp_min(1e-30)
    output = torch.bmm(error.view(groups), value) * weight[:, None, None]
    torch.bmm(output, value.transpose(1, 2), out=scratch.view(output.shape[0], output.shape[1], -1))
    scratch.mul_(found)
    error.add_(scratch).addcmul_(found, scratch.sum(-1, keepdim=True), value=-1)
