"""Two models on the same text: the loss of each at every token, and the KL divergence between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from retrofox.anatomy import LOGIT_BYTES, read_logits, vocabulary_size
from retrofox.evaluation.panel_texts import Row
from retrofox.evaluation.statistics import mean_over_documents
from retrofox.evaluation.token_scores import HEAD, require_finite
from retrofox.support.memory import out_of_memory
from retrofox.support.report import after_layers

LEAST_DOCUMENTS = 5
"""With so many documents or more they are the sample; with fewer, the rows are."""


@torch.no_grad()
def token_differences(
    model: PreTrainedModel, base: PreTrainedModel, token_ids: np.ndarray, advance: Callable[[float], Any] = float
) -> np.ndarray:
    """Per token i = 1 .. T - 1: the model's loss, the base's loss, KL(base || model); all in nats.

        KL_i = sum_v p_base(v) (log p_base(v) - log p_model(v)),    p( . ) = p( . | x_0 .. x_i-1), the sum over all v

    The logits exist for a few positions at a time.

    Args:
        token_ids: (T,) int64.
        advance: as of `score_tokens`.

    Returns:
        (3, T - 1) float32.
    """
    if vocabulary_size(model) != vocabulary_size(base):
        raise ValueError(
            f"the model scores {vocabulary_size(model)} tokens and the base {vocabulary_size(base)}: no KL between them"
        )
    device = next(model.parameters()).device
    ids = torch.from_numpy(token_ids)[None].to(device)
    step = max(1, LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"]) // (4 * 4 * vocabulary_size(model)))
    found = torch.empty(3, len(token_ids) - 1)
    try:
        logits_of = []
        for one in (model, base):
            with after_layers(one, lambda read: advance(read / 2 * (1 - HEAD))):
                logits_of.append(read_logits(one, ids))
        for start in range(0, found.shape[1], step):
            stop = min(start + step, found.shape[1])
            mine, its = (read((0, slice(start, stop))).log_softmax(-1) for read in logits_of)
            target = ids[0, start + 1 : stop + 1, None]
            found[0, start:stop] = -mine.gather(1, target)[:, 0].cpu()
            found[1, start:stop] = -its.gather(1, target)[:, 0].cpu()
            found[2, start:stop] = (its.exp() * (its - mine)).sum(-1).cpu()
            advance(len(token_ids) * HEAD * (stop - start) / found.shape[1])
    except torch.cuda.OutOfMemoryError as error:
        raise out_of_memory(f"a row of {len(token_ids)} tokens") from error
    for one, losses in ((model, found[0]), (base, found[1])):
        require_finite(one, losses.numpy(), np.arange(1, len(token_ids)), "a row")
    return found.numpy()


def summarise_rows(
    rows: Sequence[Row], found: Sequence[np.ndarray], spans: Sequence[tuple[int, int]], trained: int
) -> dict[str, Any]:
    """Means over the tokens of each span of positions, with 95 % intervals over documents.

    Args:
        found: of each row, as `token_differences` gives it.
        spans: [start, stop) positions in a row.
        trained: tokens that the base was trained to: the KL counts positions below.

    Returns:
        {"sample": "documents" or "rows", "units", "tokens", "spans": [{"from", "to", "tokens", "loss", "base",
        "difference"}], "kl"}; each number as `mean_over_documents` gives it.
    """
    documents = len({int(number) for row in rows for number in row.document})
    by_document = documents >= LEAST_DOCUMENTS
    units = [row.document if by_document else np.full(len(row.document), n) for n, row in enumerate(rows)]
    names, unit = np.unique(np.concatenate([own[1:] for own in units]), return_inverse=True)
    position = np.concatenate([np.arange(1, len(own)) for own in units])
    loss, base, kl = np.concatenate(found, axis=1).astype(np.float64)

    def mean(values: np.ndarray, start: int, stop: int) -> dict[str, Any]:
        inside = (position >= start) & (position < stop)
        sums = np.bincount(unit[inside], values[inside], len(names))
        return mean_over_documents(sums, np.bincount(unit[inside], minlength=len(names)))

    named = {"loss": loss, "base": base, "difference": loss - base}
    table = [
        {
            "from": start,
            "to": stop,
            "tokens": int(((position >= start) & (position < stop)).sum()),
            **{name: mean(values, start, stop) for name, values in named.items()},
        }
        for start, stop in spans
    ]
    return {
        "sample": "documents" if by_document else "rows",
        "units": len({int(number) for own in units for number in own}),
        "documents": documents,
        "tokens": sum(len(row.token_ids) for row in rows),
        "spans": table,
        "kl": mean(kl, 0, trained),
    }
