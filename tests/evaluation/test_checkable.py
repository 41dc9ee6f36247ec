"""Checks of instructions: each takes an answer that follows it and none that does not."""

from __future__ import annotations

import pytest

from retrofox.evaluation.instructions import INSTRUCTIONS, checkable_prompts

FORTY = " ".join(["word"] * 40)
EXAMPLES = (
    ("A HORSE RUNS.", "A horse runs."),
    ("a horse runs.", "A horse runs."),
    ("- a\n- b\n- c", "- a\n- b"),
    ("Here:\n1. a\n2. b\n3. c\n4. d\n5. e", "1. a\n2. b\n4. c\n3. d\n5. e"),
    ("A big animal.", FORTY),
    (FORTY, FORTY.removeprefix("word ")),
    ("It is good. It is warm.", "It is good, it is warm."),
    ("Long ago it rained.", "It rained long ago."),
    ("Is it warm?", "Is it warm? Yes."),
    ('Sure: {"name": "tea", "use": "drink"}', '{"name": "tea"}'),
    ("<<The Tea>>", "The Tea"),
    ("In winter the river froze.", "In winter the rivers froze."),
)


@pytest.mark.parametrize(("instruction", "examples"), [*zip(INSTRUCTIONS, EXAMPLES, strict=True)])
def test_a_check_tells_what_follows_the_instruction_from_what_does_not(instruction, examples):
    check = instruction[1]
    assert [check(answer) for answer in (*examples, "")] == [True, False, False]


def test_every_prompt_is_another():
    prompts = [text for text, _ in checkable_prompts()]
    assert len(set(prompts)) == len(prompts) == 144
