"""LoRA: gates trained in full and in the file, refusals, merges proven in a fresh process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import retrofox
from retrofox.config import LoraConfig
from retrofox.conversion.merge import merge
from retrofox.evaluation.gates import inspect
from retrofox.support.files import new_file_mode
from retrofox.training.lora import adapted, add_adapters, assert_gates_saved
from retrofox.training.train import train

# peft 0.21 asks transformers 5.23 by a name that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture
def make_recipe(make_recipe):
    """With adapters, and a rate at which two steps move them."""
    stage = {"tokens": 256, "learning_rate": 3e-2}
    return lambda *stages, **keys: make_recipe(*stages or [stage], **{"lora": {"rank": 2}, **keys})


@pytest.mark.parametrize("dora", [False, True])
def test_gates_are_trained_saved_and_merged(make_recipe, pico_fox, saved, tmp_path, dora):
    """With DoRA, Pro parts too."""
    model = saved(pico_fox(pro="all" if dora else ()), tmp_path / "model")
    recipe = make_recipe(model=str(model), lora={"rank": 2, "dora": dora})
    adapter = Path(train(recipe)["model"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    parts = ("q_norm_fox", "k_norm_fox", "output_norm", "output_gate", "k_shift", "v_shift") if dora else ()
    for part in ("forget_gate", *parts):
        found = [value for name, value in tensors.items() if f".{part}." in name]
        assert found, part
        assert all(value.dtype == torch.float32 for value in found)
    assert not any("output_gate.lora" in name or "forget_gate.lora" in name for name in tensors)
    start = retrofox.load(recipe.model)
    before = start.get_parameter("model.layers.0.self_attn.forget_gate.bias")
    assert not torch.equal(tensors["base_model.model.model.layers.0.self_attn.forget_gate.bias"], before)
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    report = merge(adapter, tmp_path / "merged")
    assert report["relative_difference"] < report["limit"]
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "merged").glob("*.*")} == {new_file_mode()}
    merged, adapted = retrofox.load(tmp_path / "merged"), retrofox.load(adapter)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        difference = (merged(input_ids=ids).logits - start(input_ids=ids).logits).abs().max()
    assert difference > 1e-2  # something was learned, else equality proves nothing
    (tmp_path / "text.txt").write_text("the fox forgets the gate, the gate forgets the fox " * 40)
    found = [inspect(str(x), [str(tmp_path / "text.txt")], length=64) for x in (adapter, tmp_path / "merged")]
    live = [[x["live_share"]["lengths"][0][part] for part in ("ops", "cache")] for x in found]
    assert live[0] == pytest.approx(live[1], rel=1e-3)
    with pytest.raises(ValueError, match="exists"):
        merge(adapter, tmp_path / "merged")


def test_the_seed_decides_where_adapters_begin(make_recipe, tmp_path):
    def norms(name, **values):
        recipe = make_recipe(output=str(tmp_path / name), **values)
        train(recipe)
        return [json.loads(line)["grad_norm"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]

    first = norms("first")
    torch.rand(7)  # what else drew random numbers before decides nothing
    assert norms("second") == first
    assert norms("other", seed=1) != first


def test_fixed_gates_have_nothing_to_be_saved_in_an_adapter(make_recipe, pico_checkpoint, tmp_path):
    recipe = make_recipe(model=str(pico_checkpoint), fox={"half_life": [2, 200], "gate": "fixed"})
    report = merge(train(recipe)["model"], tmp_path / "merged")
    assert report["relative_difference"] < report["limit"]


def test_a_base_that_moved_with_its_adapter_is_found(make_recipe, pico_checkpoint, tmp_path):
    recipe = make_recipe(model=str(pico_checkpoint), fox={"half_life": [2, 200]})
    adapter = Path(train(recipe)["model"])
    assert Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]).is_absolute()
    moved = tmp_path / "elsewhere"
    Path(recipe.output).rename(moved)
    report = merge(moved / "model", tmp_path / "merged")
    assert report["relative_difference"] < report["limit"]
    assert "merged" in json.loads((tmp_path / "merged" / "retrofox.json").read_text())
    (moved / "converted").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="Set base_model_name_or_path"):
        merge(moved / "model", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_adapters_distil_from_the_weights_they_sit_on_and_resume(make_recipe):
    recipe = make_recipe({"objective": "distill", "tokens": 256}, {"tokens": 256}, checkpoint={"every_steps": 1})
    whole = train(recipe)
    out = Path(recipe.output)
    (out / "model" / "COMPLETE").unlink()
    (out / "stage-1-extend" / "checkpoint-2" / "COMPLETE").unlink()
    resumed = train(recipe)
    assert resumed["stages"][1]["resumed_at"] == 1
    assert resumed["stages"][1]["loss_last"] == whole["stages"][1]["loss_last"]


def test_damaged_adapters_are_named(make_recipe, tmp_path):
    adapter = Path(train(make_recipe())["model"])
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole, tensors = file.read_bytes(), load_file(file)

    def refused(reason):
        with pytest.raises(ValueError, match=reason):
            merge(adapter, tmp_path / "merged")
        with pytest.raises(ValueError, match=reason):
            retrofox.load(adapter)
        assert [path.name for path in tmp_path.iterdir() if "merged" in path.name] == []

    save_file({name: value for name, value in tensors.items() if "layers.1.self_attn.forget" not in name}, file)
    refused("lacks model.layers.1.self_attn.forget_gate.weight: it was not saved by .* opened by peft.PeftModel")
    file.write_bytes(whole[:-9])
    refused(r"adapter_model.safetensors is cut short or not a safetensors file")
    file.write_bytes(whole)
    of_base = Path(json.loads(config.read_text())["base_model_name_or_path"]) / "config.json"
    before = of_base.read_text()
    of_base.write_text(json.dumps({**json.loads(before), "fox": {**json.loads(before)["fox"], "horizon": 3.5}}))
    refused(r"was trained on a base with fox\.horizon = None, and .* has 3\.5: convert the base as it was")
    note, trained = adapter / "COMPLETE", (adapter / "COMPLETE").read_text()
    fox = json.loads(before)["fox"]
    earlier = {"yarn_layers": 0} | {name: fox[name] for name in fox if name != "beta_slow"}
    note.write_text(json.dumps({"fox": earlier}))
    of_base.write_text(before)
    retrofox.load(adapter)  # what an earlier version noted says the same
    of_base.write_text(json.dumps({**json.loads(before), "fox": {**fox, "beta_slow": 3.5}}))
    refused(r"was trained on a base with fox\.beta_slow = 1\.0, and .* has 3\.5")
    note.write_text(trained)
    of_base.write_text(before.replace('"fox_llama"', '"llama"'))
    refused(r"is an adapter of .*, which is no converted model: open it by peft.PeftModel")
    of_base.write_text(before)
    for damage in ("{", "[]", "{}"):
        config.write_text(damage)
        refused("adapter_config.json is damaged, or names no base")


def test_a_file_without_its_gates_is_caught(pico_fox, pico_fox_checkpoint, tmp_path):
    model = add_adapters(pico_fox(), LoraConfig(rank=2), str(pico_fox_checkpoint))
    model.save_pretrained(tmp_path)
    assert_gates_saved(tmp_path, model)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in tensors if "forget_gate.bias" in name)
    rounded = {**tensors, name: tensors[name].bfloat16()}
    for damaged in (rounded, {key: value for key, value in tensors.items() if key != name}):
        save_file(damaged, tmp_path / "adapter_model.safetensors")
        with pytest.raises(RuntimeError, match=r"lacks .*forget_gate\.bias in float32"):
            assert_gates_saved(tmp_path, model)


def test_four_bit_bases_learn_as_their_rounded_weights_would(make_recipe, pico_fox, saved, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    model = pico_fox(config={"hidden_size": 128, "intermediate_size": 192, "head_dim": 32})
    wide = saved(model, tmp_path / "wide")
    where = torch.float32, torch.device("cpu")
    four_bits = adapted(wide, LoraConfig(rank=2, quantize="nf4"), *where)
    dense = adapted(wide, LoraConfig(rank=2), *where)
    dense.load_state_dict({name: p for name, p in four_bits.named_parameters() if p.requires_grad}, strict=False)
    layers = {name: module for name, module in four_bits.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert len(layers) == 14
    assert not any("forget_gate" in name for name in layers)
    for name, layer in layers.items():
        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        dense.get_submodule(name).weight.data.copy_(weight)

    def gradients(model):
        ids = torch.arange(80).view(2, 40) + 2
        model.eval()
        with torch.no_grad():  # as the held-out loss is computed before the first step
            model(input_ids=ids)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    wanted = gradients(dense)
    for name, gradient in gradients(four_bits).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    recipe = make_recipe(model=str(wide), lora={"rank": 2, "quantize": "nf4"})
    assert merge(train(recipe)["model"], tmp_path / "merged")["relative_difference"] < 1e-4
