"""The panel: rows of documents, exact KL, intervals over documents, answers compared, and what it keeps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from retrofox.evaluation.instructions import (
    INSTRUCTIONS,
    ChatPrompt,
    chat_prompts,
    compare_answers,
    followed,
)  # fmt: skip
from retrofox.evaluation.model_difference import summarise_rows, token_differences
from retrofox.evaluation.panel import headline, panel, worst_row
from retrofox.evaluation.panel_texts import SHIPPED, Row, choose_kinds, rows_of
from retrofox.loading.loaded_model import LoadedModel


@pytest.fixture(scope="module")
def models(pico_fox, pico_llama) -> tuple[Any, Any]:
    return pico_fox(), pico_llama()


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """Two kinds in place of the shipped ones: six short documents, and one long one."""
    (tmp_path / "kinds" / "many").mkdir(parents=True)
    for number in range(6):
        (tmp_path / "kinds" / "many" / f"{number}.txt").write_text(f"the fox forgets gate {number}, and so on. ")
    (tmp_path / "kinds" / "one.txt").write_text("int main(void) { return 0; }\n" * 30)
    return [str(tmp_path / "kinds")]


@pytest.fixture
def options(pico_tokenizer) -> dict[str, Any]:
    return {"tokenizer": pico_tokenizer, "progress": False, "length": 64, "tokens": 256}


def test_documents_stand_one_after_the_other_in_rows():
    texts = [np.arange(50), np.arange(100, 190), np.arange(200, 300)]
    rows = rows_of(texts, 64, 200)
    assert [len(row.token_ids) for row in rows] == [64, 64, 64]  # the last 8 are no row
    assert rows[0].token_ids.tolist() == [*range(50), *range(100, 114)]
    assert rows[0].document.tolist() == [0] * 50 + [1] * 14
    assert rows[2].document[-1] == 2


def test_losses_and_kl_are_those_of_the_whole_logits(models):
    model, base = models
    ids = np.random.default_rng(0).integers(2, 288, 70)
    found = token_differences(model, base, ids)
    with torch.no_grad():
        mine, its = (m(torch.tensor(ids)[None]).logits[0, :-1].double().log_softmax(-1) for m in models)
    target = torch.tensor(ids[1:, None])
    assert found[0] == pytest.approx(-mine.gather(1, target)[:, 0].numpy(), abs=1e-4)
    assert found[1] == pytest.approx(-its.gather(1, target)[:, 0].numpy(), abs=1e-4)
    assert found[2] == pytest.approx((its.exp() * (its - mine)).sum(-1).numpy(), abs=1e-4)
    assert found[2].max() > 0.01


def test_vocabularies_of_two_sizes_have_no_kl(models, pico_llama):
    with pytest.raises(ValueError, match="the model scores 288 tokens and the base 300"):
        token_differences(models[0], pico_llama(vocab_size=300), np.arange(2, 60))


def row(document: list[int]) -> Row:
    return Row(np.arange(len(document)), np.array(document))


def found_of(rows: list[Row], differences: list[float]) -> list[np.ndarray]:
    """Base losses of 2, the model's higher by a document's difference, KL 0.5 up to position 3 and 9 beyond."""
    found = []
    for one in rows:
        base = np.full(len(one.document) - 1, 2.0)
        kl = np.where(np.arange(1, len(one.document)) < 4, 0.5, 9.0)
        found.append(np.stack([base + np.array(differences)[one.document[1:]], base, kl]))
    return found


def test_five_documents_are_the_sample():
    rows = [row([0, 0, 0, 1, 1, 1, 1, 2]), row([2, 2, 3, 3, 3, 4, 4, 4])]
    result = summarise_rows(rows, found_of(rows, [0.1, 0.2, 0.3, 0.4, 0.5]), [(0, 2), (4, 8)], 4)
    assert (result["sample"], result["units"], result["documents"], result["tokens"]) == ("documents", 5, 5, 16)
    early, late = result["spans"]
    assert (early["tokens"], early["difference"]["mean"]) == (2, pytest.approx((0.1 + 0.3) / 2))
    assert late["difference"]["mean"] == pytest.approx((3 * 0.2 + 0.3 + 0.4 + 3 * 0.5) / 8)
    low, high = late["difference"]["interval"]
    assert low < late["difference"]["mean"] < high


def test_fewer_documents_leave_the_sample_to_the_rows():
    rows = [row([0] * 8), row([0] * 8), row([0] * 8)]
    result = summarise_rows(rows, found_of(rows, [0.1]), [(0, 8)], 8)
    assert (result["sample"], result["units"]) == ("rows", 3)
    assert result["spans"][0]["difference"]["interval"] == pytest.approx([0.1, 0.1])


def test_the_kl_counts_positions_inside_the_trained_length_alone():
    rows = [row([0] * 8)]
    assert summarise_rows(rows, found_of(rows, [0.0]), [(0, 8)], 4)["kl"]["mean"] == pytest.approx(0.5)
    assert summarise_rows(rows, found_of(rows, [0.0]), [(0, 8)], 8)["kl"]["mean"] > 4


def test_the_worst_row_is_the_headline():
    spans = [{"from": 0, "to": 512, "tokens": 9, "difference": {"mean": 0.01, "interval": [0.0, 0.02]}}]
    more = [{"from": 4096, "to": 8192, "tokens": 9, "difference": {"mean": 0.3, "interval": [0.2, 0.4]}}]
    worst = worst_row({"c": {"spans": spans}, "verse": {"spans": spans + more}})
    said = headline({"worst": worst})
    assert said == "Worst row: verse at 4k-8k, +0.300 nats to the base (+0.200 to +0.400)"
    assert headline({"worst": {**worst, "interval": [-0.1, 0.7]}}).endswith("no clear harm")


def test_every_kind_has_its_row_and_the_files_hold_it(models, texts, options, tmp_path, capsys):
    result = panel(models[0], models[1], texts, tmp_path / "out", **options)
    assert list(result["kinds"]) == ["many", "one"]
    assert [found["sample"] for found in result["kinds"].values()] == ["documents", "rows"]
    assert result["kinds"]["one"]["tokens"] <= 256
    assert [(span["from"], span["to"]) for span in result["kinds"]["one"]["spans"]] == [(0, 4), (32, 64)]
    written = json.loads((tmp_path / "out" / "panel.json").read_text())
    assert written["kinds"] == result["kinds"]
    assert headline(result) in capsys.readouterr().out


def test_a_models_own_answers_are_the_same_and_are_read_as_one_more_kind(models, texts, options):
    result = panel(models[1], models[1], texts, **options, chat=2, quick=True)
    said = result["instructions"]
    assert (said["prompts"], said["same"]["value"], said["difference"]["mean"]) == (2, 1.0, 0.0)
    assert list(result["kinds"]) == ["many", "one", "chat"]


def test_the_loss_of_the_bases_answers_is_each_models_own(models, pico_tokenizer):
    opened = [LoadedModel(model, pico_tokenizer, name, name) for model, name in zip(models, ("m", "b"), strict=True)]
    prompts = [ChatPrompt([5, 6, 7]), ChatPrompt([8, 9])]
    own, its = [[10, 11], [12]], [[10, 12, 13], [12]]
    found = compare_answers(opened[0], opened[1], prompts, own, its)
    assert found["same"]["value"] == 0.5
    for model, name in zip(models, ("loss", "base"), strict=True):
        total = 0.0
        for prompt, reply in zip(prompts, its, strict=True):
            with torch.no_grad():
                log_p = model(torch.tensor([prompt.token_ids + reply])).logits[0].log_softmax(-1)
            total -= sum(log_p[len(prompt.token_ids) + n - 1, token].item() for n, token in enumerate(reply))
        assert found[name]["mean"] == pytest.approx(total / 4, abs=1e-4)


def test_shipped_texts_are_small_many_and_each_named_with_its_licence():
    files = [file for file in SHIPPED.iterdir() if file.name != "LICENCE.md"]
    assert sum(file.stat().st_size for file in files) < 300_000
    assert len(choose_kinds([])) == 11
    licences = (SHIPPED / "LICENCE.md").read_text(encoding="utf-8")
    assert all(file.name in licences for file in files)


def test_the_users_texts_replace_shipped_ones_of_their_kind(tmp_path):
    (tmp_path / "a.c").write_text("int a;")
    kinds = choose_kinds([f"c={tmp_path / 'a.c'}", f"mine={tmp_path / 'a.c'}"])
    assert kinds["c"] == kinds["mine"] == [str(tmp_path / "a.c")]
    assert "verse" in kinds


def test_what_is_no_panel_is_refused(models, texts, options, tmp_path, monkeypatch):
    for change, message in (
        ({"data": ["poems/"]}, r"KIND=PATH, such as verse=poems/, or a directory .*; got 'poems/'"),
        ({"length": 8}, "length must be at least 64"),
        ({"data": [f"chat={texts[0]}"], "chat": 1}, 'the kind "chat" is the base\'s answers'),
        ({"chat": 209}, "chat is a number of prompts, 208 at most, got 209"),
    ):
        with pytest.raises(ValueError, match=message):
            panel(*models, **{"data": texts, "out": tmp_path / "out", **options, **change})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is an empty directory"):  # not the shipped texts in its place
        choose_kinds([str(tmp_path / "empty")])
    monkeypatch.setattr(options["tokenizer"], "chat_template", None)
    with pytest.raises(ValueError, match="no chat template, so it is no instruct model: leave it out"):
        panel(*models, **options, chat=3)
    assert not (tmp_path / "out").exists()


def test_a_directory_of_kinds_takes_the_place_of_the_shipped_texts(tmp_path):
    (tmp_path / "verse").mkdir()
    (tmp_path / "verse" / "a.txt").write_text("O rose")
    logs = [tmp_path / "logs.a.jsonl", tmp_path / "logs.b.jsonl"]
    for file in logs:
        file.write_text('{"text": "started"}\n')
    assert choose_kinds([str(tmp_path)]) == {"verse": [str(tmp_path / "verse")], "logs": [*map(str, logs)]}


def test_a_directory_may_have_an_equals_sign_in_its_name_or_be_named_from_home(tmp_path, monkeypatch):
    folder = tmp_path / "lang=de"
    folder.mkdir()
    (folder / "verse.txt").write_text("O Rose")
    monkeypatch.setenv("HOME", str(tmp_path))
    kinds = {"verse": [str(folder / "verse.txt")]}
    assert choose_kinds([str(folder)]) == choose_kinds(["~/lang=de"]) == kinds


def test_two_of_three_prompts_can_be_checked(pico_tokenizer):
    prompts = chat_prompts(pico_tokenizer, 207)
    assert sum(prompt.check is None for prompt in prompts[:30]) == 10
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 207


def test_instructions_followed_are_counted_for_both_models(pico_tokenizer):
    prompts = [ChatPrompt([5], str.isupper), ChatPrompt([5], str.islower), ChatPrompt([5])]
    own, its = ([pico_tokenizer(text)["input_ids"] for text in texts] for texts in (("A", "B", "c"), ("A", "b", "c")))
    found: Any = followed(pico_tokenizer, prompts, own, its)
    assert (found["prompts"], found["model"], found["base"]) == (2, 0.5, 1.0)
    assert found["difference"]["difference"] == -0.5
    assert followed(pico_tokenizer, prompts[2:], own[2:], its[2:]) is None


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
