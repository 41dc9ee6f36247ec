"""Calibration: KL goes down, folding is exact, a run resumes to the same bits, planted decays are found."""

import gzip
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import retrofox
from retrofox.anatomy import attention_mode, attentions
from retrofox.calibration import capture as capture
from retrofox.calibration import fit as fitting
from retrofox.calibration.calibrate import apply_to, calibrate
from retrofox.calibration.half_life import MassByDistance, calibrate_half_lives
from retrofox.calibration.run import fold
from retrofox.calibration.source import Checkpoint
from retrofox.calibration.student import Student, Window, best_constant_gates, divergence, scores, worse
from retrofox.calibration.windows import documents_of, full_windows, pieces
from retrofox.config import validate
from retrofox.conversion.artefact import write
from retrofox.data.sources import DataSource
from retrofox.fox_spec import FoxSpec
from retrofox.model.configuration_fox import bias_from_half_life
from tests.calibration.picos import FAMILIES, SHAPE, SPEC, sharp


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(SHAPE["vocab_size"], (6, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_goes_down_in_every_layer(family, tokens, tmp_path):
    result = calibrate(sharp(family), SPEC, tokens, out_dir=tmp_path, steps=40, progress=False)
    rows = result.report["layers"]
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert row["kl_after"] < 0.9 * row["kl_before"]
        assert all(a <= b for a, b in zip(row["kl_after_by_head"], row["kl_before_by_head"], strict=True))
    assert {"loss_before", "loss_after"} <= rows[0].keys()
    written = json.loads((tmp_path / "calibration.json").read_text())
    assert written["summary"] == result.report["summary"]
    assert (tmp_path / "calibration.csv").read_text().count("\n") == 3
    heads = (tmp_path / "calibration_heads.csv").read_text().splitlines()
    assert heads[0] == "layer,head,kl_before,kl_after,half_life_before_tokens,half_life_after_tokens"
    assert len(heads) == 1 + 2 * SHAPE["num_attention_heads"]
    assert all((tmp_path / name).stat().st_size for name in written["files"].values())
    assert {"heads_png", "heads_svg", "csv"} <= written["files"].keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_reported_are_those_of_the_model_with_the_tensors_in_place(family, tokens, tmp_path):
    base = sharp(family)
    result = calibrate(base, SPEC, tokens, out_dir=tmp_path, steps=10, progress=False)
    held = tokens[-2:]

    def loss(model):
        with torch.no_grad():
            return float(model(input_ids=held, labels=held, use_cache=False).loss)

    chosen = FoxSpec.from_dict({**SPEC.to_dict(), "layer_pairs": result.layer_pairs})
    plain = retrofox.convert(base, fox=chosen)
    summary = result.report["summary"]
    assert loss(base) == pytest.approx(summary["loss_original"], abs=2e-4)
    assert loss(plain) == pytest.approx(summary["loss_before"], abs=2e-4)
    assert loss(apply_to(plain, result)) == pytest.approx(summary["loss_after"], abs=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_refit_folded_equals_refit_applied(family, tokens):
    model = retrofox.convert(sharp(family), fox=SPEC)
    hidden, calls = capture.enter(model, tokens[:1])
    layer = capture.decoder_layers(model)[0]
    attention = layer.self_attn
    _, [(_, block)] = capture.run_original(layer, hidden, calls[0])
    operands = capture.converted_operands(attention, block)
    finish = capture.query_finish(attention, operands, block)
    heads, length, head_dim = operands.query.shape
    refit = torch.eye(head_dim) + 0.2 * torch.randn(
        heads, head_dim, head_dim, generator=torch.Generator().manual_seed(3)
    )
    assert operands.raw_queries is not None
    applied = finish(torch.bmm(operands.raw_queries, refit), 0, length)
    linear = getattr(attention, capture.query_projection(attention) or "")
    for part in ("weight", "bias"):
        if getattr(linear, part) is not None:
            setattr(linear, part, torch.nn.Parameter(fold(getattr(linear, part).detach(), refit)))
    folded = capture.converted_operands(attention, block).query
    assert not torch.allclose(applied, operands.query, atol=0.1)
    torch.testing.assert_close(folded, applied, rtol=1e-4, atol=1e-4)


def one_layer(family, tokens, spec=SPEC):
    """Windows of a pico model's last layer."""
    model = retrofox.convert(sharp(family), fox=spec)
    hidden, calls = capture.enter(model, tokens)
    layer = capture.decoder_layers(model)[-1]
    _, captured = capture.run_original(layer, hidden, calls[-1])
    windows = []
    for original, block in captured:
        converted = capture.converted_operands(layer.self_attn, block)
        finish = capture.query_finish(layer.self_attn, converted, block)
        windows.append(Window(original, converted, finish, spec.sink_tokens, None))
    return windows


@pytest.mark.parametrize(
    ("family", "sink"),
    [(f, s) for f in ("llama", "qwen3", "mistral", "gemma2", "gemma3") for s in (0, 1, 4) if (f, s) != ("mistral", 4)],
)
def test_gradient_of_a_block_is_that_of_kl_and_output_error_written_out(family, sink, tokens):
    spec = FoxSpec(rope="partial", max_wavelength=20.0, sink_tokens=sink)
    [window] = one_layer(family, tokens[:1], spec)
    heads, length, head_dim = window.original.query.shape
    start, stop = 16, 37
    generator = torch.Generator().manual_seed(2)
    student = Student(
        torch.randn(heads, generator=generator),
        0.3 * torch.randn(heads, SHAPE["hidden_size"], generator=generator),
        torch.eye(head_dim) + 0.2 * torch.randn(heads, head_dim, head_dim, generator=generator),
    )
    values = bias, weight, refit = [value.requires_grad_() for _, value in student.parameters()]
    fitting.accumulate(window, student, start, stop, fitting.Scratch())
    found = [value.grad for value in values]

    def logits(operands, query):
        keys = operands.key.repeat_interleave(heads // operands.key.shape[0], 0)
        plain = query @ keys[:, :stop].transpose(1, 2) * operands.scaling
        return plain if operands.softcap is None else operands.softcap * torch.tanh(plain / operands.softcap)

    position = torch.arange(stop)
    distance = position[start:, None] - position
    hidden = (distance < 0) | (distance >= (window.original.window or length))
    assert bool(window.original.window) == (family == "mistral")
    log_f = torch.nn.functional.logsigmoid(bias[:, None] + weight @ window.converted.inputs[:stop].T)
    c = log_f.double().cumsum(1)
    decay = (c[:, start:, None] - c[:, None]).float()
    if window.original.window is None:
        decay = decay * (position >= sink)
    query = window.finish(window.converted.raw_queries[:, start:stop] @ refit, start, stop)
    log_q = (logits(window.converted, query) + decay).masked_fill(hidden, -1e30).log_softmax(-1)
    log_p = logits(window.original, window.original.query[:, start:stop]).masked_fill(hidden, -1e30).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).masked_fill(hidden, 0.0).sum((0, 2)).mean()
    value = window.original.value[:, :stop].repeat_interleave(heads // window.original.value.shape[0], 0)
    error = ((log_q.exp() - log_p.exp()) @ value).square().sum(-1) / value.square().sum(-1).mean(-1, keepdim=True)
    expected = torch.autograd.grad(kl + fitting.OUTPUT_WEIGHT * error.sum(0).mean(), values)
    for (name, _), a, b in zip(student.parameters(), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_folding_leaves_fused_keys_and_values_alone():
    projection = torch.randn(3 * 8 + 5, 6)
    folded = fold(projection, torch.eye(8).repeat(3, 1, 1) * 2)
    assert torch.equal(folded, torch.cat([projection[:24] * 2, projection[24:]]))


def test_resumed_run_equals_uninterrupted(tokens, tmp_path, monkeypatch):
    base = sharp()
    whole = calibrate(base, SPEC, tokens, out_dir=tmp_path / "whole", steps=8, progress=False)
    real = fitting.Fit.run
    calls = []

    def stops_in_second_layer(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(fitting.Fit, "run", stops_in_second_layer)
    with pytest.raises(KeyboardInterrupt):
        calibrate(base, SPEC, tokens, out_dir=tmp_path / "cut", steps=8, progress=False)
    assert not (tmp_path / "cut" / "calibration.json").exists()
    resumed = calibrate(base, SPEC, tokens, out_dir=tmp_path / "cut", steps=8, progress=False)
    assert len(calls) == 3  # layer 0 was not fitted again
    assert resumed.tensors().keys() == whole.tensors().keys()
    for name, value in whole.tensors().items():
        assert torch.equal(resumed.tensors()[name], value), name
    timeless = [{**row, "seconds": 0} for row in whole.report["layers"]]
    assert [{**row, "seconds": 0} for row in resumed.report["layers"]] == timeless
    assert resumed.report["summary"] == whole.report["summary"]


def test_windows_in_groups_leave_the_originals_stream_and_all_steps_as_they_were(tokens, tmp_path, monkeypatch):
    base = sharp()
    whole = calibrate(base, SPEC, tokens, out_dir=tmp_path / "whole", steps=30, progress=False)
    groups = []
    real = fitting.Fit.run

    def noting(fit, windows, steps):
        groups.append((len(windows), steps))
        real(fit, windows, steps)

    monkeypatch.setattr(fitting.Fit, "run", noting)
    monkeypatch.setattr("retrofox.calibration.run.WINDOWS_AT_ONCE", 3)
    grouped = calibrate(base, SPEC, tokens, out_dir=tmp_path / "groups", steps=30, progress=False)
    assert groups == [(3, 22), (1, 8)] * 2
    for a, b in zip(grouped.report["layers"], whole.report["layers"], strict=True):
        assert a["kl_before"] == b["kl_before"]
        assert a["kl_after"] < 1.2 * b["kl_after"] < a["kl_before"]
    assert grouped.report["summary"]["loss_original"] == whole.report["summary"]["loss_original"]


def test_other_settings_in_the_same_directory_are_refused(tokens, tmp_path):
    calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=2, progress=False)
    with pytest.raises(ValueError, match=r"another steps.*resume=False"):
        calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=3, progress=False)
    calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=3, progress=False, resume=False)


def test_a_run_that_fitted_nothing_binds_no_other_to_its_settings(tokens, tmp_path):
    spec = FoxSpec(rope="keep", init="calibrated")
    with pytest.raises(ValueError, match="with T at least 17 tokens"):
        calibrate(sharp(), spec, tokens[:, :16], out_dir=tmp_path, steps=1, progress=False)
    calibrate(sharp(), spec, tokens, out_dir=tmp_path, steps=1, progress=False)


def test_base_and_converted_models_keep_their_tensors(tokens, tmp_path):
    base = sharp()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    plain = retrofox.convert(base, fox=SPEC)
    gates = {name: value.clone() for name, value in plain.state_dict().items()}
    result = calibrate(plain, None, tokens, out_dir=tmp_path, steps=4, progress=False)
    for name, value in gates.items():
        assert torch.equal(plain.state_dict()[name], value), name
    apply_to(plain, result)
    for name, value in before.items():
        assert torch.equal(base.state_dict()[name], value), name
    assert result.rewritten() == sorted(n for n in result.tensors() if "q_proj" in n)
    assert len(result.rewritten()) == 4  # weight and bias of two layers
    changed = {n for n, value in plain.state_dict().items() if not torch.equal(value, gates[n])}
    assert changed == result.tensors().keys()


def test_without_refit_only_gates_differ_and_bias_gates_stay_constant(tokens, tmp_path):
    spec = FoxSpec(rope="partial", max_wavelength=20.0, gate="bias")
    result = calibrate(sharp(), spec, tokens, out_dir=tmp_path, steps=5, refit_queries=False, progress=False)
    assert result.rewritten() == []
    assert {name.rsplit(".", 2)[1] + "." + name.rsplit(".", 2)[2] for name in result.tensors()} == {"forget_gate.bias"}


def test_without_gates_the_queries_alone_are_fitted(tokens, tmp_path):
    spec = FoxSpec(rope="partial", max_wavelength=20.0, gate="none")
    result = calibrate(sharp(), spec, tokens, out_dir=tmp_path, steps=10, progress=False)
    assert result.tensors().keys() == set(result.rewritten())
    assert all(row["kl_after"] < row["kl_before"] for row in result.report["layers"])
    heads = (tmp_path / "calibration_heads.csv").read_text().splitlines()
    assert len(heads) == 1 + 2 * SHAPE["num_attention_heads"]


def test_nothing_to_fit_is_refused(tokens, tmp_path):
    with pytest.raises(ValueError, match="init='calibrated'"):
        calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=0, progress=False)
    with pytest.raises(ValueError, match="refit_queries=True"):
        calibrate(sharp(), FoxSpec(gate="none"), tokens, out_dir=tmp_path, refit_queries=False, progress=False)
    with pytest.raises(ValueError, match="hold 9 out"):
        calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, held_out=9, progress=False)


@pytest.mark.parametrize(
    ("name", "given", "least"), [("steps", -1, 0), ("windows", 0, 1), ("held_out", 0, 1), ("length", 15, 16)]
)
def test_a_count_that_is_too_small_is_named(tokens, tmp_path, name, given, least):
    options: dict[str, Any] = {name: given}
    with pytest.raises(ValueError, match=f"^{name} of a calibration must be {least} or more, got {given}$"):
        calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, progress=False, **options)


def test_a_model_with_refitted_queries_is_not_calibrated_again(pico_checkpoint, tokens, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"The fox forgets gate {n}. " for n in range(200)))
    options = {"fox": SPEC, "verify": False, "calibrate": [str(tmp_path / "text.txt")]}
    retrofox.convert(pico_checkpoint, tmp_path / "out", **options)
    report = json.loads((tmp_path / "out" / "retrofox.json").read_text())["calibration"]
    columns = {"kl_before", "kl_after", "loss_before", "loss_after"}
    assert all(row[c] is not None for row in report["layers"] for c in columns)
    with pytest.raises(ValueError, match=r"rewrote query projections.*calibrate its base model .*pico"):
        calibrate(retrofox.load(tmp_path / "out"), None, tokens, out_dir=tmp_path / "again", steps=2, progress=False)


def test_refit_of_a_projection_that_is_no_plain_linear_is_refused(tokens, tmp_path):
    model = retrofox.convert(sharp(), fox=SPEC)
    for _, attention in attentions(model):
        attention.q_proj = torch.nn.Sequential(attention.q_proj)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"can't fold.*refit_queries=False"):
        calibrate(model, None, tokens, out_dir=tmp_path, steps=2, progress=False)
    calibrate(model, None, tokens, out_dir=tmp_path / "gates", steps=2, refit_queries=False, progress=False)


def test_divergence_is_zero_for_the_same_attention(tokens):
    model = retrofox.convert(sharp(), fox=FoxSpec(rope="keep", gate="data", init="open"))
    hidden, calls = capture.enter(model, tokens[:1])
    layer = capture.decoder_layers(model)[0]
    left, [(original, block)] = capture.run_original(layer, hidden, calls[0])
    converted = capture.converted_operands(layer.self_attn, block)
    window = Window(original, converted, None, 1, None)
    gate = layer.self_attn.forget_gate
    kl = divergence([window], Student(gate.bias.detach(), gate.weight.detach()))
    assert kl.shape == (1, 4)
    torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-6)
    with attention_mode(model, "original"):
        torch.testing.assert_close(capture.through(layer, hidden, calls[0]), left, rtol=1e-5, atol=1e-5)


def test_layers_run_one_by_one_give_the_models_own_losses(tokens):
    base = sharp("qwen3")
    model = retrofox.convert(base, fox=SPEC)
    hidden, calls = capture.enter(model, tokens)
    for number, layer in enumerate(capture.decoder_layers(model)):
        hidden, _ = capture.run_original(layer, hidden, calls[number])
    losses = capture.losses_from(model, tokens, hidden)
    with torch.no_grad():
        expected = base(input_ids=tokens, labels=tokens).loss
    assert float(losses.mean()) == pytest.approx(float(expected), abs=1e-5)


def test_exact_exponential_decays_are_recovered():
    measured = MassByDistance(1)
    length, planted = 512, (2.0, 30.0, 700.0)
    measured.count = np.minimum(256.0, np.arange(length, 0, -1))
    measured.mass = np.stack([measured.count * np.exp(-math.log(2) / h * np.arange(length)) for h in planted])
    for head, half_life in enumerate(planted):
        fitted, explained = measured.fit(head)
        assert fitted == pytest.approx(half_life, rel=1e-4)
        assert explained == pytest.approx(1.0)


def test_planted_decay_is_recovered_from_queries_and_keys():
    """Queries and keys made so that q_i.k_j = -slope (i - j), streamed block by block as a model's are."""
    planted = [4.0 * 16 ** (h / 3) for h in range(4)]
    length = 512
    measured = MassByDistance(1)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).float()
    slopes = math.log(2) / torch.tensor(planted)
    position = torch.arange(length).float()
    query = torch.stack([-slopes[:, None] * position, slopes[:, None].expand(-1, length)], -1)
    key = torch.stack([torch.ones(length), position], -1)[None]
    operands = capture.Operands(query, key, key, 1.0, None, None, torch.zeros(length, 8), None)
    logits = scores(query, key, operands, 0)
    torch.testing.assert_close(logits, -slopes[:, None, None] * distance, rtol=1e-4, atol=1e-3)
    measured.add(operands, 128)
    for head, half_life in enumerate(planted):
        assert measured.fit(head)[0] == pytest.approx(half_life, rel=0.02)


def test_half_lives_of_a_model_are_the_same_for_base_and_converted(tokens):
    base = sharp()
    from_base, table = calibrate_half_lives(base, tokens, 1)
    from_converted, _ = calibrate_half_lives(retrofox.convert(base, fox=SPEC), tokens, 1)
    assert from_base.shape == (2, 4)
    assert torch.equal(from_base, from_converted)
    assert [(row["layer"], row["head"]) for row in table] == [(layer, head) for layer in range(2) for head in range(4)]
    with pytest.raises(ValueError, match="at least 17 tokens"):
        calibrate_half_lives(base, tokens[:, :12], 1)


def test_calibrated_init_sets_the_measured_half_lives(tokens, tmp_path):
    spec = FoxSpec(rope="keep", init="calibrated")
    base = sharp()
    result = calibrate(base, spec, tokens, out_dir=tmp_path, steps=0, progress=False)
    half_lives, _ = calibrate_half_lives(base, tokens, 1)
    model = apply_to(retrofox.convert(base, fox=FoxSpec(rope="keep")), result)
    hidden = torch.randn(1, 3, SHAPE["hidden_size"])
    for number, (_, attention) in enumerate(attentions(model)):
        assert attention.forget_gate is not None
        decay = -attention.forget_gate(hidden).double()
        torch.testing.assert_close(math.log(2) / decay, half_lives[number].expand(1, 3, -1), rtol=1e-3, atol=0)
    assert {p.suffix for p in tmp_path.glob("half_lives.*")} == {".json", ".csv", ".png", ".svg"}
    heads = json.loads((tmp_path / "half_lives.json").read_text())["heads"]
    assert len(heads) == 8


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_directory_is_read_a_layer_at_a_time_with_the_same_result(family, tokens, tmp_path, monkeypatch):
    base = sharp(family)
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    loaded = []
    real = Checkpoint._read

    def counts(self, names):
        loaded.append({name.split(".")[2] for name in names if ".layers." in name})
        return real(self, names)

    monkeypatch.setattr(Checkpoint, "_read", counts)
    options = {"steps": 6, "progress": False}
    layerwise = calibrate(tmp_path / "base", SPEC, tokens, out_dir=tmp_path / "a", **options)
    assert all(len(layers) <= 1 for layers in loaded)
    assert {"0", "1"} == set().union(*loaded)
    whole = calibrate(tmp_path / "base", SPEC, tokens, out_dir=tmp_path / "b", layers_on_disk=False, **options)
    live = calibrate(base, SPEC, tokens, out_dir=tmp_path / "c", **options)
    for name, value in live.tensors().items():
        assert torch.equal(layerwise.tensors()[name], value), name
        assert torch.equal(whole.tensors()[name], value), name
    assert layerwise.report["summary"] == live.report["summary"]
    (tmp_path / "base" / "model.safetensors.index.json").unlink()
    torch.save(base.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        calibrate(tmp_path / "base", SPEC, tokens, out_dir=tmp_path / "d", layers_on_disk=True, **options)


def test_text_files_are_cut_into_windows_and_too_little_text_is_refused(pico_checkpoint, tmp_path):
    text = str(tmp_path / "text.txt")
    (tmp_path / "text.txt").write_text("".join(f"The fox forgets gate {n}. " for n in range(200)))
    options = {"steps": 2, "progress": False}
    result = calibrate(
        pico_checkpoint, SPEC, [text], out_dir=tmp_path / "out", windows=3, held_out=1, length=48, **options
    )
    assert result.report["windows"] == {"fitted": 3, "held_out": 1, "length_tokens": 48}
    with pytest.raises(ValueError, match="more text or a smaller length"):
        calibrate(pico_checkpoint, SPEC, [text], out_dir=tmp_path / "more", length=2000, **options)
    with pytest.raises(FileNotFoundError):
        calibrate(pico_checkpoint, SPEC, [str(tmp_path / "nothing.txt")], out_dir=tmp_path / "none", **options)


def test_short_documents_make_shorter_windows_and_many_files_share(pico_checkpoint, tmp_path):
    lines = [json.dumps({"text": f"The fox forgets gate {n}, then all the gates beside it. " * 3}) for n in range(40)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as more:
        more.write("\n".join(lines) + "\n")
    files = [str(tmp_path / "short.jsonl"), str(tmp_path / "more.jsonl.gz")]
    options = {"steps": 1, "progress": False}
    result = calibrate(pico_checkpoint, SPEC, files, out_dir=tmp_path / "out", windows=3, **options)
    assert result.report["windows"] == {"fitted": 3, "held_out": 2, "length_tokens": 64}
    for name, text in (("empty.txt", ""), ("tiny.txt", "A fox.")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"no text in|3 are needed; give more text"):
            calibrate(pico_checkpoint, SPEC, [str(tmp_path / name)], out_dir=tmp_path / "bad", **options)
    (tmp_path / "latin.txt").write_bytes("Übermut ".encode("latin-1") * 2000)
    with pytest.raises(ValueError, match="not UTF-8"):
        calibrate(pico_checkpoint, SPEC, [str(tmp_path / "latin.txt")], out_dir=tmp_path / "bad", **options)
    assert not (tmp_path / "bad").exists()


def test_one_window_unlike_the_others_does_not_decide_whether_a_fit_is_kept():
    before = torch.tensor([[1.0, 0.3, 0.0], [2.0, 0.3, 0.0]])
    after = torch.tensor([[0.1, 0.4, 0.0], [4.0, 0.3, 0.0]])
    assert worse(before, after).tolist() == [False, True, False]


def test_no_window_begins_with_one_token_twice():
    found = [np.array([7, 7, 7, 1, 2, 3, 4, 4, 5, 6, 1, 2], np.int32), np.array([7, 7, 7, 7], np.int32)]
    plain, bos = (SimpleNamespace(bos_token_id=token) for token in (None, 0))
    assert [piece.tolist() for piece in pieces(found, plain, 4)] == [[7, 1, 2, 3], [4, 5, 6, 1]]
    begun = [np.array([0, 7, 7, 7, 1, 2, 3, 4], np.int32)]
    assert [piece.tolist() for piece in pieces(begun, bos, 4)] == [[0, 7, 7, 7], [0, 1, 2, 3]]
    assert full_windows([np.array([7, 7, 7, 1, 2, 3], np.int32)], plain, 100).tolist() == [[7, 1, 2, 3]]


def test_best_constant_gates_are_those_of_least_divergence(tokens):
    model = retrofox.convert(sharp(), fox=SPEC)
    hidden, calls = capture.enter(model, tokens[:2])
    layer = capture.decoder_layers(model)[0]
    _, captured = capture.run_original(layer, hidden, calls[0])
    attention = layer.self_attn
    windows = [Window(o, capture.converted_operands(attention, b), None, 1, None) for o, b in captured]
    choices = [3.0, 12.0, 50.0, 400.0]
    student = Student(torch.zeros(4))
    best_constant_gates(windows, student, choices)
    each = [divergence(windows, Student(torch.full((4,), bias_from_half_life(h)))) for h in choices]
    best = [bias_from_half_life(choices[i]) for i in torch.stack([kl.mean(0) for kl in each]).argmin(0).tolist()]
    torch.testing.assert_close(student.bias, torch.tensor(best))


def test_half_lives_are_measured_on_windows_of_the_full_trained_length(pico_checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"The fox forgets gate {n}. " for n in range(200)))
    spec = FoxSpec(rope="keep", init="calibrated")
    text = [str(tmp_path / "text.txt")]
    result = calibrate(pico_checkpoint, spec, text, out_dir=tmp_path / "out", steps=0, progress=False)
    assert json.loads((tmp_path / "out" / "half_lives.json").read_text())["length_tokens"] == 128
    assert all((tmp_path / "out" / name).is_file() for name in result.files.values())


def test_a_calibration_reads_what_a_recipe_trains_on(pico_checkpoint, pico_tokenizer, tmp_path):
    """Globs, saved data sets, fields of their own and weights; a text that isn't there is told before any work."""
    text = "a fox forgets what it need not keep. " * 200
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": text, "text": "no"}) + "\n")
    from datasets import Dataset

    Dataset.from_dict({"text": [text]}).save_to_disk(str(tmp_path / "saved"))
    recipe = {"model": str(pico_checkpoint), "output": "out", "stages": [{**STAGE}]}
    train = [f"{tmp_path}/*.txt", {"path": f"{tmp_path}/rows.jsonl", "text_field": "body"}, f"hf:{tmp_path}/saved"]
    sources = validate({**recipe, "data": {"train": train}}).data.read_as()
    one = documents_of([tmp_path / "a.txt"], pico_tokenizer)
    found = documents_of(sources, pico_tokenizer)
    assert [document.tolist() for document in found] == [one[0].tolist()] * 4
    report = write(
        pico_checkpoint,
        tmp_path / "out",
        FoxSpec(init="calibrated"),
        calibrate=sources,
        calibrate_steps=0,
        calibrate_length=32,
        verify=False,
    )
    assert report["calibration"]["half_lives_tokens"]
    assert report["calibration"]["windows"]["length_tokens"] == 32
    with pytest.raises(FileNotFoundError, match="none"):
        write(pico_checkpoint, tmp_path / "two", FoxSpec(init="calibrated"), calibrate=[f"{tmp_path}/none*.txt"])
    assert not list(tmp_path.glob("*two*"))


STAGE = {"objective": "extend", "tokens": 1000, "sequence_length": 64}


def test_sources_share_the_tokens_read_by_weight(pico_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("retrofox.calibration.windows.TOKENS_READ", 400)
    (tmp_path / "a.txt").write_text("the fox " * 1000)
    sources = [DataSource(str(tmp_path / "a.txt"), weight=w) for w in (3.0, 1.0)]
    assert [len(document) for document in documents_of(sources, pico_tokenizer)] == [300, 100]


def test_the_number_of_steps_is_one_number(run):
    import inspect

    from retrofox.calibration.steps import STEPS

    assert inspect.signature(calibrate).parameters["steps"].default == STEPS
    assert inspect.signature(write).parameters["calibrate_steps"].default == STEPS
    shown = " ".join(run("convert", "--help")[1].replace("│", " ").split())
    assert f"[default: {STEPS}]" in shown
