"""lm-eval tasks, run for real and offline: batches, lengths, results kept on disk, paired differences."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from retrofox.evaluation import token_scores
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.lm_eval import PRESETS, expand, find_tasks, run_tasks
from retrofox.loading.loaded_model import LoadedModel

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval and its dependencies warn on import
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices", "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
PERPLEXITY = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
LAST = {"output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
LAST |= {"metric_list": [PERPLEXITY, {"metric": "acc"}]}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
ROLLING |= {"metric_list": [{"metric": "byte_perplexity"}]}
GROUP = {"group": "pico_both", "task": ["pico_choice", "pico_last"]}
GROUP |= {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}


def write_task(folder: Path, name: str, data: str, fields: dict) -> None:
    """A task of lm-eval over the lines of a file beside it."""
    files = {"data_files": {"test": f"{folder}/{data}.jsonl"}}
    values = {"task": f"pico_{name}", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **fields}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with three tasks of a dozen documents each, of unequal length."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    words = ["the", "fox", "forgets", "a", "gate", "often"]

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(low, high)))

    choice = [
        {"q": text(3, 30), "choices": [" fox", " gate", f" {text(2, 4)}"], "gold": draw.randrange(3)} for _ in range(12)
    ]
    last = [{"q": text(5, 40), "a": f" {text(1, 2)}"} for _ in range(12)]
    (folder / "choice.jsonl").write_text("\n".join(map(json.dumps, choice)))
    (folder / "last.jsonl").write_text("\n".join(map(json.dumps, last)))
    write_task(folder, "choice", "choice", CHOICE)
    write_task(folder, "last", "last", LAST)
    write_task(folder, "rolling", "last", ROLLING)
    (folder / "group.yaml").write_text(yaml.safe_dump(GROUP))
    return folder


@pytest.fixture(scope="module")
def tasks(folder):
    return find_tasks(["pico_both", "pico_rolling"], str(folder))


@pytest.fixture(params=["pico_llama", "pico_fox"])
def opened(request, pico_tokenizer) -> LoadedModel:
    return LoadedModel(request.getfixturevalue(request.param)(), pico_tokenizer, "pico", "pico")


def test_batches_by_tokens_give_what_requests_give_alone(opened, tasks, monkeypatch):
    batched = run_tasks(opened, tasks, max_length=128, progress=False)
    monkeypatch.setitem(token_scores.BATCH_TOKENS, "cpu", 1)
    alone = run_tasks(opened, tasks, max_length=128, progress=False)
    assert set(alone.metrics) == {"pico_choice", "pico_last", "pico_rolling", "pico_both"}
    for task, metrics in alone.metrics.items():
        for metric, value in metrics.items():
            if "_stderr" not in metric and isinstance(value, float):
                assert batched.metrics[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
    assert batched.documents == alone.documents
    assert set(batched.documents["pico_last"]) == {"acc,none"}  # a perplexity is no mean over documents
    found = [batched.metrics[task]["acc,none"] for task in ("pico_choice", "pico_last")]
    assert batched.metrics["pico_both"]["acc,none"] == pytest.approx(sum(found) / 2)


def test_log_likelihoods_are_those_of_the_models_logits(opened):
    from retrofox.evaluation.harness_model import BatchedModel

    lm = BatchedModel(opened, 128, progress=False)
    draw = random.Random(1)
    pairs = [
        (draw.choices(range(2, 288), k=draw.randint(1, 60)), draw.choices(range(2, 288), k=k % 4 + 1)) for k in range(9)
    ]
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in pairs])
    for (context, continuation), (found, greedy) in zip(pairs, answers, strict=True):
        with torch.no_grad():
            logits = opened.model(torch.tensor([(context + continuation)[:-1]])).logits[0, len(context) - 1 :].float()
        target = torch.tensor(continuation)
        assert found == pytest.approx(-F.cross_entropy(logits, target, reduction="sum").item(), rel=1e-4)
        assert greedy == bool((logits.argmax(-1) == target).all())


def test_a_long_request_loses_its_first_tokens():
    from retrofox.evaluation.harness_model import _scored

    text = _scored([*range(50), 9, 9], 2, 10)
    assert (text.token_ids.tolist(), text.positions.tolist()) == ([*range(41, 50), 9, 9], [9, 10])
    with pytest.raises(ValueError, match="a continuation of 11 tokens does not fit into 10"):
        _scored([1, *[2] * 11], 11, 10)


def test_the_length_asked_for_reaches_lm_eval(pico_fox, pico_llama, pico_tokenizer, folder, tmp_path):
    (tmp_path / "choice.jsonl").write_text(
        "\n".join(json.dumps({"q": "the fox " * 300, "choices": [" gate", " fox"], "gold": n % 2}) for n in range(4))
    )
    write_task(tmp_path, "choice", "choice", CHOICE)
    widths = []
    fox = pico_fox()
    fox.model.register_forward_pre_hook(lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True)
    options: dict = {"tasks": ["pico_ch*"], "include_path": str(tmp_path), "limit": 3, "tokenizer": pico_tokenizer}
    options["progress"] = False
    result = evaluate(fox, pico_llama(), length=300, **options)
    assert max(widths) == 300  # more than the model's max_position_embeddings, to which lm-eval would cut
    assert set(result["tasks"]) == {"model", "base"}
    assert result["task_differences"]["model"]["pico_choice"]["acc,none"]["documents"] == 3
    widths.clear()
    evaluate(fox, length=77, **options)
    assert max(widths) == 77


def test_presets_are_lm_evals_own_names(folder, monkeypatch):
    assert expand(["short", "piqa", "extra"]) == [*PRESETS["short"], "extra"]
    import lm_eval.tasks as own

    folders = ["arc", "hellaswag", "lambada", "longbench", "openbookqa", "piqa", "ruler", "sciq", "super_glue"]
    folders += ["wikitext", "winogrande"]
    root = Path(own.__file__).parent  # all of its folders hold thousands of files
    known = own.TaskManager(include_path=[root / folder for folder in folders], include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: known)
    for names in PRESETS.values():
        assert all(known.match_tasks([name]) == [name] for name in names)
    with pytest.raises(ValueError, match="unknown task nonsense"):
        find_tasks(["nonsense"], str(folder))
    with pytest.raises(FileNotFoundError, match="include_path is not a directory"):
        find_tasks(["pico_choice"], str(folder / "nowhere"))


def test_the_command_line_runs_a_task(pico_checkpoint, pico_fox_checkpoint, folder, tmp_path, run):
    arguments = ("--against", pico_checkpoint, "--tasks", "pico_choice", "--include-path", folder, "--limit", 4)
    more = ("--length", 128)
    code, out, _ = run("eval", pico_fox_checkpoint, *arguments, *more, "--out", tmp_path / "out")
    assert code == 0
    assert "paired by document" in out
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert set(written["tasks"]) == {"model", "base"}
    assert set(written["task_differences"]) == {"model"}
