"""Surgery on live models, the gains of added norms, and the parity proof: what it undoes, reports and leaves alone."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attentions, is_new_tensor
from retrofox.conversion.directory import GATES_SHARD
from retrofox.conversion.verify import compare
from retrofox.loading.base import load_base
from retrofox.loading.tokenizers import load_tokenizer
from retrofox.model import modeling_fox as attention_module
from tests.model.conftest import logits

NORMS = FoxSpec(pro=("qk-norm", "output-norm", "output-gate"))
TOKENS = torch.randint(2, 288, (1, 32), generator=torch.Generator().manual_seed(1))


def test_norms_start_at_the_rms_of_their_states(pico_llama):
    base = pico_llama()
    model = retrofox.convert(base, fox=FoxSpec(rope="keep", gate="none", pro=("qk-norm",)))
    seen = {}
    projection = base.model.layers[1].self_attn.q_proj
    hook = projection.register_forward_hook(lambda module, args, out: seen.update(queries=out))
    generator = torch.Generator().manual_seed(0)
    logits_base = base(torch.randint(288, (1, 128), generator=generator)).logits
    hook.remove()
    assert logits_base.isfinite().all()
    rms = seen["queries"].unflatten(-1, (-1, 8)).square().mean((0, 1, 3)).sqrt()
    gain = model.model.layers[1].self_attn.q_norm_fox.gain
    assert gain.std() > 0.01
    torch.testing.assert_close(gain, rms[:, None].expand_as(gain), rtol=0.1, atol=0)  # its norms stood aside


def test_the_fields_of_a_recipe_stand_for_a_spec(pico_llama):
    assert retrofox.convert(pico_llama(), fox={"horizon": 8, "gate_heads": "kv"}).config.fox["horizon"] == 8.0
    with pytest.raises(ValueError, match="did you mean 'horizon'"):
        retrofox.convert(pico_llama(), fox={"horizn": 8})


def test_a_directorys_norms_start_as_those_of_its_live_model(pico_checkpoint, tmp_path):
    live = retrofox.convert(load_base(pico_checkpoint)[0], fox=NORMS)
    report = retrofox.convert(pico_checkpoint, tmp_path / "out", fox=NORMS, verify=False)
    assert report["plan"]["tensors_added"] == 2 * 6
    stored = load_file(tmp_path / "out" / GATES_SHARD)
    expected = {name: value for name, value in live.state_dict().items() if name.endswith(".gain")}
    assert len(expected) == 6
    for name, gain in expected.items():
        torch.testing.assert_close(stored[name], gain, rtol=1e-5, atol=0)
    assert torch.allclose(logits(retrofox.load(tmp_path / "out"), TOKENS), logits(live, TOKENS), atol=1e-5)


def test_a_capped_base_is_compared_with_its_cap(pico_llama, tmp_path):
    values = {k: v for k, v in pico_llama().config.to_dict().items() if k not in ("model_type", "architectures")}
    config = AutoConfig.for_model("gemma2", **{**values, "attn_logit_softcapping": 0.5, "sliding_window": 8})
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    base.save_pretrained(tmp_path / "base")
    assert load_base(tmp_path / "base")[0].config._attn_implementation == "eager"
    retrofox.convert(tmp_path / "base", tmp_path / "out", verify=False)
    assert compare(tmp_path / "base", tmp_path / "out")["equal"]
    base.set_attn_implementation("eager")
    assert compare(base, tmp_path / "out")["equal"]


def test_a_live_model_is_written_into_the_working_directory(pico_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = pico_llama()
    report = retrofox.convert(base, "out", fox=FoxSpec(rope="keep", init="open"))
    assert report["parity"]["equal"]
    assert torch.allclose(logits(retrofox.load("out"), TOKENS), logits(base, TOKENS), atol=1e-5)
    with pytest.raises(ValueError, match="exists: remove it"):
        retrofox.convert(base, "out")


def test_a_live_model_takes_the_tokenizer_of_its_directory_along(pico_checkpoint, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(pico_checkpoint)
    report = retrofox.convert(base, tmp_path / "out")
    assert report["parity"]["text"] == "a fixed text"
    assert load_tokenizer(tmp_path / "out")("fox").input_ids == load_tokenizer(pico_checkpoint)("fox").input_ids


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft under the newest transformers
def test_live_models_that_are_refused(pico_llama, pico_fox):
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="already converted"):
        retrofox.convert(pico_fox())
    model = pico_llama()
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="carries a LoRA adapter"):
        retrofox.convert(model)
    with pytest.raises(ValueError, match=r"tensors of this LlamaModel don't fit .* as AutoModelForCausalLM opens it"):
        retrofox.convert(pico_llama().model)
    model = pico_llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantised"):
        retrofox.convert(model)


def test_frozen_tensors_of_a_live_model_stay_frozen(pico_llama):
    base = pico_llama().requires_grad_(False)
    base.lm_head.weight.requires_grad_(True)
    model = retrofox.convert(base)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "model.layers.0.self_attn.forget_gate.weight" in trained
    assert {name for name in trained if not is_new_tensor(name)} == {"lm_head.weight"}
    assert [name for name, parameter in base.named_parameters() if parameter.requires_grad] == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fox": FoxSpec(init="measured")}, "belong together; got init measured and 0 texts"),
        ({"revision": "main"}, "the model is live"),
        ({"texts": ["text.txt"]}, "belong together; got init slopes and 1 texts"),
    ],
    ids=str,
)
def test_what_a_conversion_in_memory_can_not_honour_is_refused(pico_llama, options, match):
    with pytest.raises(ValueError, match=match):
        retrofox.convert(pico_llama(), **options)


WRONG = {"max_wavelength": "100", "rope_length": [128], "log_n": float("nan"), "half_life": ("a", "b"), "horizon": "x"}
WRONG |= {"layer_max_wavelength": [1], "pro": None, "max_half_life": float("inf")}


@pytest.mark.parametrize("name", WRONG)
def test_a_spec_with_a_value_of_another_kind_names_its_field(name):
    with pytest.raises(ValueError, match=name):
        FoxSpec(**{name: WRONG[name]})


def test_a_base_in_a_relative_path_is_recorded_so_that_it_holds_anywhere(pico_checkpoint, monkeypatch):
    monkeypatch.chdir(pico_checkpoint.parent.parent)
    source = f"{pico_checkpoint.parent.name}/{pico_checkpoint.name}"  # looks like a Hub id
    report = retrofox.convert(source, pico_checkpoint.parent / "out", verify=False)
    assert report["plan"]["spec"]["base"] == str(pico_checkpoint)
    assert "base_model:" not in (pico_checkpoint.parent / "out" / "README.md").read_text()
    live = AutoModelForCausalLM.from_pretrained(source)
    assert retrofox.convert(live).config.fox["base"] == str(pico_checkpoint)


@pytest.fixture
def own_code(pico_fox_checkpoint, remote_code):
    """A model that runs the code beside it."""
    return AutoModelForCausalLM.from_pretrained(pico_fox_checkpoint, trust_remote_code=True)


def test_a_model_with_code_of_its_own_is_told_from_an_unconverted_one(own_code):
    with pytest.raises(ValueError, match=r"trust_remote_code\): open it with retrofox\.load"):
        attentions(own_code)


def test_a_model_with_code_of_its_own_leaves_the_packages_models_theirs(own_code, pico_fox_checkpoint, monkeypatch):
    """Both register an attention function called "fox"; each model must run that of its own file."""
    ours, wanted = retrofox.load(pico_fox_checkpoint), logits(own_code, TOKENS)
    monkeypatch.setattr(attention_module, "attend", lambda call: call.query.transpose(1, 2) * 0)
    assert torch.equal(logits(own_code, TOKENS), wanted)
    assert not torch.allclose(logits(ours, TOKENS), wanted, atol=1e-2)


def test_a_damaged_converted_checkpoint_says_which_file(pico_fox_checkpoint):
    weights = pico_fox_checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short or not a safetensors file"):
        retrofox.load(pico_fox_checkpoint)
    with pytest.raises(ValueError, match="device 'gpu' can't be used here"):
        retrofox.load(pico_fox_checkpoint, device="gpu")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        retrofox.load(pico_fox_checkpoint)
