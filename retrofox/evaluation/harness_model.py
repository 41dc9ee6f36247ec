"""A model as lm-eval sees it, requests batched by tokens. Imports lm-eval, an optional extra: see `lm_eval.run_tasks`.

Requests are sorted by length and packed into batches of a number of tokens, padded at the end, which no earlier token
sees in a causal model. A request whose input begins another one's input is read off that one's row, so choices of one
token cost one row together. The head is applied to the positions of the continuations alone, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM

from retrofox.anatomy import LOGIT_BYTES, read_logits, vocabulary_size
from retrofox.loading.loaded_model import LoadedModel
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.support.memory import out_of_memory
from retrofox.support.report import progress_bar

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Tokens of one batch, padding counted."""
MULTIPLE = 16
"""Lengths are rounded up to a multiple of this on a GPU, so that kernels meet few shapes."""


_HFLM: Any = HFLM  # its registering decorator hides its type


@dataclass
class Row:
    """One input of the model, and the continuations read off it: (number of the request, first position, tokens)."""

    token_ids: list[int]
    reads: list[tuple[int, int, list[int]]]


class BatchedModel(_HFLM):
    """lm-eval's transformers model with log-likelihoods by token-budget batches; texts are generated as it does.

    Args:
        max_length: tokens to which inputs are cut from the left.
        batch: rows of a batch; "auto" = as many as BATCH_TOKENS hold.
    """

    def __init__(self, opened: LoadedModel, max_length: int, batch: int | str = "auto", progress: bool = True):
        self.tokens = BATCH_TOKENS.get(opened.device.type, BATCH_TOKENS["cpu"])
        self.rows = None if batch == "auto" else int(batch)
        self.progress = progress
        self.label = opened.name
        self.encoded: dict[str, list[int]] = {}
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            backend="causal",
            max_length=max_length,
            batch_size=self.rows or max(1, self.tokens // max_length),
            device=str(opened.device),
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in lm-eval, the texts tokenised together: one by one they cost more than a small model's passes."""
        start = self.tokenizer.decode(self.prefix_token_id)
        pairs = [request.args for request in requests]
        texts = {text for context, answer in pairs for text in (context.rstrip(), context + answer) if context}
        texts = [text for text in texts if text and not text.startswith(start)]  # such get no second start token
        options = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        if texts:
            self.encoded = dict(zip(texts, self.tokenizer(texts, **options)["input_ids"], strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=not self.progress or disable_tqdm)
        finally:
            self.encoded = {}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        if add_special_tokens is None and not options and string in self.encoded:
            return list(self.encoded[string])
        return super().tok_encode(string, add_special_tokens, **options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of every continuation, in order."""
        same_length = depends_on_length(self.model.config)
        rows = packed([(context, continuation) for _, context, continuation in requests], self.max_length, same_length)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with progress_bar("requests", self.progress and not disable_tqdm) as bar:
            task = bar.add_task(self.label, total=len(requests))
            for batch in batches(rows, self._rows_for, same_length):
                for number, answer in self._answers(batch):
                    answers[number] = answer
                bar.advance(task, sum(len(row.reads) for row in batch))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:  # rolling log-likelihoods have none
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def _rows_for(self, length: int) -> int:
        return self.rows or max(1, self.tokens // length)

    def _answers(self, batch: Sequence[Row]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """One forward pass; half as many rows at a time where the GPU's memory does not do."""
        try:
            yield from self._run(batch)
        except torch.cuda.OutOfMemoryError as error:
            if len(batch) == 1:
                raise out_of_memory(f"one text of {len(batch[0].token_ids)} tokens") from error
            torch.cuda.empty_cache()
            self.tokens = max(1, self.tokens // 2)
            half = len(batch) // 2
            yield from self._answers(batch[:half])
            yield from self._answers(batch[half:])

    @torch.no_grad()
    def _run(self, batch: Sequence[Row]) -> list[tuple[int, tuple[float, bool]]]:
        longest = max(len(row.token_ids) for row in batch)
        if self.device.type == "cuda" and not depends_on_length(self.model.config):
            longest = -(-longest // MULTIPLE) * MULTIPLE
        ids = np.zeros((len(batch), longest), np.int64)
        for place, row in enumerate(batch):
            ids[place, : len(row.token_ids)] = row.token_ids
        reads = [(place, *read) for place, row in enumerate(batch) for read in row.reads]
        sizes = [len(tokens) for *_, tokens in reads]
        where = np.repeat([place for place, *_ in reads], sizes)
        position = np.concatenate(
            [np.arange(first, first + size) for (_, _, first, _), size in zip(reads, sizes, strict=True)]
        )
        target = np.concatenate([tokens for *_, tokens in reads])
        rows, positions, targets = (torch.from_numpy(x).to(self.device) for x in (where, position, target))
        logits_at = read_logits(self.model, torch.from_numpy(ids).to(self.device))
        budget = LOGIT_BYTES.get(self.device.type, LOGIT_BYTES["cpu"])
        step = max(1, budget // (4 * vocabulary_size(self.model)))
        scores, greedy = [], []
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            logits = logits_at((rows[part], positions[part]))
            chosen = logits.gather(1, targets[part, None])[:, 0]
            scores.append(chosen - logits.logsumexp(1))
            greedy.append(logits.argmax(1) == targets[part])
        first = np.cumsum([0, *sizes[:-1]])
        likelihood = np.add.reduceat(torch.cat(scores).double().cpu().numpy(), first)
        exact = np.logical_and.reduceat(torch.cat(greedy).cpu().numpy(), first)
        return [
            (number, (float(score), bool(hit)))
            for (_, number, *_), score, hit in zip(reads, likelihood, exact, strict=True)
        ]


def packed(pairs: Sequence[tuple[list[int], list[int]]], max_length: int, alone: bool = False) -> list[Row]:
    """Rows, longest first, that answer every (context, continuation); a request that begins another shares its row.

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
        inputs.append((text, (number, len(text) - len(continuation), continuation)))
    rows: list[Row] = []
    for text, read in sorted(inputs, key=lambda item: item[0], reverse=True):  # what begins another follows it
        if rows and not alone and rows[-1].token_ids[: len(text)] == text:
            rows[-1].reads.append(read)
        else:
            rows.append(Row(text, [read]))
    return sorted(rows, key=lambda row: -len(row.token_ids))


def batches(rows: Sequence[Row], rows_for: Callable[[int], int], same_length: bool = False) -> Iterator[Sequence[Row]]:
    """Consecutive rows, longest first, `rows_for(length of the first)` at a time; of one length if asked for."""
    start = 0
    while start < len(rows):
        length = len(rows[start].token_ids)
        stop = min(len(rows), start + rows_for(length))
        while same_length and len(rows[stop - 1].token_ids) != length:
            stop -= 1
        yield rows[start:stop]
        start = stop
