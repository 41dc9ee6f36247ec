"""Teacher forcing decides what generation would, on a model that has learnt some answers; batches change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import retrofox
from retrofox.evaluation.needles import scoring
from retrofox.evaluation.needles.haystack import Haystack
from retrofox.evaluation.needles.prompts import Prompt, Value, make_prompts
from retrofox.evaluation.needles.scoring import generated, same_words, teacher_forced, tokens_read
from retrofox.evaluation.needles.shares import by_length, wilson_interval
from retrofox.evaluation.needles.tasks import make_task
from retrofox.loading.opened import Opened

SENTENCES = "A fox crossed the field. Rain fell on the mill! Nobody came. Who would? "
MODES = ("easy", "standard", "multi-key", "multi-value")
LEARNT = {"easy": 12, "standard": 12, "multi-key": 5, "multi-value": 5}
"""Of 50 prompts of each mode, how many the model is trained on."""


def ignore(tokens: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """600 tokens, learnt from the tasks themselves, so that prompts are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tasks = [make_task(mode, number, "0") for mode in MODES for number in range(16)]
    texts = [text for task in tasks for text in (*task.needles, task.question)]
    tokenizer.train_from_iterator([SENTENCES * 4, *texts], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    """200 prompts, 50 of each mode."""
    hay = Haystack(tokenizer, np.array(tokenizer(SENTENCES * 60)["input_ids"], np.int32))
    return make_prompts(hay, MODES, [155], [0.0, 0.5], 25, seed=0)


@pytest.fixture(scope="module")
def learnt(prompts, tokenizer, pico_llama) -> Opened:
    """A pico Llama that has learnt the answers to some of the prompts by heart."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = pico_llama(vocab_size=600, max_position_embeddings=512, initializer_range=0.02, **sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    known = [p for n, p in enumerate(prompts) if n % 50 < LEARNT[p.task.mode]]
    draw = np.random.default_rng(0)
    for _ in range(160):
        batch = [read(known[n]) for n in draw.choice(len(known), 8, replace=False)]
        longest = max(len(ids) for ids, _ in batch)
        ids, labels = torch.zeros(8, longest, dtype=torch.long), torch.full((8, longest), -100)
        for row, (own, answer) in enumerate(batch):
            ids[row, : len(own)] = torch.tensor(own)
            labels[row, answer] = torch.tensor(own)[answer]
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return Opened(model.eval(), tokenizer, "learnt", "learnt")


def read(prompt: Prompt) -> tuple[list[int], list[int]]:
    """(prompt and answer as token ids, the positions of the values in them)."""
    ids, positions = prompt.token_ids.tolist(), []
    for value in prompt.values:
        ids += value.given
        positions += range(len(ids), len(ids) + len(value.answer))
        ids += value.answer
    return ids, positions


@pytest.mark.parametrize("converted", [False, True])
def test_teacher_forcing_equals_generation_on_200_prompts(learnt, prompts, converted):
    opened = learnt
    if converted:
        spec = retrofox.FoxSpec(rope="keep", half_life=(1e3, 1e5))
        opened = Opened(retrofox.convert(learnt.model, fox=spec).eval(), learnt.tokenizer, "fox", "fox")
    assert len(prompts) == 200
    forced = teacher_forced(opened, prompts, "auto", ignore)
    decoded = generated(opened, prompts, "auto", ignore)
    outcomes = {mode: [] for mode in MODES}
    for prompt, one, other in zip(prompts, forced, decoded, strict=True):
        assert [v.found for v in one] == [v.found for v in other]
        for mine, theirs in zip(one, other, strict=True):  # what it emits up to its first error, too
            assert mine.emitted == theirs.emitted[: len(mine.emitted)]
        outcomes[prompt.task.mode] += [v.found for v in one]
    for mode, found in outcomes.items():  # else the two could agree on nothing but misses
        assert 0.02 < np.mean(found) < 0.9, f"{mode}: {np.mean(found)}"


def test_log_probabilities_are_the_models_own(learnt, prompts):
    some = prompts[::23]
    for prompt, verdicts in zip(some, teacher_forced(learnt, some, "auto", ignore), strict=True):
        ids, positions = read(prompt)
        with torch.no_grad():
            log_p = learnt.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [log_p[at - 1, ids[at]].item() for at in positions]
        assert [x for v in verdicts for x in v.log_probabilities] == pytest.approx(expected, abs=1e-4)
        best = log_p.argmax(-1)
        assert all(v.found for v in verdicts) == all(best[at - 1] == ids[at] for at in positions)


def test_batches_and_padding_change_no_number(learnt, prompts):
    some = prompts[::11]
    assert len({prompt.tokens for prompt in some}) > 2  # so that batches hold padding
    alone, together = (teacher_forced(learnt, some, batch, ignore) for batch in (1, 7))
    for one, other in zip(alone, together, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert (mine.found, mine.emitted) == (theirs.found, theirs.emitted)
            assert mine.log_probabilities == pytest.approx(theirs.log_probabilities, abs=1e-4)


def test_one_forward_without_cache_and_logits_of_answers_only(learnt, prompts):
    calls, logits = [], []
    hooks = [
        learnt.model.model.register_forward_pre_hook(lambda m, a, k: calls.append(k), with_kwargs=True),
        learnt.model.lm_head.register_forward_hook(lambda m, a, output: logits.append(output.shape)),
    ]
    teacher_forced(learnt, prompts[:6], 6, ignore)
    for hook in hooks:
        hook.remove()
    assert [call["use_cache"] for call in calls] == [False]
    assert all(call.get("attention_mask") is None for call in calls)
    answers = sum(len(value.answer) for prompt in prompts[:6] for value in prompt.values)
    assert sum(shape[0] for shape in logits) == answers


def test_a_token_budget_makes_the_batches_and_the_bar_reaches_its_end(learnt, prompts, monkeypatch):
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 700)
    for judge, generate in ((teacher_forced, False), (generated, True)):
        done: list[int] = []
        judge(learnt, prompts[:9], "auto", done.append)
        assert sum(done) == tokens_read(prompts[:9], generate)
        assert max(done) <= 700
        assert len(done) > 2


def test_a_gpu_that_runs_out_of_memory_gets_smaller_batches(learnt, prompts, monkeypatch):
    expected = teacher_forced(learnt, prompts[:8], 1, ignore)
    widths: list[int] = []
    original = scoring._judge

    def judge(opened: Opened, members: Sequence[Any]) -> Any:
        widths.append(len(members))
        if len(members) > limit:
            raise torch.cuda.OutOfMemoryError
        return original(opened, members)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "_judge", judge)
    limit = 3
    result = teacher_forced(learnt, prompts[:8], "auto", ignore)
    assert widths[:3] == [8, 4, 2]
    assert [[v.found for v in own] for own in result] == [[v.found for v in own] for own in expected]
    with pytest.raises(ValueError, match=r"out of memory at batch 8 x .* lower the batch or the lengths"):
        teacher_forced(learnt, prompts[:8], 8, ignore)
    limit = 0
    with pytest.raises(ValueError, match=r"out of memory at batch 1 x .*; lower the lengths"):
        teacher_forced(learnt, prompts[:8], "auto", ignore)


def test_damaged_weights_and_unknown_tokens_are_told(prompts, tokenizer, pico_llama):
    model = pico_llama(vocab_size=600)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="logits of x are no numbers"):
        teacher_forced(Opened(model, tokenizer, "x", "x"), prompts[:1], "auto", ignore)
    with pytest.raises(ValueError, match="vocabulary of 288"):
        teacher_forced(Opened(pico_llama(), tokenizer, "x", "x"), prompts[:1], "auto", ignore)


def test_each_value_is_judged_after_the_true_earlier_ones(learnt, prompts):
    """The same value behind another one is another question; a miss at the first does not spoil the second."""
    prompt = next(p for n, p in enumerate(prompts) if p.task.mode == "multi-value" and n % 50 < LEARNT["multi-value"])
    first, second = prompt.values[:2]
    wrong = Value(first.given, [*first.answer[:-1], (first.answer[-1] + 1) % 600])
    changed = Prompt(prompt.task, prompt.length, None, prompt.token_ids, (wrong, second))
    ids = [*prompt.token_ids, *wrong.given, *wrong.answer, *second.given, *second.answer]
    with torch.no_grad():
        best = learnt.model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
    at = len(ids) - len(second.answer)
    for judge in (teacher_forced, generated):
        [[miss, then]] = judge(learnt, [changed], 1, ignore)
        assert not miss.found
        assert then.found == (best[at - 1 : -1] == second.answer)


def test_words_are_the_same_whatever_their_case_and_spaces():
    assert same_words(" Count  the red boats, then sleep.", "count the red boats")
    assert not same_words("count the boats", "count the red boats")
    assert not same_words("you should count the red boats", "count the red boats")
    assert not same_words("", "count")


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 10, 0.2366, 0.7634), (0.9, 100, 0.8256, 0.9448)],
)
def test_wilson_intervals_are_the_published_ones(share, count, low, high):
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)


def test_lengths_are_summed_up_over_prompts():
    answers = [{"length": 8, "share": s, "log_probability": p} for s, p in ((1.0, -1.0), (0.5, -2.0), (0.0, -6.0))]
    answers.append({"length": 16, "share": 1.0, "log_probability": None})
    short, long = by_length(answers, [8, 16])
    assert (short["prompts"], short["found"], short["log_probability"]) == (3, 0.5, -3.0)
    assert short["log_probability_error"] == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)
    assert short["interval"] == pytest.approx(wilson_interval(0.5, 3))
    assert (long["log_probability"], long["log_probability_error"]) == (None, None)
