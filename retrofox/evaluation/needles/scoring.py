"""Whether a model finds what a prompt asks for: by one forward pass (teacher forcing), or by generating.

Rule: a value is found if greedy decoding, given the prompt and the answer's true text up to the value, emits exactly
the value's tokens a_1 ... a_n:

    found  <=>  argmax_v p(v | prompt, true text, a_1 ... a_k-1) = a_k  for k = 1 ... n.

Greedy decoding emits a_1 iff it is the argmax; it then reads what teacher forcing reads, and so on: the two agree by
induction, except where rounding decides between two logits (batches of other shapes round differently). The same words
in other tokens (another case, two spaces) do not count, in either way; `same_words` accepts those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from retrofox.anatomy import LOGIT_BYTES, inner_model, logits_from_hidden, require_known_tokens, vocabulary_size
from retrofox.evaluation.needles.prompts import Prompt
from retrofox.generation.generate import complete
from retrofox.loading.opened import Opened

BATCH_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 17}
"""Tokens of a batch where `batch` is "auto"; on a GPU that runs out of memory, less."""


@dataclass(frozen=True)
class Verdict:
    """What a model does at one value.

    Attributes:
        found: the rule above.
        log_probabilities: ln p of each of the value's tokens after the true earlier ones, nats; empty where generated.
        emitted: tokens that greedy decoding emits, up to the first that differs from the value's.
    """

    found: bool
    log_probabilities: tuple[float, ...]
    emitted: list[int]


Advance = Callable[[int], Any]


@torch.no_grad()
def teacher_forced(
    opened: Opened, prompts: Sequence[Prompt], batch: int | str, advance: Advance
) -> list[list[Verdict]]:
    """Verdicts on each prompt's values, from one forward pass over prompt and answer.

    Sequences of like length share a batch and are padded at the end, out of sight of every real token, so no mask is
    needed; no cache is kept, and only the answers' positions go through the language-model head.

    Args:
        batch: prompts run at one time; "auto": as many as BATCH_TOKENS allows, fewer where a GPU's memory is short.
        advance: called after each batch with the tokens done.

    Raises:
        ValueError: out of memory, logits that are no numbers, or a token outside the model's vocabulary.
    """
    sequences = [_sequence(prompt) for prompt in prompts]
    require_known_tokens(opened.model, max(int(ids.max()) for ids, _ in sequences))

    def judge(members: list[int]) -> list[list[Verdict]]:
        return _judge(opened, [sequences[n] for n in members])

    return _in_batches(judge, [len(ids) for ids, _ in sequences], batch, opened.device, advance)


def generated(opened: Opened, prompts: Sequence[Prompt], batch: int | str, advance: Advance) -> list[list[Verdict]]:
    """The same by greedy decoding with a cache: each value is generated after the prompt and the true earlier text.

    Two tokens more than the value has are generated, so that `emitted` can be read on.
    """
    places: list[tuple[int, list[int], list[int]]] = []  # prompt, what is read, what should be emitted
    for number, prompt in enumerate(prompts):
        read = prompt.token_ids.tolist()
        for value in prompt.values:
            read = [*read, *value.given]
            places.append((number, read, value.answer))
            read = [*read, *value.answer]

    def judge(members: list[int]) -> list[Verdict]:
        longest = max(len(places[n][2]) for n in members) + 2
        answers = complete(opened, [places[n][1] for n in members], longest)
        verdicts = []
        for n, ids in zip(members, answers, strict=True):
            answer = places[n][2]
            verdicts.append(Verdict(ids[: len(answer)] == answer, (), ids[: len(answer) + 2]))
        return verdicts

    sizes = [len(read) + len(answer) + 2 for _, read, answer in places]
    result: list[list[Verdict]] = [[] for _ in prompts]
    for (number, _, _), verdict in zip(places, _in_batches(judge, sizes, batch, opened.device, advance), strict=True):
        result[number].append(verdict)
    return result


def tokens_read(prompts: Sequence[Prompt], generate: bool) -> int:
    """What `advance` adds up to."""
    if not generate:
        return sum(prompt.tokens for prompt in prompts)
    total = 0
    for prompt in prompts:
        read = prompt.length
        for value in prompt.values:
            read += len(value.given) + len(value.answer)
            total += read + 2
    return total


def same_words(text: str, answer: str) -> bool:
    """Whether a text begins with the answer's words, case, spaces and punctuation aside."""
    wanted = _words(answer)
    return _words(text)[: len(wanted)] == wanted


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _sequence(prompt: Prompt) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(prompt and answer as token ids, where each value starts and ends in them)."""
    pieces, spans, at = [prompt.token_ids], [], prompt.length
    for value in prompt.values:
        at += len(value.given)
        spans.append((at, at + len(value.answer)))
        at += len(value.answer)
        pieces += [np.asarray([*value.given, *value.answer], np.int32)]
    return np.concatenate(pieces), spans


def _judge(opened: Opened, members: list[tuple[np.ndarray, list[tuple[int, int]]]]) -> list[list[Verdict]]:
    ids = np.zeros((len(members), max(len(own) for own, _ in members)), np.int64)
    for row, (own, _) in enumerate(members):
        ids[row, : len(own)] = own
    places = [(row, at) for row, (_, spans) in enumerate(members) for start, end in spans for at in range(start, end)]
    rows, columns = (torch.tensor(x, device=opened.device) for x in zip(*places, strict=True))
    token_ids = torch.from_numpy(ids).to(opened.device)
    hidden = inner_model(opened.model)(input_ids=token_ids, use_cache=False).last_hidden_state
    best, log_p = _read_off(opened, hidden[rows, columns - 1], token_ids[rows, columns])
    if not np.isfinite(log_p).all():
        raise ValueError(
            f"the logits of {opened.name} are no numbers at a prompt of {ids.shape[1]} tokens: the weights are "
            "damaged, or too large for this dtype"
        )
    verdicts, done = [], 0
    for own, spans in members:
        verdicts.append([])
        for start, end in spans:
            stop = done + end - start
            verdicts[-1].append(_verdict(best[done:stop].tolist(), own[start:end].tolist(), log_p[done:stop].tolist()))
            done = stop
    return verdicts


def _verdict(best: list[int], answer: list[int], log_p: list[float]) -> Verdict:
    same = next((n for n, (one, other) in enumerate(zip(best, answer, strict=True)) if one != other), len(answer))
    return Verdict(same == len(answer), tuple(log_p), best[: same + 1])


def _read_off(opened: Opened, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(argmax (N,), ln p of the targets (N,)) at hidden states (N, hidden_size), a few at a time."""
    budget = LOGIT_BYTES.get(opened.device.type, LOGIT_BYTES["cpu"])
    step = max(1, budget // (4 * vocabulary_size(opened.model)))
    best, log_p = [], []
    for some, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        logits = logits_from_hidden(opened.model, some).float()
        best.append(logits.argmax(-1))
        log_p.append(-F.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(best).cpu().numpy(), torch.cat(log_p).cpu().numpy()


def _in_batches(
    judge: Callable[[list[int]], list[Any]],
    sizes: Sequence[int],
    batch: int | str,
    device: torch.device,
    advance: Advance,
) -> list[Any]:
    """judge() of all items, given by their numbers, the longest first; in the items' order."""
    budget = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    results: list[Any] = [None] * len(sizes)
    start = 0
    while start < len(order):
        longest = sizes[order[start]]
        count = max(1, budget // longest) if isinstance(batch, str) else batch
        members = order[start : start + count]
        try:
            verdicts = judge(members)
        except torch.cuda.OutOfMemoryError as error:
            if not isinstance(batch, str) or len(members) == 1:
                raise ValueError(
                    f"the GPU ran out of memory at batch {len(members)} x {longest} tokens; "
                    f"{'lower the batch or the lengths' if len(members) > 1 else 'lower the lengths'}, "
                    "or load the model in bfloat16"
                ) from error
            verdicts = None
        if verdicts is None:
            budget = longest * (len(members) // 2)
            torch.cuda.empty_cache()
            continue
        for n, verdict in zip(members, verdicts, strict=True):
            results[n] = verdict
        advance(sum(sizes[n] for n in members))
        start += len(members)
    return results
