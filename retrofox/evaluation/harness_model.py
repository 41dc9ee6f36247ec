"""A model as lm-eval sees it, scored in batches. Imports lm-eval, an optional extra: see `lm_eval.run_tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.models.huggingface import HFLM

from retrofox.evaluation.token_scores import BATCH_TOKENS, Scored, score_tokens
from retrofox.loading.loaded_model import LoadedModel
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.support.report import progress_bar

_HFLM: Any = HFLM  # its registering decorator hides its type


class BatchedModel(_HFLM):
    """lm-eval's transformers model with log-likelihoods by `score_tokens`; texts are generated as it does.

    Args:
        max_length: tokens to which inputs are cut from the left.
        batch: rows of a batch; "auto" = as many as BATCH_TOKENS holds.
    """

    def __init__(self, opened: LoadedModel, max_length: int, batch: int | str = "auto", progress: bool = True):
        self.batch, self.progress, self.label = batch, progress, opened.name
        tokens = BATCH_TOKENS.get(opened.device.type, BATCH_TOKENS["cpu"])
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            backend="causal",
            max_length=max_length,
            batch_size=max(1, tokens // max_length) if isinstance(batch, str) else batch,
            device=str(opened.device),
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm or not self.progress)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of every continuation, in order."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        rows = packed(pairs, self.max_length, alone=depends_on_length(self.model.config))
        texts = [row.scored for row in rows]
        with progress_bar("tokens", self.progress and not disable_tqdm) as bar:
            task = bar.add_task(self.label, total=sum(text.needed for text in texts))
            scores = score_tokens(self.model, texts, self.batch, lambda tokens: bar.advance(task, tokens))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for row, text, (loss, best) in zip(rows, texts, scores, strict=True):
            ends = np.cumsum([len(tokens) for _, _, tokens in row.reads])
            parts = (np.split(values, ends[:-1]) for values in (loss.astype(np.float64), best == text.tokens))
            for (number, _, _), own, hit in zip(row.reads, *parts, strict=True):
                answers[number] = (-float(own.sum()), bool(hit.all()))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:  # rolling log-likelihoods have none
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers


@dataclass
class Row:
    """One input of the model, and the continuations read off it: (number of the request, first position, tokens)."""

    token_ids: list[int]
    reads: list[tuple[int, int, list[int]]]

    @property
    def scored(self) -> Scored:
        positions = np.concatenate([np.arange(first, first + len(tokens)) for _, first, tokens in self.reads])
        targets = np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens in self.reads])
        return Scored(np.asarray(self.token_ids, np.int64), positions, "a request", targets)


def packed(pairs: Sequence[tuple[list[int], list[int]]], max_length: int, alone: bool = False) -> list[Row]:
    """Rows that answer every (context, continuation); a request whose input begins another's shares its row.

    So choices of one token cost one row together.

    Args:
        max_length: tokens of an input at most; it loses its first ones.
        alone: every request gets a row of its own: for models in which what follows matters.

    Raises:
        ValueError: a continuation longer than `max_length`.
    """
    inputs = []
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_length:
            raise ValueError(f"a continuation of {len(continuation)} tokens does not fit into {max_length}: give more")
        text = (context + continuation)[-(max_length + 1) :][:-1]
        inputs.append((text, (number, len(text) - len(continuation) + 1, continuation)))
    rows: list[Row] = []
    for text, read in sorted(inputs, key=lambda item: item[0], reverse=True):  # what begins another follows it
        if rows and not alone and rows[-1].token_ids[: len(text)] == text:
            rows[-1].reads.append(read)
        else:
            rows.append(Row(text, [read]))
    return rows
