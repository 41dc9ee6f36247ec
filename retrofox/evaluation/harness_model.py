"""A model as lm-eval sees it, scored in batches. Imports lm-eval, an optional extra: see `lm_eval.run_tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.models.huggingface import HFLM

from retrofox.evaluation.token_scores import BATCH_TOKENS, Scored, score_tokens
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.report import progress_bar

_HFLM: Any = HFLM  # its registering decorator hides its type


class BatchedModel(_HFLM):
    """lm-eval's transformers model with log-likelihoods by `score_tokens`; texts are generated as it does.

    Args:
        max_length: tokens to which inputs are cut from the left.
    """

    def __init__(self, opened: LoadedModel, max_length: int, progress: bool = True):
        self.progress, self.label = progress, opened.name
        tokens = BATCH_TOKENS.get(opened.device.type, BATCH_TOKENS["cpu"])
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            backend="causal",
            max_length=max_length,
            batch_size=max(1, tokens // max_length),
            device=str(opened.device),
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        with progress_bar("answers", self.progress and not disable_tqdm) as bar:
            self._answered = partial(bar.advance, bar.add_task(self.label, total=len(requests)))
            return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._model_generate(context, *args, **kwargs)
        self._answered(len(context))
        return found

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm or not self.progress)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of every continuation, in order."""
        texts = [
            _scored(context + continuation, len(continuation), self.max_length) for _, context, continuation in requests
        ]
        with progress_bar("tokens", self.progress and not disable_tqdm) as bar:
            task = bar.add_task(self.label, total=sum(text.needed for text in texts))
            scores = score_tokens(self.model, texts, lambda tokens: bar.advance(task, tokens))
        answers = []
        for (request, _, _), text, (loss, best) in zip(requests, texts, scores, strict=True):
            answers.append((-float(loss.astype(np.float64).sum()), bool((best == text.tokens).all())))
            if request is not None:  # rolling log-likelihoods have none
                self.cache_hook.add_partial("loglikelihood", request, answers[-1])
        return answers


def _scored(token_ids: list[int], scored: int, max_length: int) -> Scored:
    """The last `scored` tokens after those before them, of which `max_length` are read at most."""
    if scored > max_length:
        raise ValueError(f"a continuation of {scored} tokens does not fit into {max_length}: give more")
    text = np.asarray(token_ids[-(max_length + 1) :], np.int64)
    return Scored(text, np.arange(len(text) - scored, len(text)), "a request")
