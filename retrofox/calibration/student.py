"""One layer's gates and refit under calibration: the scores they give, how far these are from the original's."""

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

    One unusual window would decide a mean of the divergences: one with two attention sinks, of which one is exempt,
    has ten times the divergence of the others.
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
