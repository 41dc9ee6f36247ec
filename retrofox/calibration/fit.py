"""Fitting one layer's gates and queries so that the converted attention looks where the original's did."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from retrofox.calibration.capture import Finish, Operands
from retrofox.model.configuration_fox import bias_from_half_life

BLOCK = 128
"""Consecutive queries in one block of scores: (H, 128, keys) float32 exist at one time, never (H, T, T)."""
BLOCKS_PER_STEP = 2
LEARNING_RATE = {"bias": 0.06, "weight": 0.003, "refit": 0.015}
"""Adam's; per parameter, since a bias is counted in logits and a refit in whitened coordinates starts from zero."""
OUTPUT_WEIGHT = 8.0
"""Of the heads' output errors beside their KL, in mean squares of the values: KL alone takes all keys for alike.

SmolLM2-135M, 8 rotary pairs, no sinks: loss over the base on unseen books 0.309 with 0, 0.292 with 4, 0.288 with 16.
"""
FLOOR = 0.2
"""Added to the eigenvalues of a head's queries, mean 1, before the root: directions they hardly use stay slow."""


@dataclass
class Student:
    """The parameters of one layer's calibration; heads don't interact, so every head is a fit of its own.

    bias (H,), weight (H, hidden) or None (a gate of biases alone), refit (H, D, D) or None: q' = q M in row vectors,
    applied before norm and rotation. bias is None where there is no gate.
    """

    bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    refit: torch.Tensor | None = None

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("bias", "weight", "refit"):
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def clone(self) -> Student:
        return Student(**{name: value.detach().clone() for name, value in self.parameters()})

    def take(self, better: torch.Tensor, other: Student) -> None:
        """Takes the heads marked in `better` (H,) bool from another student."""
        for name, value in self.parameters():
            value[better] = getattr(other, name)[better]


@dataclass
class Window:
    """One calibration window of one layer: the original's operands, and the converted attention's first ones."""

    original: Operands
    converted: Operands
    finish: Finish | None
    sink_tokens: int
    log_n: int | None

    @property
    def length(self) -> int:
        return self.original.query.shape[1]

    @property
    def exempt(self) -> int:
        """First keys without decay: none in a windowed layer, as in the attention function."""
        return self.sink_tokens if self.converted.window is None else 0


def scores(
    query: torch.Tensor, key: torch.Tensor, operands: Operands, start: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits (H, n, stop) of queries start..stop-1 over keys 0..stop-1, capped, not masked; into `out` if given."""
    heads, rows, head_dim = query.shape
    groups = heads // key.shape[0]
    stop = start + rows
    grouped = (query * operands.scaling).reshape(key.shape[0], groups * rows, head_dim)
    place = None if out is None else out.view(key.shape[0], groups * rows, stop)
    logits = torch.bmm(grouped, key[:, :stop].transpose(1, 2), out=place).view(heads, rows, stop)
    if operands.softcap is not None:
        logits = logits.div_(operands.softcap).tanh_().mul_(operands.softcap)
    return logits


def hidden_keys(start: int, stop: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(n, stop) bool: keys a query may not see."""
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    return (distance < 0) if window is None else (distance < 0) | (distance >= window)


def student_queries(window: Window, student: Student, start: int, stop: int) -> torch.Tensor:
    """(H, n, D) queries of positions start..stop-1 as the converted attention has them, the refit applied."""
    converted = window.converted
    if student.refit is None:
        query = converted.query[:, start:stop]
    else:
        assert converted.raw_queries is not None
        assert window.finish is not None
        query = window.finish(torch.bmm(converted.raw_queries[:, start:stop], student.refit), start, stop)
    if window.log_n is not None:
        factor = torch.log(torch.arange(start, stop, device=query.device) + 1.0) / math.log(window.log_n)
        query = query * factor.clamp_min(1.0)[:, None]
    return query


def student_cum_log_f(window: Window, student: Student, stop: int) -> torch.Tensor | None:
    """c (H, stop) float64, the running sum of log f under the student's gates; None without gates."""
    if student.bias is None:
        return None
    gate = student.bias[:, None]
    if student.weight is None:
        gate = gate.expand(-1, stop)
    else:
        gate = gate + student.weight @ window.converted.inputs[:stop].T
    return F.logsigmoid(gate).double().cumsum(1)


def add_decay(logits: torch.Tensor, cum_log_f: torch.Tensor, exempt: int, start: int) -> torch.Tensor:
    """Adds c_i - c_j to logits (H, n, stop), in place, up to a constant per row that the softmax takes out.

    The constant is c_i - c_start, so decayed keys get c_start - c_j and exempt ones -(c_i - c_start): a sum over keys
    and one over the few sinks instead of one over both.
    """
    relative = (cum_log_f - cum_log_f[:, start : start + 1]).float()
    if exempt:
        logits[..., :exempt] -= relative[:, start:, None]
    logits[..., exempt:] -= relative[:, None, exempt:]
    return logits


def student_scores(window: Window, student: Student, start: int, stop: int) -> torch.Tensor:
    """Logits of the converted attention under the student's gates and refit, not masked, up to a constant per row."""
    logits = scores(student_queries(window, student, start, stop), window.converted.key, window.converted, start)
    cum_log_f = student_cum_log_f(window, student, stop)
    return logits if cum_log_f is None else add_decay(logits, cum_log_f, window.exempt, start)


def original_scores(window: Window, start: int, stop: int) -> torch.Tensor:
    """Logits (H, n, stop) of the original's attention, capped, not masked."""
    original = window.original
    return scores(original.query[:, start:stop], original.key, original, start)


def blocks(length: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of queries of a window."""
    return [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


@torch.no_grad()
def divergence(windows: list[Window], student: Student) -> torch.Tensor:
    """KL(original's attention || student's) per window and head in nats, mean over queries; (windows, H) float64."""
    rows = []
    for window in windows:
        total = []
        for start, stop in blocks(window.length):
            hidden = hidden_keys(start, stop, window.original.window, window.original.key.device)
            log_p = original_scores(window, start, stop).masked_fill_(hidden, -math.inf).log_softmax(-1)
            log_q = student_scores(window, student, start, stop).masked_fill_(hidden, -math.inf).log_softmax(-1)
            total.append((log_p.exp() * (log_p - log_q).masked_fill_(hidden, 0.0)).sum((1, 2), dtype=torch.float64))
        rows.append(torch.stack(total).sum(0) / window.length)
    return torch.stack(rows)


def worse(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Heads (H,) bool whose divergence (windows, H) grew, by the mean of the windows' log ratios.

    A mean of the divergences would be that of the one window unlike all others: with two attention sinks, of which one
    is exempt, it has ten times the divergence of the rest.
    """
    return (after.clamp_min(1e-12) / before.clamp_min(1e-12)).log().mean(0) > 0


@torch.no_grad()
def half_lives(windows: list[Window], student: Student) -> torch.Tensor | None:
    """Half-life per head in tokens, ln 2 / mean(-log f) over all tokens of the windows; (H,) float64, None ungated."""
    decay = []
    for window in windows:
        cum_log_f = student_cum_log_f(window, student, window.length)
        if cum_log_f is None:
            return None
        decay.append(-cum_log_f[:, -1] / window.length)
    return math.log(2.0) / torch.stack(decay).mean(0).clamp_min(1e-30)


@torch.no_grad()
def best_constant_gates(windows: list[Window], student: Student, half_lives: list[float]) -> None:
    """Sets each head's bias to the half-life, of those given, whose KL is least; for gates whose weight is zero.

    KL = const + lse(s + decay) - sum_j p_j decay_j, and decay is a multiple of the distance, so the scores are computed
    once for all half-lives; every other block of queries, the last one first, is enough to choose.
    """
    assert student.bias is not None
    slopes = math.log(2.0) / torch.tensor(half_lives, device=student.bias.device)
    total = torch.zeros(len(half_lives), len(student.bias), dtype=torch.float64, device=student.bias.device)
    plain = Student(bias=None, refit=student.refit)
    for window in windows:
        for start, stop in blocks(window.length)[::-2]:
            hidden = hidden_keys(start, stop, window.original.window, student.bias.device)
            weights = original_scores(window, start, stop).masked_fill_(hidden, -math.inf).softmax(-1)
            logits = student_scores(window, plain, start, stop).masked_fill_(hidden, -math.inf)
            rows, keys = (torch.arange(a, stop, device=student.bias.device) for a in (start, 0))
            distance = (rows[:, None] - keys).masked_fill(hidden | (keys < window.exempt), 0).float()
            expected = (weights * distance).sum((1, 2), dtype=torch.float64)
            for number, slope in enumerate(slopes):
                lse = torch.logsumexp(logits - slope * distance, -1)
                total[number] += lse.sum(1, dtype=torch.float64) + slope * expected
    best = [bias_from_half_life(half_lives[i]) for i in total.argmin(0).tolist()]
    student.bias.copy_(torch.tensor(best))


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
        """Leaves the student as plain numbers."""
        for _, value in self.student.parameters():
            value.requires_grad_(False)


class _Whitened:
    """A refit as M = M_0 + C^(-1/2) A, C (H, D, D) the second moment of each head's projected queries.

    Those are far from round: a step in M moves the logits by directions of large queries only, in A by all alike. C is
    scaled to a mean eigenvalue of 1. 200 steps in A reach what 400 to 600 in M do (SmolLM2-135M, 8 rotary pairs).
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
