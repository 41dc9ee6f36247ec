"""`retrofox inspect`: the forget gates of a converted model, head by head."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retrofox.anatomy import attentions, exempt_tokens, sliding_window
from retrofox.data.sources import listed
from retrofox.data.windows import Window, choose_windows
from retrofox.evaluation.gates_report import print_gates, print_live_share, write_files
from retrofox.evaluation.live_share import LENGTHS, LiveShares, hear_gates
from retrofox.evaluation.needle_heads import measure_needle_heads, open_heads_sentence
from retrofox.half_lives import DEAD_DECAY
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.source import holds_converted
from retrofox.support.counts import require_at_least
from retrofox.support.report import check_folder, environment, output_console, write_results

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SATURATED_LOGIT = math.log(1e6)
"""Beyond it f (1 - f) < 1e-6, so training hardly moves the gate: a half-life over 690k tokens, or f = 0."""


def inspect(
    model: str | os.PathLike | PreTrainedModel,
    data: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    length: int = 2048,
    out: str | os.PathLike | None = None,
    *,
    horizon: float | None = None,
    max_documents: int | None = 8,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    text_field: str = "text",
    tokenizer: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Half-life of every head, ln 2 / mean(-log f) in tokens, from the parameters alone or measured over a text.

    From the parameters: log f = logsigmoid(bias), what the gate does on average if its weight adds nothing. Measured:
    the mean over all tokens of the text.

    A head is global if its half-life is at least the length the model was trained to, local if under 1/16 of it. Dead:
    it decays by less than 1e-4 nats over `length` tokens, so it never forgets. Saturated: at 99 % of the tokens the
    gate's slope f (1 - f) is under 1e-6.

    With data, the live share too (`live_share`): what attention and the cache keep at a horizon of e^-t, at 8k, 32k,
    128k and `length` tokens as far as the text reaches, and the heads that stay open. Why they do, each head's
    attention to facts planted in the texts tells: a head that looks facts up has to see far.

    Prints tables; into `out` go gates.json, gates.csv, half_lives.png and .svg.

    Args:
        model: directory, Hub id, adapter directory or a live model; converted.
        data: files to measure over; None = parameters alone.
        length: tokens read of each document.
        horizon: t in nats; None = the model's own, else 16.
        max_documents: documents read; None = all.

    Returns:
        {"heads": [...], "layers": [...], "summary": {...}, ...}; a half-life too long for a number is None. With data,
        "live_share": as `measure_live_share` returns it, and of each head "needle_attention", a share.

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: the model is not converted, or there is no text in the data.
    """
    require_at_least(2, length=length)
    require_at_least(1, max_documents=max_documents)
    if horizon is not None and not data:
        raise ValueError("a horizon is measured on a text: give data (--data)")
    if horizon is not None and not 0 < horizon < math.inf:
        raise ValueError(f"horizon must be a positive number of nats, such as 16; got {horizon}")
    check_folder(out)
    if isinstance(model, (str, os.PathLike)) and not holds_converted(os.fspath(model)):
        raise _no_gates(os.fspath(model))  # before gigabytes are loaded
    opened = open_model(model, tokenizer=tokenizer, reads_text=bool(data), dtype=dtype, device=device)
    if opened.fox is None:
        raise _no_gates(opened.source)
    measured: dict[int, _Measured] = {}
    windows: list[Window] = []
    trained, layers = int(opened.model.config.max_position_embeddings), _layers(opened)
    live: LiveShares | None = None
    if data:
        windows = choose_windows(data, opened.tokenizer, length, max_documents=max_documents, text_field=text_field)
    tokens, longest = (of(len(w.token_ids) for w in windows) if windows else 0 for of in (sum, max))
    if windows and any(layer["gate"] is not None for layer in layers):
        live = LiveShares(opened, longest, horizon, [*(n for n in LENGTHS if n < longest), longest])
        for log_f in hear_gates(opened, windows, progress):
            for layer, own in log_f.items():
                measured.setdefault(layer, _Measured()).add(own)
            live.add(log_f)
    heads = [head for layer in layers for head in _heads(layer, measured.get(layer["layer"]), length, trained)]
    _require_finite(heads, opened.source)
    result: dict[str, Any] = {
        "model": opened.source,
        "fox": opened.fox,
        "trained_length": trained,
        "length": length,
        "data": listed(data),
        "documents": len(windows),
        "tokens": tokens,
        "heads": heads,
        "layers": [{key: value for key, value in layer.items() if key != "gate"} for layer in layers],
        "summary": _summary(heads),
        "environment": environment(),
        "files": {},
    }
    console = output_console()
    print_gates(result, console)
    if live is not None:
        result["live_share"] = live.result()
        scores = measure_needle_heads(opened, windows)
        for head in heads:
            head["needle_attention"] = None if scores is None else scores[head["layer"]][head["head"]]
        print_live_share(result["live_share"], console)
        console.print(open_heads_sentence(result["live_share"], heads), highlight=False, soft_wrap=True)
    if out is not None:
        result["files"] = write_files(result, Path(out))
        write_results(result, Path(out) / "gates.json", console)
    return result


def _no_gates(source: str) -> ValueError:
    return ValueError(f"{source} has no forget gates to inspect: run `retrofox convert {source} OUT`")


class _Measured:
    """Sums over tokens of one layer's gates, (H,) float64: -log f, and how often the slope is as good as 0."""

    def __init__(self) -> None:
        self.tokens, self.decay, self.flat = 0, torch.zeros(()).double(), torch.zeros(()).double()

    def add(self, log_f: torch.Tensor) -> None:
        """Counts a text, (T, H)."""
        decay = -log_f.double()
        open_below, shut_beyond = (math.log1p(math.exp(sign * SATURATED_LOGIT)) for sign in (-1, 1))
        self.tokens += len(decay)
        self.decay = self.decay + decay.sum(0)
        self.flat = self.flat + ((decay < open_below) | (decay > shut_beyond)).sum(0)


def _layers(opened: LoadedModel) -> list[dict[str, Any]]:
    """Per layer: rotary pairs kept, their longest wavelength, sinks, window, and the gate itself."""
    layers = []
    for layer, (name, attention) in enumerate(attentions(opened.model)):
        rotary = attention.rotary_fade
        fade = [] if rotary is None else rotary.fade
        kept = [2 * math.pi / w for w, f in zip(rotary.inv_freq, fade, strict=True) if f > 0] if rotary else []
        layers.append(
            {
                "layer": layer,
                "name": name,
                "rotary_pairs": len(fade),
                "rotary_pairs_kept": sum(f == 1.0 for f in fade),
                "rotary_pairs_fading": sum(0.0 < f < 1.0 for f in fade),
                "longest_wavelength": max(kept, default=None),
                "sink_tokens": exempt_tokens(attention),
                "sliding_window": sliding_window(attention),
                "gate": attention.forget_gate,
            }
        )
    return layers


def _heads(layer: dict[str, Any], measured: _Measured | None, length: int, trained: int) -> list[dict[str, Any]]:
    gate = layer["gate"]
    if gate is None:
        return []
    bias = gate.bias.detach().double().cpu()
    of_bias = -torch.nn.functional.logsigmoid(bias)
    decay, flat = of_bias, (bias.abs() > SATURATED_LOGIT).double()
    if measured is not None:
        decay, flat = measured.decay / measured.tokens, measured.flat / measured.tokens
    norm = torch.zeros_like(bias) if gate.weight is None else gate.weight.detach().norm(dim=1)
    columns = (values.tolist() for values in (bias, norm, of_bias, decay, flat))
    return [
        {
            "layer": layer["layer"],
            "head": head,
            "bias": bias,
            "weight_norm": norm,
            "half_life_of_bias": _half_life(of_bias),
            "half_life": _half_life(decay),
            "kind": _kind(_half_life(decay), trained),
            "dead": decay * length < DEAD_DECAY,
            "saturated_share": flat,
            "saturated": flat >= 0.99,
        }
        for head, (bias, norm, of_bias, decay, flat) in enumerate(zip(*columns, strict=True))
    ]


def _require_finite(heads: Sequence[dict[str, Any]], source: str) -> None:
    """Raises ValueError where a gate's parameters, or what it does on the text, are no numbers."""
    values = ("bias", "weight_norm", "half_life")
    broken = [h for h in heads if any(h[name] is not None and not math.isfinite(h[name]) for name in values)]
    if broken:
        named = ", ".join(f"layer {h['layer']} head {h['head']}" for h in broken[:5])
        raise ValueError(f"{len(broken)} gates of {source} are not finite, such as {named}: its weights are damaged")


def _half_life(decay: float) -> float | None:
    """ln 2 / decay tokens; None if the gate is exactly open."""
    return None if decay == 0 else math.log(2) / decay


def _kind(half_life: float | None, trained: int) -> str:
    if half_life is None or half_life >= trained:
        return "global"
    return "local" if half_life < trained / 16 else "medium"


def _summary(heads: Sequence[dict[str, Any]]) -> dict[str, int]:
    kinds = {kind: sum(h["kind"] == kind for h in heads) for kind in ("local", "medium", "global")}
    return {"heads": len(heads), **kinds, **{name: sum(h[name] for h in heads) for name in ("dead", "saturated")}}
