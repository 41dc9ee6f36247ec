"""`retrofox recall`: how well a model remembers natural text that it read d tokens back.

A loss that stays flat over a long document is no memory. Text that repeats itself tells: a name, a phrase, a sentence
that stood d tokens back can be continued from there, if the model still sees it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrofox.data.sources import check_results_outside, listed
from retrofox.data.windows import Window, _require_files, choose_windows
from retrofox.evaluation import recall_report
from retrofox.evaluation.baselines import Baseline, base_for, parse_all
from retrofox.evaluation.columns import columns, of_run
from retrofox.evaluation.evaluate import _fingerprint, _listed, _tokenizer_of, tell_apart
from retrofox.evaluation.readings import Reading, read
from retrofox.evaluation.recall_control import Control, plan_control
from retrofox.evaluation.repeats import UNITS, Repeats, WordStarts, find_repeats
from retrofox.loading.device import check_place
from retrofox.loading.opened import Opened
from retrofox.loading.tokenizers import require_same_tokenizer
from retrofox.support.memory import reset_peak
from retrofox.support.report import (
    check_folder,
    environment,
    output_console,
    progress_bar,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAREST = 16
"""Tokens: repeats nearer than this are not counted; the first octave is 16 to 32."""


def recall(
    model: str | os.PathLike | PreTrainedModel | Opened,
    against: str | os.PathLike | PreTrainedModel | Opened | Sequence[Any] | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    length: int = 8192,
    out: str | os.PathLike | None = None,
    *,
    ngram: int = 4,
    unit: str = "words",
    control: int = 32,
    seed: int = 0,
    max_documents: int | None = None,
    min_tokens: int = 2,
    batch: int = 1,
    text_field: str = "text",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    baselines: Sequence[str | Baseline] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Loss and top-1 accuracy on tokens that repeat what stood d tokens back, by octave of d, with a control.

    A token counts at distance d if the token and the `ngram` - 1 words before it (with what of its own word precedes
    it) occurred before as the same tokens, the last time d tokens back. Octaves are 16-32, 32-64, ... up to `length`.
    Every model reads the same tokens: the first `length` of each document.

    The control samples such tokens and reads them twice more: with every earlier occurrence of their n-gram cut out
    of the text ("cut"), and with as much other text cut ("whole"). What recall is worth at distance d is the paired
    difference, loss(cut) - loss(whole): a model that remembers loses by the cut, one that guesses well does not.
    Intervals are 95 %, bootstrapped over documents.

    Prints two tables; into `out` go recall.json, recall.csv and recall.png and .svg.

    Args:
        model: Hub id, directory, .gguf file, adapter directory, a live model or an `Opened` one with a name.
        against: the same, one or several; differences are taken to the first.
        data: files, directories, globs or hf:org/name; long documents, since d can't exceed their length.
        length: tokens read of each document.
        ngram: words that must repeat, the one being completed included.
        unit: "words", or "tokens" to count every token as a word.
        control: tokens sampled per octave and document; 0 skips the control. Fewer are used where their cuts would
            take more than 1/16 of the text in one of its four extra forward passes.
        seed: of that sample.
        max_documents: documents read; None = all.
        min_tokens: leave out documents shorter than this.
        batch: texts run at one time.
        baselines: made of the base and read too, such as "yarn:4" (see `baselines`).

    Returns:
        A dict, as in recall.json: "lines" (the models), "octaves" (per octave: from, to, tokens, documents, and by
        model loss, accuracy, difference and control, each {"mean", "interval"}), "environment", "files".

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: bad options, no text or none that repeats itself, another tokenizer in `against`.
    """
    sources, others = listed(data), _listed(against)
    _check(length, sources, ngram, unit, control, seed, batch, max_documents, min_tokens)
    wanted = parse_all(baselines)
    base_for(wanted, model, others)
    check_folder(out)
    check_results_outside(out, sources)
    check_place(device, dtype)
    started = time.time()
    tokenizer = tokenizer or (model.tokenizer if isinstance(model, Opened) else _tokenizer_of(model))
    for other in others:
        require_same_tokenizer(tokenizer, other)
    chosen: dict[str, Any] = {"min_tokens": min_tokens, "max_documents": max_documents, "text_field": text_field}
    windows = choose_windows(sources, tokenizer, length, **chosen)
    edges = octave_edges(length)
    texts = [_Text(window, WordStarts(tokenizer, unit), ngram, edges, control, seed) for window in windows]
    if not any(len(text.positions) for text in texts):
        raise ValueError(
            f"no token in {', '.join(sources)} completes {ngram} {unit} that stood {NEAREST} or more tokens before: "
            "give longer documents, a larger length, or a smaller ngram"
        )
    result: dict[str, Any] = {
        "length": length,
        "ngram": ngram,
        "unit": unit,
        "control": control,
        "seed": seed,
        "min_tokens": min_tokens,
        "data": sources,
        "documents": len(windows),
        "tokens": sum(len(w.token_ids) for w in windows),
        "longest": max(len(w.token_ids) for w in windows),
        "document_names": [w.name for w in windows],
        "tokens_sha256": _fingerprint(windows),
        "lines": [],
        "environment": environment(),
    }
    sums: dict[str, recall_report.Sums] = {}
    for key, opened in columns(model, others, wanted, tokenizer=tokenizer, dtype=dtype, device=device):
        if key == "model":
            result["trained_length"] = getattr(opened.model.config, "max_position_embeddings", None)
        line, sums[key] = _run(opened, key, texts, len(edges) - 1, batch, progress)
        result["lines"].append(line)
        opened = None  # frees the weights before the next model is loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    tell_apart(result["lines"])
    result["octaves"] = recall_report.octaves(sums, edges)
    console = output_console()
    recall_report.print_tables(result, console)
    result["seconds"] = time.time() - started
    result["files"] = {}
    if out is not None:
        result["files"] = recall_report.write_files(result, Path(out))
        console.print(f"wrote {', '.join(result['files'].values())}", highlight=False, soft_wrap=True)
    return result


def octave_edges(length: int) -> list[int]:
    """16, 32, 64, ... and `length`: edges of the octaves of distance."""
    edges = [NEAREST]
    while edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return [*edges, length]


class _Text:
    """One document: its tokens that repeat something, their octaves, and the control's versions of it."""

    def __init__(self, window: Window, starts: WordStarts, ngram: int, edges: list[int], control: int, seed: int):
        ids = window.token_ids
        repeats: Repeats = find_repeats(ids, starts(ids), ngram)
        self.document = window.document
        self.positions = np.flatnonzero(repeats.distance >= NEAREST)
        self.octave = np.searchsorted(edges, repeats.distance[self.positions], side="right") - 1
        self.whole = Reading(ids, self.positions, window.name)
        self.control: Control | None = None
        if control and len(self.positions):
            by_octave = [self.positions[self.octave == o] for o in range(len(edges) - 1)]
            draw = np.random.default_rng([seed, window.document])
            self.control = plan_control(ids, repeats, by_octave, control, draw, window.name)

    @property
    def readings(self) -> list[Reading]:
        return [self.whole, *(self.control.readings if self.control else [])]


def _run(
    opened: Opened, key: str, texts: list[_Text], octaves: int, batch: int, progress: bool
) -> tuple[dict[str, Any], recall_report.Sums]:
    """Runs every version of every text through one model: its line, and its sums by octave and document."""
    readings = [reading for text in texts for reading in text.readings]
    total = sum(reading.needed for reading in readings)
    reset_peak(opened.device)
    started = time.perf_counter()
    with progress_bar("tokens", progress) as bar:
        task = bar.add_task(opened.name, total=total)
        found = iter(read(opened.model, readings, batch, lambda n: bar.advance(task, n)))
    sums = recall_report.Sums(len(texts), octaves)
    for text in texts:
        sums.add("all", text.document, text.octave, *next(found))
        if text.control is not None:
            passes = [next(found) for _ in text.control.readings]
            octave = text.octave[np.searchsorted(text.positions, text.control.positions)]
            for kind, pairs in (("cut", text.control.cut), ("whole", text.control.other)):
                values = [np.array([passes[p][n][at] for p, at in pairs]) for n in (0, 1)]
                sums.add(kind, text.document, octave, values[0], values[1])
    seconds = time.perf_counter() - started
    line = {"key": key, "label": opened.name, **of_run(opened, total, seconds)}
    return line, sums


def _check(
    length: int,
    data: Sequence[str],
    ngram: int,
    unit: str,
    control: int,
    seed: int,
    batch: int,
    max_documents: int | None,
    min_tokens: int,
) -> None:
    if not 2 * NEAREST <= length < 2**31:
        raise ValueError(f"length must be at least {2 * NEAREST} tokens and below 2^31, got {length}")
    if not data:
        raise ValueError("nothing to read: give data files (--data)")
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}; got {unit!r}")
    if min_tokens < 2 or min_tokens > length:
        raise ValueError(f"min_tokens must lie between 2 and the length, {length}; got {min_tokens}")
    if ngram < 2:
        raise ValueError(f"ngram must be at least 2, got {ngram}")
    if control < 0:
        raise ValueError(f"control must be a number of tokens, or 0 for none; got {control}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    for name, value in {"batch": batch, "max_documents": max_documents}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    _require_files(data)
