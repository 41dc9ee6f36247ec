"""Needle in a haystack: one fact hidden in a long text, asked for at the end (Lin et al., ICLR 2025, section 4.4).

standard: the needle is a statement, "The best thing to do in Lisbon is ...", and only the end of the prompt asks.
easy: the needle is question and answer together, in the very words of the final question, so that a base model that
can look back finds it without understanding an instruction.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from retrofox.data.sources import listed
from retrofox.data.windows import choose_windows
from retrofox.generation.generate import complete
from retrofox.loading.opened import Opened, open_model
from retrofox.loading.tokenizers import open_tokenizer, require_same_tokenizer
from retrofox.support.files import write_result
from retrofox.support.plots import needle_figure, save_csv, save_figure, tokens_label
from retrofox.support.report import check_folder, environment, output_console, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("easy", "standard")
CITIES = ("San Francisco", "Lisbon", "Nairobi", "Kyoto", "Montreal", "Naples", "Auckland", "Bogota", "Bergen", "Cairo")
ACTS = (
    "eat a sandwich and sit in Dolores Park on a sunny day",
    "count the red boats in the harbour before breakfast",
    "borrow a bicycle and follow the canal to the old mill",
    "listen to the brass band under the iron bridge",
    "buy seven lemons and learn to juggle behind the market",
    "climb the bell tower and wave at the evening train",
    "write a postcard in the garden of the glass library",
    "share a bowl of plum soup with the chess players",
)


@dataclass(frozen=True)
class Needle:
    """A fact drawn by seed: so neither the model's memory nor one lucky wording decides."""

    city: str
    act: str

    @property
    def question(self) -> str:
        return f"What is the best thing to do in {self.city}?"

    def hidden(self, mode: str) -> str:
        """What is put into the haystack."""
        statement = f"The best thing to do in {self.city} is to {self.act}."
        return f"\n{self.question} Answer: {statement}\n" if mode == "easy" else f"\n{statement}\n"

    def asked(self, mode: str) -> str:
        """What ends the prompt; the answer that should follow is `act`."""
        start = f"The best thing to do in {self.city} is to"
        if mode == "easy":
            return f"\n{self.question} Answer: {start}"
        return (
            "\n\nSomewhere in the text above stands an important piece of information. "
            f"Use it to answer this question.\nQuestion: {self.question}\nAnswer: {start}"
        )


def needle(
    model: str | os.PathLike | PreTrainedModel,
    against: str | os.PathLike | PreTrainedModel | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] = (),
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
    depths: Sequence[float] | int = 5,
    mode: str = "easy",
    out: str | os.PathLike | None = None,
    *,
    trials: int = 2,
    seed: int = 0,
    batch: int = 1,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    text_field: str = "text",
    tokenizer: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Share of needles found, over context lengths and depths, by exact match on the greedy answer.

    A needle counts as found if the answer begins with its words, case and punctuation aside. Model and `against` read
    the same prompts. Prints a table for each; into `out` go needle.json, needle.csv and a heat-map for each as .png
    and .svg.

    Args:
        data: files whose text is the haystack; it is repeated if shorter than the longest context.
        lengths: whole prompts' lengths in tokens.
        depths: where in the haystack the needle goes, 0 = its start, 1 = its end; a number spaces so many evenly.
        mode: "easy" (needle = question and answer) or "standard" (needle = statement).
        trials: prompts per cell, each with another fact and another stretch of the haystack.
        seed: of facts and stretches.
        batch: prompts run at one time.

    Returns:
        {"models": {name: {"found": depths x lengths shares}}, "answers": [...], ...}.

    Raises:
        FileNotFoundError: a model or data file that is not there.
        ValueError: bad options, no text, another tokenizer in `against`, or a length too short for needle and question.
    """
    places = [float(d) for d in (np.linspace(0, 1, max(0, depths)) if isinstance(depths, int) else depths)]
    sources = listed(data)
    _check(mode, lengths, places, trials, batch, sources)
    check_folder(out)
    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        tokenizer = open_tokenizer(os.fspath(model))
    if tokenizer is not None:
        require_same_tokenizer(tokenizer, against)
    started = time.time()
    result: dict[str, Any] = {
        "mode": mode,
        "lengths": list(lengths),
        "depths": [float(d) for d in places],
        "trials": trials,
        "seed": seed,
        "data": sources,
        "models": {},
        "answers": [],
        "environment": environment(),
    }
    prompts: list[_Prompt] = []
    for number, source in enumerate([model] if against is None else [model, against]):
        opened = open_model(source, tokenizer=tokenizer, dtype=dtype, device=device)
        if not prompts:
            hay = _haystack(opened.tokenizer, sources, max(lengths), text_field)
            prompts = [
                make_prompt(opened.tokenizer, hay, length, depth, mode, f"{seed} {length} {depth:.6f} {trial}")
                for length in lengths
                for depth in places
                for trial in range(trials)
            ]
        name = opened.name if opened.name not in result["models"] else f"{opened.name} (2)"
        answers = _ask_all(opened, prompts, batch, progress)
        result["models"][name] = {
            "source": opened.source,
            "role": "base" if number else "model",
            "trained_length": getattr(opened.model.config, "max_position_embeddings", None),
            "found": _grid(answers, lengths, places),
        }
        result["answers"] += [{"model": name, **answer} for answer in answers]
        opened = None  # frees the weights before the next model is loaded
        gc.collect()
    result["seconds"] = time.time() - started
    result["files"] = {}
    _report(result, out)
    return result


@dataclass
class _Prompt:
    length: int
    depth: float
    fact: Needle
    token_ids: list[int]
    answer_tokens: int


def make_prompt(tokenizer: Any, hay: Sequence[int], length: int, depth: float, mode: str, seed: str) -> _Prompt:
    """A prompt of exactly `length` tokens: haystack with the needle at `depth`, after a full stop, question last.

    Raises:
        ValueError: `length` can't hold needle and question.
    """
    draw = random.Random(seed)
    fact = Needle(draw.choice(CITIES), draw.choice(ACTS))
    start = tokenizer("")["input_ids"]
    hidden, asked = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (fact.hidden(mode), fact.asked(mode)))
    room = length - len(start) - len(hidden) - len(asked)
    if room < 0:
        needed = length - room
        raise ValueError(f"a context of {length} tokens can't hold needle and question, which take {needed}")
    offset = draw.randrange(max(1, len(hay) - room))
    text = list(hay[offset : offset + room])
    at = _sentence_end(tokenizer, text, round(depth * room))
    token_ids = [*start, *text[:at], *hidden, *text[at:], *asked]
    answer = tokenizer(f" {fact.act}.", add_special_tokens=False)["input_ids"]
    return _Prompt(length, depth, fact, token_ids, len(answer) + 2)


def found(answer: str, fact: Needle) -> bool:
    """Whether the answer begins with the needle's words, case, spaces and punctuation aside."""
    return _words(answer)[: len(_words(fact.act))] == _words(fact.act)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _sentence_end(tokenizer: Any, text: Sequence[int], at: int, reach: int = 64) -> int:
    """The last position within `reach` tokens before `at` that follows a full stop, else `at` itself."""
    if at in (0, len(text)):
        return at
    for position in range(at, max(0, at - reach), -1):
        if tokenizer.decode([text[position - 1]]).rstrip().endswith((".", "!", "?")):
            return position
    return at


def _haystack(tokenizer: Any, data: Sequence[str], length: int, text_field: str) -> list[int]:
    """At least `length` tokens of the files' text, repeated where there is less, without special tokens."""
    windows = choose_windows(data, tokenizer, 1 << 40, text_field=text_field)
    special = set(tokenizer.all_special_ids)
    hay = [int(t) for window in windows for t in window.token_ids if int(t) not in special]
    if not hay:
        raise ValueError(f"no text in {', '.join(data)}")
    return hay * -(-2 * length // len(hay)) if len(hay) < 2 * length else hay


def _ask_all(opened: Opened, prompts: Sequence[_Prompt], batch: int, progress: bool) -> list[dict[str, Any]]:
    answers = []
    with progress_bar("prompts", progress) as bar:
        task = bar.add_task(opened.name, total=len(prompts))
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            longest = max(p.answer_tokens for p in group)
            for prompt, ids in zip(group, complete(opened, [p.token_ids for p in group], longest), strict=True):
                answer = opened.tokenizer.decode(ids[: prompt.answer_tokens], skip_special_tokens=True)
                answers.append(
                    {
                        "length": prompt.length,
                        "depth": prompt.depth,
                        "needle": prompt.fact.act,
                        "city": prompt.fact.city,
                        "answer": answer,
                        "found": found(answer, prompt.fact),
                    }
                )
            bar.advance(task, len(group))
    return answers


def _grid(answers: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float]) -> list[list[float]]:
    def share(depth: float, length: int) -> float:
        hits = [a["found"] for a in answers if a["length"] == length and a["depth"] == depth]
        return sum(hits) / len(hits)

    return [[share(depth, length) for length in lengths] for depth in depths]


def _check(
    mode: str, lengths: Sequence[int], depths: Sequence[float], trials: int, batch: int, data: Sequence[Any]
) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if not lengths or any(not 0 < n < 2**31 for n in lengths) or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths must be different positive numbers of tokens below 2^31, got {list(lengths)}")
    if not depths or any(not 0 <= d <= 1 for d in depths) or len(set(depths)) < len(depths):
        raise ValueError(
            f"depths must be at least 1, or different numbers from 0 (start) to 1 (end); got {list(depths) or 'none'}"
        )
    if trials < 1 or batch < 1:
        raise ValueError(f"trials and batch must be at least 1, got {trials} and {batch}")
    if not data:
        raise ValueError("a needle needs a haystack: give text files as data")


def _report(result: dict[str, Any], out: str | os.PathLike | None) -> None:
    """Prints a table for each model and writes the files."""
    console = output_console()
    lengths, depths = result["lengths"], result["depths"]
    for name, values in result["models"].items():
        console.print(f"Needles found by {name}, {result['mode']} mode, {result['trials']} trials per cell")
        table = Table()
        table.add_column("depth", justify="right")
        for length in lengths:
            table.add_column(tokens_label(length), justify="right")
        for depth, row in zip(depths, values["found"], strict=True):
            table.add_row(f"{depth:.0%}", *[f"{share:.0%}" for share in row])
        table.add_section()
        table.add_row("all", *[f"{share:.0%}" for share in np.mean(values["found"], axis=0)])
        console.print(table)
    if out is None:
        return
    folder = Path(out)
    files = result["files"]
    header = ["model", "length", "depth", "city", "needle", "found", "answer"]
    files["csv"] = save_csv(folder / "needle.csv", header, [[a[key] for key in header] for a in result["answers"]])
    for name, values in result["models"].items():
        figure = needle_figure(
            np.array(values["found"]),
            lengths,
            depths,
            trained_length=values["trained_length"],
            title=f"Needle retrieval, {result['mode']} mode: {name}",
            subtitle=f"exact match of the greedy answer, {result['trials']} trials per cell",
        )
        stem = folder / f"needle_{values['role']}"
        files[f"{values['role']}_png"], files[f"{values['role']}_svg"] = save_figure(figure, stem)
    files["json"] = str(folder / "needle.json")
    write_result(files["json"], (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    console.print(f"wrote {', '.join(files.values())}", highlight=False, soft_wrap=True)
