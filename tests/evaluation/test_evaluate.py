"""Per-token loss: exact values, paired statistics, controls, files, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retrofox.anatomy import attention_mode
from retrofox.evaluation.loss_report import verdicts
from retrofox.evaluation.per_token_loss import PositionSums, bucket_edges
from retrofox.loading.loaded_model import open_model


def tokens_of(tokenizer, path: str) -> list[int]:
    """A document's tokens as training sees them."""
    return [*tokenizer(Path(path).read_text())["input_ids"], tokenizer.eos_token_id]


def whole_losses(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def test_bucket_edges_are_standard_from_4k_and_scaled_below():
    assert bucket_edges(4096) == [0, 512, 2048, 4096]
    assert bucket_edges(32768) == [0, 512, 2048, 4096, 8192, 16384, 24576, 32768]
    assert bucket_edges(65536)[-3:] == [32768, 49152, 65536]
    assert bucket_edges(100_000)[-3:] == [65536, 98304, 100_000]
    assert bucket_edges(5000) == [0, 512, 2048, 4096, 5000]
    assert bucket_edges(1024) == [0, 16, 64, 128, 256, 512, 768, 1024]
    assert bucket_edges(2) == [0, 2]
    assert bucket_edges(100) == [0, 6, 12, 25, 50, 75, 100]  # position 0 has no loss: no bucket for it alone
    assert bucket_edges(4096, reach=1000) == [0, 512, 1000]


def test_documents_shorter_than_the_length_give_the_positions_they_have(pico_llama, measure, capsys):
    result = measure(pico_llama(), length=4096)
    assert result["buckets"][-1]["to"] == result["longest"] < 4096
    assert result["buckets"][0]["documents"] == 3
    assert sum(row["tokens"] for row in result["buckets"]) == result["tokens"] - 3
    assert "no document reaches 4096 tokens" in capsys.readouterr().out


def test_losses_are_summed_by_document_and_bucket():
    sums = PositionSums([np.array([1.0, 2, 3, 4]), np.array([3.0, 5])], [0, 3, 5])
    assert sums.counts.tolist() == [[2, 2], [2, 0]]
    assert sums.sums.tolist() == [[3, 7], [8, 0]]


def test_evaluate_reports_every_line_and_writes_every_file(
    pico_llama, pico_fox, pico_tokenizer, measure, documents, tmp_path, capsys
):
    fox, base = pico_fox(), pico_llama()
    result = measure(fox, base, length=128, out=tmp_path / "out")
    assert [line["key"] for line in result["lines"]] == ["model", "open", "shuffled", "base"]
    assert result["documents"] == 3
    losses = {key: [] for key in ("model", "base")}
    for key, model in (("model", fox), ("base", base)):
        for path in documents:
            ids = torch.tensor([tokens_of(pico_tokenizer, path)[:128]])
            losses[key].append(whole_losses(model, ids)[0])
    for line in result["lines"]:
        if line["key"] in losses:
            assert line["mean"] == pytest.approx(torch.cat(losses[line["key"]]).mean().item(), abs=1e-5)
        assert line["tokens_per_second"] > 0
    first = result["buckets"][0]
    assert first["difference"]["model-base"]["mean"] == pytest.approx(
        first["loss"]["model"]["mean"] - first["loss"]["base"]["mean"], abs=1e-6
    )
    written = json.loads(Path(result["files"]["json"]).read_text())
    assert written["buckets"] == result["buckets"]
    assert written["environment"]["versions"]["torch"] == torch.__version__
    assert Path(result["files"]["png"]).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path(result["files"]["svg"]).read_text()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"eval.json", "per_token_loss.png", "per_token_loss.svg"}
    printed = capsys.readouterr().out
    assert "gates forced open" in printed
    assert "forcing the gates open changes the loss by" in printed


def test_controls_are_the_surgery_modes(pico_fox, pico_tokenizer, measure, documents):
    fox = pico_fox()
    means = {line["key"]: line["mean"] for line in measure(fox, data=documents[0], length=128)["lines"]}
    assert abs(means["shuffled"] - means["model"]) > 1e-4
    ids = torch.tensor([tokens_of(pico_tokenizer, documents[0])[:128]])
    with attention_mode(fox, "open"):
        assert means["open"] == pytest.approx(whole_losses(fox, ids).mean().item(), abs=1e-5)
    assert abs(means["open"] - means["model"]) > 1e-4
    assert [line["key"] for line in measure(fox, controls=False)["lines"]] == ["model"]


@pytest.mark.parametrize(
    ("change", "interval", "word"),
    [
        (0.3, [0.2, 0.4], "gating helps"),
        (-0.3, [-0.4, -0.2], "gating hurts"),
        (0.3, [-0.1, 0.7], "no clear"),
        (5e-5, [4e-5, 6e-5], "no clear"),  # less than anybody would call a change
        (0.3, None, "gating makes no clear difference (one document gives no interval) on this text"),
    ],
)
def test_a_change_is_named_as_its_interval_allows(change, interval, word):
    difference = {"mean": change, "standard_error": None, "interval": interval}
    [sentence] = verdicts({"lines": [{"key": "open", "difference": difference}]})
    assert word in sentence


def test_documents_are_chosen_by_number_and_length(run, on_disk, pico_tokenizer, documents, tmp_path):
    sizes, base = [len(tokens_of(pico_tokenizer, path)) for path in documents], on_disk[0]
    shortest, *others = sorted(sizes)
    for name, value, expected in (
        ("--min-tokens", shortest, sizes),
        ("--min-tokens", shortest + 1, others),
        ("--max-documents", 2, sizes[:2]),
    ):
        out = tmp_path / f"{name}{value}"
        assert run("eval", base, "--data", *documents, "--length", 1000, name, value, "--out", out)[0] == 0
        written = json.loads((out / "eval.json").read_text())
        assert (written["documents"], written["tokens"]) == (len(expected), sum(expected))


def test_models_on_disk_open_through_their_own_loaders(on_disk, measure):
    base, fox = on_disk
    result = measure(fox, base)
    assert [line["label"] for line in result["lines"]] == ["fox", "gates forced open", "gates shuffled", "base"]
    assert result["lines"][0]["difference"]["mean"] == pytest.approx(0, abs=1e-6)


def test_models_of_training_runs_are_called_after_their_runs(on_disk, pico_tokenizer, tmp_path, monkeypatch):
    shutil.copytree(on_disk[1], tmp_path / "run7" / "model")
    for folder, source in ((tmp_path, "run7/model/"), (tmp_path / "run7", "model"), (tmp_path / "run7/model", ".")):
        monkeypatch.chdir(folder)
        assert open_model(source, tokenizer=pico_tokenizer).name == "run7"


def test_names_with_brackets_and_colons_are_printed_whole(on_disk, documents, tmp_path, run):
    model, out, name = tmp_path / "run[lora]:x:", tmp_path / "of[" / "b]", "run[lora]:x:"
    model.symlink_to(on_disk[1])
    short = ["--lengths", 320, "--depths", 1, "--trials", 1]
    for command, options, files in (("eval", ["--no-controls"], 3), ("inspect", [], 3), ("needle", short, 5)):
        code, shown, _ = run(command, model, "--data", documents[0], "--out", out, *options)
        shown = shown.replace("\n", "")  # long lines are wrapped
        assert (code, name in shown, shown.count("of[/b]/")) == (0, True, files)
    code, _, err = run("eval", "no[red]:x:", "--data", documents[0])
    assert code == 2
    assert "no[red]:x:" in err


def test_numbers_are_kept_where_no_figure_can_be_written(on_disk, documents, tmp_path, run):
    short = ["--lengths", 320, "--depths", 1, "--trials", 1]
    for command, options, figure, numbers in (
        ("eval", ["--no-controls"], "per_token_loss.png", "eval.json"),
        ("inspect", [], "half_lives.png", "gates.json"),
        ("needle", short, "needle.png", "needle.json"),
    ):
        (tmp_path / figure).mkdir()  # as a full disk: the file can't be written
        code, _, err = run(command, on_disk[1], "--data", documents[0], "--out", tmp_path, *options)
        assert (code, "can't write" in err, (tmp_path / numbers).is_file()) == (2, True, True)


def test_refusals_say_what_was_given_and_what_to_do(pico_llama, measure, tmp_path, monkeypatch):
    model, empty = pico_llama(), tmp_path / "empty.txt"
    empty.write_text("\n")
    for options, message in (
        ({"data": [str(empty)]}, "no text of"),
        ({"length": 4096, "min_tokens": 4096}, r"tokens or more in .*the longest document has"),
        ({"length": 1}, "length must be at least 2"),
        ({"limit": 3}, "name tasks, or drop it"),
        ({"out": empty / "results"}, r"empty\.txt can't be written to \(it is a file\)"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(model, **options)
    # the superuser may write anywhere
    monkeypatch.setattr("retrofox.support.report.why_unwritable", lambda place: "no" if place == tmp_path else None)
    with pytest.raises(ValueError, match=r"results can't go to .*sub/out: .* can't be written to"):
        measure(model, out=tmp_path / "sub" / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_base_with_another_tokenizer_is_refused(pico_llama, pico_tokenizer, measure, tmp_path):
    pico_llama().save_pretrained(tmp_path)
    other = pico_tokenizer.train_new_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, 270)
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer mismatch: .* as \['.*'\], the model's tokenizer as \['"):
        measure(pico_llama(), str(tmp_path))


def test_a_failed_run_leaves_earlier_results_alone(pico_llama, measure, tmp_path):
    out, broken = tmp_path / "out", pico_llama()
    with torch.no_grad():
        broken.model.embed_tokens.weight[:, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the loss at position 1 of .* is nan in float32: the weights are damaged"):
        measure(broken, out=out)
    assert not out.exists()
    measure(pico_llama(), out=out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match="vocabulary of 60"):
        measure(pico_llama(), pico_llama(vocab_size=60), out=out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
