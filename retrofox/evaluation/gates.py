"""`retrofox inspect`: the forget gates of a converted model, head by head."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from retrofox.anatomy import attentions
from retrofox.config_values import trained_length
from retrofox.data.sources import listed
from retrofox.data.windows import Window, choose_windows
from retrofox.evaluation.gates_report import figure, open_heads_sentence, print_gates, print_live_share
from retrofox.evaluation.live_share import measure_live_share
from retrofox.generation.generate import complete
from retrofox.generation.streaming import Meter
from retrofox.half_lives import DEAD_DECAY
from retrofox.heads.needles import LONGEST, by_kv_head, plant
from retrofox.heads.start import needle_scores
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.source import holds_converted
from retrofox.planning.live_share import LENGTHS
from retrofox.support.counts import require_at_least
from retrofox.support.plots import save_figure
from retrofox.support.report import check_folder, environment, output_console, reading_bar, write_results

TIMED = 16
"""Tokens whose decoding is timed at each length."""
PROMPTS, LEAST = 8, 512
"""Prompts, and tokens that one needs at least: a text or model shorter than that tells nothing."""


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
    it decays by less than 1e-4 nats over `length` tokens, so it never forgets.

    With data, the live share too (`live_share`): what attention and the cache keep at a horizon of e^-t, at 8k, 32k,
    128k and `length` tokens as far as the text reaches, and the heads that stay open. Why they do, each head's
    attention to facts planted in the texts tells: a head that looks facts up has to see far. Decoding is predicted and,
    after the longest text, measured on this machine.

    Prints tables; into `out` go gates.json, half_lives.png and .svg.

    Args:
        model: directory, Hub id, adapter directory or a live model; converted.
        data: files to measure over; None = parameters alone.
        length: tokens read of each document.
        horizon: t in nats; None = the model's own, else 16.
        max_documents: documents read; None = all.

    Returns:
        {"heads": [...], "layers": number, "summary": {...}, ...}; a half-life too long for a number is None. With data,
        "live_share": as `measure_live_share` returns it, each of "lengths" also with "measured_decode_ms"; and of each
        head "needle_attention", a share: with a gate for each kv head the largest of its query heads.

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: the model is not converted, or there is no text in the data.
    """
    require_at_least(2, length=length)
    require_at_least(1, max_documents=max_documents)
    if horizon is not None and not (data and 0 < horizon < math.inf):
        raise ValueError(f"a horizon is above 0 nats, and measured on texts (give --data, too); got {horizon}")
    check_folder(out)
    if isinstance(model, (str, os.PathLike)) and not holds_converted(os.fspath(model)):
        raise _no_gates(os.fspath(model))  # before gigabytes are loaded
    opened = open_model(model, tokenizer=tokenizer, reads_text=bool(data), dtype=dtype, device=device)
    if opened.fox is None:
        raise _no_gates(opened.source)
    trained = trained_length(opened.model.config)
    gates = {n: attention.forget_gate for n, (_, attention) in enumerate(attentions(opened.model))}
    gates = {layer: gate for layer, gate in gates.items() if gate is not None}
    decay = {n: -gate.bounded(functional.logsigmoid(gate.bias.detach().double())).cpu() for n, gate in gates.items()}
    windows: list[Window] = []
    if data:
        windows = choose_windows(data, opened.tokenizer, length, max_documents=max_documents, text_field=text_field)
    sizes = [len(window.token_ids) for window in windows]
    live: dict[str, Any] | None = None
    if windows and gates:
        lengths = [*(n for n in LENGTHS.values() if n < max(sizes)), max(sizes)]
        live, decay = measure_live_share(opened, windows, horizon, lengths, progress)
    heads = [head for layer, gate in gates.items() for head in _heads(layer, gate, decay[layer], length, trained)]
    _require_finite(heads, opened.source)
    kinds = {kind: sum(head["kind"] == kind for head in heads) for kind in ("local", "medium", "global")}
    result: dict[str, Any] = {
        "model": opened.source,
        "names": {"model": opened.name},
        "fox": opened.fox,
        "trained_length": trained,
        "length": length,
        "data": listed(data),
        "documents": len(windows),
        "tokens": sum(sizes),
        "heads": heads,
        "layers": len([*attentions(opened.model)]),
        "summary": {"heads": len(heads), **kinds, "dead": sum(head["dead"] for head in heads)},
        "environment": environment(),
        "files": {},
    }
    console = output_console()
    print_gates(result, console)
    if live is not None:
        result["live_share"] = live
        scores = measure_needle_heads(opened, windows, progress)
        for head in heads:
            head["needle_attention"] = None if scores is None else scores[head["layer"]][head["head"]]
        text = max((window.token_ids for window in windows), key=len)
        for row in live["lengths"]:
            read = text[: row["length"]].tolist()
            with reading_bar(opened.model, "decoding", len(read), progress):
                row["measured_decode_ms"] = decoding_ms(opened, read)
        print_live_share(live, console)
        console.print(open_heads_sentence(live, heads), highlight=False, soft_wrap=True)
    if out is not None:
        stem = Path(out) / "half_lives"
        draw = (lambda: save_figure(figure(result), stem)) if heads else None
        write_results(result, Path(out) / "gates.json", console, draw)
    return result


def _no_gates(source: str) -> ValueError:
    return ValueError(f"{source} is no converted model with forget gates: run `retrofox convert {source} OUT`")


def _heads(layer: int, gate: Any, decay: torch.Tensor, length: int, trained: int) -> list[dict[str, Any]]:
    """The report's entry of each gate of a layer; `decay` (H,) is its mean of -log f."""
    heads = []
    for head, (bias, mean) in enumerate(zip(gate.bias.tolist(), decay.tolist(), strict=True)):
        half_life = math.log(2) / mean if mean else math.inf
        kind = "global" if half_life >= trained else "local" if half_life < trained / 16 else "medium"
        entry = {"layer": layer, "head": head, "bias": bias, "half_life": half_life if mean else None, "kind": kind}
        heads.append({**entry, "dead": mean * length < DEAD_DECAY})
    return heads


def _require_finite(heads: Sequence[dict[str, Any]], source: str) -> None:
    """Raises ValueError where a gate's parameters, or what it does on the text, are no numbers."""
    broken = [h for h in heads if not math.isfinite(h["bias"]) or math.isnan(h["half_life"] or 0.0)]
    if broken:
        named = ", ".join(f"layer {h['layer']} head {h['head']}" for h in broken[:5])
        raise ValueError(f"{len(broken)} gates of {source} are not finite, such as {named}: its weights are damaged")


def measure_needle_heads(opened: LoadedModel, windows: Sequence[Window], progress: bool) -> list[list[float]] | None:
    """(layers, gates): attention to the planted facts' values, mean over prompts, of a kv head's gate the largest.

    The model runs as it is, its gates on. Prompts have at most LONGEST tokens and lie inside the trained length. None
    where texts or model are too short.
    """
    texts = [window.token_ids for window in windows]
    trained = trained_length(opened.model.config)
    length = min(LONGEST, trained, max((len(text) for text in texts), default=0))
    if length < LEAST:
        return None
    needles = plant(texts, opened.tokenizer, length, PROMPTS)
    with reading_bar(opened.model, "planted facts", sum(x.token_ids.numel() for x in needles), progress):
        scores = needle_scores(opened.model, needles)
    gates = next(len(attention.forget_gate.bias) for _, attention in attentions(opened.model) if attention.forget_gate)
    return by_kv_head(scores, gates).tolist()


def decoding_ms(opened: LoadedModel, token_ids: list[int]) -> float:
    """Milliseconds of a token after a text: the median of TIMED greedy ones, by `generate`'s cache and loop."""
    meter = Meter()
    complete(opened, [token_ids], TIMED + 1, ignore_eos=True, streamer=meter)
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(meter.times))
