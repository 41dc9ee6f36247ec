"""One calibration run: layer after layer, the original's hidden states carried along with those of its conversions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from retrofox.calibration import capture
from retrofox.calibration.fit import Fit
from retrofox.calibration.half_life import LONGEST
from retrofox.calibration.source import LayerSource
from retrofox.calibration.state import State
from retrofox.calibration.student import Student, Window, best_constant_gates, divergence, half_lives, worse
from retrofox.fox_spec import FoxSpec
from retrofox.model.attention import FoxMixin
from retrofox.support.report import progress_bar

WINDOWS_AT_ONCE = 16
"""Windows whose queries and keys are in memory at one time; more than these are fitted in groups, one after another."""
SINGLE_LENGTH = 512
"""Tokens on which the loss with one layer alone converted is measured: two passes per layer through all later ones."""


class Run:
    """The layer-by-layer fit: hidden states of the original, and of the variants whose loss will be measured."""

    def __init__(
        self,
        source: LayerSource,
        fox: FoxSpec,
        tokens: torch.Tensor,
        held_out: int,
        steps: int,
        refit: bool,
        layer_losses: bool,
        seed: int,
    ):
        self.source, self.model, self.fox = source, source.model, fox
        self.tokens, self.held_out = tokens, held_out
        self.steps, self.refit, self.layer_losses, self.seed = steps, refit, layer_losses, seed
        self.num_layers = len(capture.decoder_layers(self.model))
        self.single_ids = tokens[-1:, :SINGLE_LENGTH]

    def all_layers(self, state: State, progress: bool) -> list[dict[str, Any]]:
        """Fits every layer that is not yet done; returns the measurements of all."""
        entering, calls = capture.enter(self.model, self.tokens)
        single_calls = capture.enter(self.model, self.single_ids)[1]
        number = state.finished()
        rows = [state.read_layer(done)[1] for done in range(number)]
        streams = self._read(state, number) if number else self._first_streams(entering)
        with progress_bar("layers", progress) as bar:
            task = bar.add_task("calibrating", total=self.num_layers, completed=number)
            for number in range(len(rows), self.num_layers):
                with self.source.layer(number) as layer:
                    tensors, row, streams = self._layer(number, layer, calls[number], single_calls[number], streams)
                state.write_inputs(number + 1, streams)
                state.write_layer(number, tensors, row)
                state.drop_inputs(number)
                rows.append(row)
                bar.update(
                    task, advance=1, description=f"calibrating (KL {row['kl_before']:.3f} -> {row['kl_after']:.3f})"
                )
        return rows

    def _read(self, state: State, number: int) -> dict[str, torch.Tensor]:
        return {name: value.to(self.model.device) for name, value in state.read_inputs(number).items()}

    def _first_streams(self, entering: torch.Tensor) -> dict[str, torch.Tensor]:
        held = entering[-self.held_out :]
        single = held[:0, :SINGLE_LENGTH].clone()
        return {"original": entering, "before": held, "after": held.clone(), "single": single}

    def _layer(
        self,
        number: int,
        layer: nn.Module,
        call: capture.LayerCall,
        single_call: capture.LayerCall,
        streams: dict[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
        started = time.perf_counter()
        attention: FoxMixin = layer.self_attn  # type: ignore[assignment]
        held, single = streams["original"][-1:, :SINGLE_LENGTH], streams["single"]
        if len(single):
            single = capture.through_original(layer, single, single_call)
        before = capture.through(layer, streams["before"], call)
        if self.layer_losses:
            single = torch.cat([single, capture.through(layer, held, single_call)])
        original, tensors, row = self._fit(number, layer, call, streams["original"])
        for name, value in tensors.items():
            put(attention, name, value)
        after = capture.through(layer, streams["after"], call)
        if self.layer_losses:
            single = torch.cat([single, capture.through(layer, held, single_call)])
        row["seconds"] = round(time.perf_counter() - started, 2)
        return tensors, row, {"original": original, "before": before, "after": after, "single": single}

    def _fit(
        self, number: int, layer: nn.Module, call: capture.LayerCall, entering: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """(output of the original's layer, the layer's new tensors by name below its attention, its measurements)"""
        attention: FoxMixin = layer.self_attn  # type: ignore[assignment]
        leaving = torch.empty_like(entering)
        count = len(entering) - self.held_out
        held = self._windows(layer, call, entering, leaving, slice(count, len(entering)))
        start = self._student(attention, held[0])
        before = divergence(held, start)
        student, fit = start.clone(), None
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        for first in range(0, count, WINDOWS_AT_ONCE):
            last = min(first + WINDOWS_AT_ONCE, count)
            windows = self._windows(layer, call, entering, leaving, slice(first, last))
            if fit is None:
                self._choose_constant_gates(windows[:1], student)
                fit = Fit(windows, student, self.steps, generator)
            fit.run(windows, self.steps * last // count - self.steps * first // count)
            del windows  # before the next are made
        assert fit is not None
        fit.finish()
        after = divergence(held, student)
        grew = worse(before, after)
        student.take(grew, start)
        after = torch.where(grew, before, after).mean(0)
        before = before.mean(0)
        row = {
            "layer": number,
            "kl_before": round(float(before.mean()), 5),
            "kl_after": round(float(after.mean()), 5),
            "kl_before_by_head": [round(x, 5) for x in before.tolist()],
            "kl_after_by_head": [round(x, 5) for x in after.tolist()],
            "half_life_before_by_head": _listed(half_lives(held, start)),
            "half_life_after_by_head": _listed(half_lives(held, student)),
            "heads_fitted": int((~grew).sum()),
        }
        return leaving, folded(attention, student), row

    def _choose_constant_gates(self, windows: list[Window], student: Student) -> None:
        """A better start than open or log-spaced gates, unless they were measured or trained before."""
        constant = student.bias is not None and (student.weight is None or not student.weight.any())
        if constant and self.fox.init != "calibrated":
            longest = float(LONGEST * self.tokens.shape[1])
            best_constant_gates(windows, student, list(np.geomspace(4.0, longest, 10)))

    def _windows(
        self, layer: nn.Module, call: capture.LayerCall, entering: torch.Tensor, leaving: torch.Tensor, part: slice
    ) -> list[Window]:
        """Some of the windows; writes the original layer's outputs for them into `leaving`."""
        leaving[part], captured = capture.run_original(layer, entering[part], call)
        return [self._window(layer.self_attn, *entry) for entry in captured]  # type: ignore[arg-type]

    def _window(self, attention: FoxMixin, original: capture.Operands, block: dict[str, Any]) -> Window:
        converted, finish = capture.converted_operands(attention, block), None
        if self.refit:
            finish = capture.query_finish(attention, converted, block)
            converted.query = converted.query.new_empty(0)  # made anew from the raw projections, at each step
        return Window(original, converted, finish, attention.sink_tokens, attention.log_n)

    def _student(self, attention: FoxMixin, window: Window) -> Student:
        gate, (heads, _, head_dim) = attention.forget_gate, window.original.query.shape
        weight = None if gate is None or gate.weight is None else gate.weight.detach().float().clone()
        return Student(
            bias=None if gate is None else gate.bias.detach().float().clone(),
            weight=weight,
            refit=torch.eye(head_dim, device=window.original.query.device).repeat(heads, 1, 1) if self.refit else None,
        )

    def summary(self, state: State, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """KL as a mean over layers, loss of the original and of the whole conversion before and after, held-out text;
        fills each row's loss_before and loss_after."""
        streams = self._read(state, self.num_layers)
        ids = self.tokens[-self.held_out :]
        losses = {
            "original": capture.losses_from(self.model, ids, streams["original"][-self.held_out :]),
            "before": capture.losses_from(self.model, ids, streams["before"]),
            "after": capture.losses_from(self.model, ids, streams["after"]),
        }
        single = None
        if self.layer_losses:
            single_ids = self.single_ids.expand(len(streams["single"]), -1)
            single = capture.losses_from(self.model, single_ids, streams["single"])
        for number, row in enumerate(rows):
            row["loss_before"] = None if single is None else round(float(single[2 * number].mean()), 4)
            row["loss_after"] = None if single is None else round(float(single[2 * number + 1].mean()), 4)
        return {
            "kl_before": round(float(np.mean([row["kl_before"] for row in rows])), 5),
            "kl_after": round(float(np.mean([row["kl_after"] for row in rows])), 5),
            "loss_original": round(float(losses["original"].mean()), 4),
            "loss_before": round(float(losses["before"].mean()), 4),
            "loss_after": round(float(losses["after"].mean()), 4),
            "loss_original_of_layer_rows": round(float(losses["original"][-1, : SINGLE_LENGTH - 1].mean()), 4),
        }


def _listed(half_lives: torch.Tensor | None) -> list[float] | None:
    return None if half_lives is None else [float(f"{value:.4g}") for value in half_lives.tolist()]


def folded(attention: FoxMixin, student: Student) -> dict[str, torch.Tensor]:
    """A student as tensors of the attention module: gate parameters, and the projection with the refit folded in."""
    tensors = {}
    if student.bias is not None:
        tensors["forget_gate.bias"] = student.bias
    if student.weight is not None:
        tensors["forget_gate.weight"] = student.weight
    if student.refit is not None:
        name = capture.query_projection(attention)
        assert name is not None
        linear = getattr(attention, name)
        for part in ("weight", "bias"):
            value = getattr(linear, part)
            if value is not None:
                tensors[f"{name}.{part}"] = fold(value.detach(), student.refit)
    return tensors


def fold(projection: torch.Tensor, refit: torch.Tensor) -> torch.Tensor:
    """A projection's weight (H D, hidden) or bias (H D,) with q' = q M folded in: per head M^T W; further rows (fused
    keys and values) stay. refit: (H, D, D). The product is taken in float64 and rounded to the projection's dtype."""
    heads, head_dim, _ = refit.shape
    rows = projection[: heads * head_dim].double().reshape(heads, head_dim, -1)
    folded = torch.bmm(refit.double().transpose(1, 2), rows).reshape(projection[: heads * head_dim].shape)
    return torch.cat([folded.to(projection.dtype), projection[heads * head_dim :]])


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Gives a module's parameter or buffer new content: gates by overwriting, anything shared by replacing."""
    *path, leaf = name.split(".")
    owner = module.get_submodule(".".join(path))
    old = getattr(owner, leaf)
    value = value.to(old.device, old.dtype)
    if path[-1] == "forget_gate":
        with torch.no_grad():
            old.copy_(value)
    else:
        setattr(owner, leaf, nn.Parameter(value.clone(), requires_grad=old.requires_grad))
