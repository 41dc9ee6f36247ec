"""Fitting one layer's gates and queries so that the converted attention looks where the original's did."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from retrofox.calibrate_capture import Finish, Operands
from retrofox.model.configuration_fox import bias_from_half_life

BLOCK = 128
"""Consecutive queries in one block of scores: (H, 128, keys) float32 exist at one time, never (H, T, T)."""
LEARNING_RATE = {"bias": 0.06, "weight": 0.003, "refit": 0.01}
"""Adam's; per parameter, since a bias is counted in logits and a refit starts from the identity."""


@dataclass
class Student:
    """The parameters of one layer's calibration; heads don't interact, so every head is a fit of its own.

    bias (H,), weight (H, hidden) or None (a gate of biases alone), refit (H, D, D) or None: q' = q M in row vectors,
    applied before norm and rotation. bias is None where there is no gate.
    """

    bias: torch.Tensor | None
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
    """One calibration window of one layer: the original's operands, and what the converted attention starts from."""

    original: Operands
    converted: Operands
    finish: Finish | None
    sink_tokens: int
    log_n: int | None

    @property
    def length(self) -> int:
        return self.original.query.shape[1]


def scores(query: torch.Tensor, key: torch.Tensor, operands: Operands, start: int) -> torch.Tensor:
    """Logits (H, n, stop) of queries start..stop-1 over keys 0..stop-1, capped, not masked."""
    heads, rows, head_dim = query.shape
    groups = heads // key.shape[0]
    stop = start + rows
    grouped = query.reshape(key.shape[0], groups * rows, head_dim) * operands.scaling
    logits = (grouped @ key[:, :stop].transpose(1, 2)).view(heads, rows, stop)
    if operands.softcap is not None:
        logits = operands.softcap * torch.tanh(logits / operands.softcap)
    return logits


def hidden_keys(start: int, stop: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(n, stop) bool: keys a query may not see."""
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    return (distance < 0) if window is None else (distance < 0) | (distance >= window)


def student_scores(window: Window, student: Student, start: int, stop: int) -> torch.Tensor:
    """Logits of the converted attention under the student's gates and refit, not masked."""
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
    logits = scores(query, converted.key, converted, start)
    if student.bias is None:
        return logits
    gate = student.bias[:, None]
    gate = gate.expand(-1, stop) if student.weight is None else gate + student.weight @ converted.inputs[:stop].T
    cum_log_f = F.logsigmoid(gate).double().cumsum(1)
    decay = (cum_log_f[:, start:, None] - cum_log_f[:, None, :]).float()
    sink = window.sink_tokens if converted.window is None else 0  # as in the attention function
    if sink:
        decay = F.pad(decay[..., sink:], (min(sink, stop), 0))
    return logits + decay


def original_scores(window: Window, start: int, stop: int) -> torch.Tensor:
    original = window.original
    return scores(original.query[:, start:stop], original.key, original, start)


def blocks(length: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of queries of a window."""
    return [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


@torch.no_grad()
def divergence(windows: list[Window], student: Student) -> torch.Tensor:
    """KL(original's attention || student's) per head in nats, mean over all queries of the windows; (H,) float64."""
    total: torch.Tensor | None = None
    for window in windows:
        for start, stop in blocks(window.length):
            hidden = hidden_keys(start, stop, window.original.window, window.original.key.device)
            log_p = original_scores(window, start, stop).masked_fill_(hidden, -math.inf).log_softmax(-1)
            log_q = student_scores(window, student, start, stop).masked_fill_(hidden, -math.inf).log_softmax(-1)
            kl = (log_p.exp() * (log_p - log_q).masked_fill_(hidden, 0.0)).sum((1, 2), dtype=torch.float64)
            total = kl if total is None else total + kl
    assert total is not None
    return total / sum(window.length for window in windows)


@torch.no_grad()
def best_constant_gates(windows: list[Window], student: Student, half_lives: list[float]) -> None:
    """Sets each head's bias to the half-life, of those given, whose KL is least; for gates whose weight is zero.

    KL = const + lse(s + decay) - sum_j p_j decay_j, and decay is a multiple of the distance, so the scores are computed
    once for all half-lives.
    """
    assert student.bias is not None
    slopes = math.log(2.0) / torch.tensor(half_lives, device=student.bias.device)
    total = torch.zeros(len(half_lives), len(student.bias), dtype=torch.float64, device=student.bias.device)
    plain = Student(bias=None)
    for window in windows:
        sink = window.sink_tokens if window.converted.window is None else 0
        for start, stop in blocks(window.length):
            hidden = hidden_keys(start, stop, window.original.window, student.bias.device)
            weights = original_scores(window, start, stop).masked_fill_(hidden, -math.inf).softmax(-1)
            logits = student_scores(window, plain, start, stop).masked_fill_(hidden, -math.inf)
            rows, keys = (torch.arange(a, stop, device=student.bias.device) for a in (start, 0))
            distance = (rows[:, None] - keys).masked_fill(hidden | (keys < sink), 0).float()
            expected = (weights * distance).sum((1, 2), dtype=torch.float64)
            for number, slope in enumerate(slopes):
                lse = torch.logsumexp(logits - slope * distance, -1)
                total[number] += lse.sum(1, dtype=torch.float64) + slope * expected
    best = [bias_from_half_life(half_lives[i]) for i in total.argmin(0).tolist()]
    student.bias.copy_(torch.tensor(best))


def fit(windows: list[Window], student: Student, steps: int, generator: torch.Generator) -> None:
    """Adam on KL(original's attention || student's), a block of queries from each of two windows per step, in place.

    The gradient of KL with respect to the student's logits is softmax(student) - softmax(original), so the softmax
    needs no autograd. Learning rates fall to zero along a half cosine.
    """
    for _, value in student.parameters():
        value.requires_grad_()
    groups = [{"params": [value], "lr": LEARNING_RATE[name]} for name, value in student.parameters()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / max(1, steps))))
    for work in _order(windows, 2 * steps, generator):
        optimizer.zero_grad()
        for window, start, stop in work:
            _accumulate(window, student, start, stop)
        optimizer.step()
        schedule.step()
    for _, value in student.parameters():
        value.requires_grad_(False)


def _order(windows: list[Window], count: int, generator: torch.Generator) -> Iterator[list[tuple[Window, int, int]]]:
    """Pairs of blocks in random order, every block once before any comes again."""
    everything = [(window, *block) for window in windows for block in blocks(window.length)]
    queue: list[int] = []
    for _ in range(count // 2):
        while len(queue) < 2:
            queue += torch.randperm(len(everything), generator=generator).tolist()
        yield [everything[queue.pop(0)], everything[queue.pop(0)]]


def _accumulate(window: Window, student: Student, start: int, stop: int) -> None:
    hidden = hidden_keys(start, stop, window.original.window, window.original.key.device)
    with torch.no_grad():
        target = original_scores(window, start, stop).masked_fill_(hidden, -math.inf).softmax(-1)
    logits = student_scores(window, student, start, stop)
    with torch.no_grad():
        gradient = logits.detach().masked_fill(hidden, -math.inf).softmax(-1).sub_(target).div_(stop - start)
    logits.backward(gradient)
