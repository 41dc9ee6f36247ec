"""Every supported family: its own logits with gates open and RoPE kept; every mode trained, saved, generated from."""

import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox import FoxSpec, anatomy
from retrofox.acceleration import captured_step
from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.anatomy import attention_mode, attentions, exempt_tokens, inner_model, is_new_tensor, logits_from_hidden
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.model.modeling_fox import FoxMixin
from tests import conftest
from tests.model.conftest import close, logits

MLA, DEEPSEEK = conftest.MLA, conftest.DEEPSEEK
PICO = {**conftest.PICO, "vocab_size": 96, "initializer_range": 0.15}
MIXED = ["sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 24, "layer_types": MIXED}
MOE = {"num_experts_per_tok": 2}
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3}
ROWS = {
    "llama": {},
    "llama 2": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "llama 3.1": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 7},
    "mistral without a window": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA,
    "olmo2": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "cohere2": {"sliding_window": 7, "logit_scale": 0.25, "layer_types": MIXED},
    "ministral": {"sliding_window": 7, "layer_types": MIXED},
    "ministral3": {"rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 128}},
    "mixtral": {"num_local_experts": 4, **MOE},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, **MOE},
    "arcee": {},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 7, "layer_types": MIXED},
    "gemma": {},
    "glm4": {},
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 0.3, **MOE},
    "olmo": {"clip_qkv": 1.0},
    "olmo3": {"sliding_window": 7, "layer_types": MIXED},
    "olmoe": {"num_experts": 4, **MOE},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, **MOE},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.0},
    "starcoder2": {"sliding_window": 7},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 1},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "youtu": MLA,
}
MODES = {
    "keep": {"rope": "keep"},
    "partial": {"rope": "partial", "max_wavelength": 40.0},
    "drop": {"rope": "drop"},
    "interpolate": {"rope": "interpolate", "rope_factor": 4.0},
}
LENGTH = 24


YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2], "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 16,
}  # fmt: skip
TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
}
FIVE_TO_ONE = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 30, "head_dim": 6}
BIASED_AND_TIED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
WIDE = {"head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LARGE = {**DEEPSEEK, **WIDE, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}
UNUSUAL = {
    "llama biased, tied, 5:1 heads of 6, yarn": {**FIVE_TO_ONE, **BIASED_AND_TIED, "rope_parameters": YARN},
    "mistral narrow window, dynamic": {"sliding_window": 3, "rope_parameters": DYNAMIC},
    "qwen2 tied, first layers full": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3 wide heads, biased": {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN},
    "gemma3_text two bases, one scaled": {**GEMMA, "sliding_window": 3, "rope_parameters": TWO_BASES},
    "gemma2 uncapped": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "phi3 longrope": {
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 16,
    },
    "ministral3 queries scaled by position": {
        "rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 8}
    },
    "deepseek_v2 192 and 128, yarn": LARGE,
    "deepseek_v3 192 and 128, yarn, biased": {**LARGE, "attention_bias": True},
    "youtu halves, tied": {**MLA, "rope_interleave": False, "tie_word_embeddings": True},
    "olmo2 biased, llama3": {"attention_bias": True, "rope_parameters": LLAMA3},
}
ROWS_AND_UNUSUAL = {**ROWS, **UNUSUAL}


def make_base(row: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(row.split()[0], **{**PICO, **ROWS_AND_UNUSUAL[row]})
    # transformers before 5.23 runs Gemma 2 through sdpa, which ignores its soft-cap
    options = {"attn_implementation": "eager"} if row == "gemma2" else {}
    return AutoModelForCausalLM.from_config(config, **options).eval()


@pytest.fixture(scope="module", params=ROWS)
def row(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(row):
    return make_base(row)


@pytest.fixture(scope="module")
def fox(base, stir):
    return stir(retrofox.convert(base, fox=FoxSpec(half_life=(2.0, 100.0), max_wavelength=40.0))).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(2, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_every_supported_family_has_a_row_here():
    assert {name.split()[0] for name in ROWS} == set(SUPPORTED)


def test_open_gates_and_rope_kept_are_the_base(base, tokens, path):
    model = retrofox.convert(base, fox=FoxSpec(rope="keep", init="open"))
    expected = logits(base, tokens)
    assert expected.abs().max() > 0.3
    close(logits(model, tokens), expected)


def test_original_mode_is_the_base_also_packed_and_padded(base, fox, tokens, path):
    positions = torch.cat([torch.arange(15), torch.arange(9)])[None]
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    padded = (mask.cumsum(1) - 1).clamp_min(0)
    with attention_mode(fox, "original"):
        packed = logits(fox, tokens[:1], position_ids=positions, use_cache=False)
        close(packed[:, :15], logits(base, tokens[:1, :15]))
        close(packed[:, 15:], logits(base, tokens[:1, 15:]))
        both = logits(fox, tokens, attention_mask=mask, position_ids=padded)
        close(both[1, 5:], logits(base, tokens[1:, 5:])[0])
    assert (logits(fox, tokens) - logits(base, tokens)).abs().max() > 1e-2


def test_a_pickled_model_is_the_model(fox, tokens):
    again = pickle.loads(pickle.dumps(fox))
    assert torch.equal(logits(again, tokens), logits(fox, tokens))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_a_step(base, stir, tokens, mode):
    model = stir(retrofox.convert(base, fox=FoxSpec(half_life=(2.0, 100.0), **MODES[mode]))).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    missing = [n for n, p in model.named_parameters() if is_new_tensor(n) and not (p.grad is not None and p.grad.any())]
    assert missing == []
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad / p.grad.norm().clamp_min(1e-6), alpha=1e-3)
        after = model(tokens, labels=tokens, use_cache=False).loss
        for name, p in model.named_parameters():  # the base's own tensors
            p.copy_(before[name])
    assert after < loss
    base.zero_grad()


def test_saved_and_loaded_gives_equal_logits(fox, tokens, tmp_path):
    fox.save_pretrained(tmp_path)
    loaded = retrofox.load(tmp_path)
    assert type(loaded) is type(fox)
    assert torch.equal(logits(loaded, tokens), logits(fox, tokens))


def test_a_converted_directory_loads(base, tokens, tmp_path):
    base.save_pretrained(tmp_path / "base")
    spec = FoxSpec(half_life=(2.0, 100.0), max_wavelength=40.0)
    retrofox.convert(tmp_path / "base", tmp_path / "out", fox=spec, verify=False)
    close(logits(retrofox.load(tmp_path / "out"), tokens), logits(retrofox.convert(base, fox=spec), tokens), 1e-6)


def test_generation_with_a_cache_equals_generation_without(fox, tokens, path):
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = fox.generate(tokens, use_cache=False, **options)
    assert torch.equal(fox.generate(tokens, **options), plain)
    assert torch.equal(fox.generate(tokens, cache_implementation="static", **options), plain)


def test_a_fixed_cache_gives_the_tokens_of_a_growing_one(fox, tokens, path, monkeypatch):
    """The step that is captured on a GPU, uncaptured here; buffers grow and windows pass within the text."""
    monkeypatch.setattr(captured_step, "LEAST_CAPACITY", 32)
    monkeypatch.setattr(captured_step, "SHIFT_EVERY", 3)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    given = [{}, {"attention_mask": mask}]
    plain = [fox.generate(tokens, **x, **options) for x in given]
    assert "on cpu" in fox.decoded_by
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    for x, expected in zip(given, plain, strict=True):
        assert torch.equal(fox.generate(tokens, **x, **options), expected)
        assert fox.decoded_by == "the step of a captured graph, uncaptured on a CPU"


def test_dropped_positions_are_gone_and_partial_ones_are_not(base, tokens, path):
    stretched = torch.arange(LENGTH)[None] * 3
    mask = torch.ones_like(tokens)
    model = retrofox.convert(base, fox=FoxSpec(rope="drop", gate="none"))
    expected = logits(model, tokens, attention_mask=mask)
    close(logits(model, tokens, attention_mask=mask, position_ids=stretched), expected)
    assert (expected - logits(base, tokens)).abs().max() > 1e-3
    model = retrofox.convert(base, fox=FoxSpec(rope="partial", max_wavelength=40.0, gate="none"))
    assert {sum(m.rotary_fade.fade) for _, m in attentions(model) if m.rotary_fade is not None} <= {1.0, 2.0, 3.0}
    moved = logits(model, tokens, attention_mask=mask, position_ids=stretched)
    assert (moved - logits(model, tokens, attention_mask=mask)).abs().max() > 1e-3


def test_each_layer_says_how_many_tokens_it_exempts_from_decay(fox, tokens, monkeypatch):
    """What `attend` is called with is what convert, inspect and the card report."""
    windows = []
    attend = FoxMixin.attend

    def watched(self, *args, sliding_window=None, **kwargs):
        windows.append((anatomy.sliding_window(self), sliding_window))
        return attend(self, *args, sliding_window=sliding_window, **kwargs)

    monkeypatch.setattr(FoxMixin, "attend", watched)
    logits(fox, tokens)
    assert len(windows) == len(list(attentions(fox)))
    assert all(said == got for said, got in windows)
    sinks = fox.config.fox["sink_tokens"]
    assert [exempt_tokens(m) for _, m in attentions(fox)] == [sinks if got is None else 0 for _, got in windows]


def test_logits_from_hidden_states(base, fox, tokens):
    for model in (base, fox):
        with torch.no_grad():
            hidden = inner_model(model)(tokens).last_hidden_state
            close(logits_from_hidden(model, hidden), model(tokens).logits, 1e-6)


@pytest.mark.parametrize("row", ["deepseek_v2", "deepseek_v3"], indirect=True)
def test_a_latent_takes_the_other_parts(base, stir, tokens, path, tmp_path):
    spec = FoxSpec(half_life=(2.0, 100.0), pro=("output-norm", "output-gate"), gate_heads="kv", log_n=8)
    model = stir(retrofox.convert(base, fox=spec)).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(retrofox.load(tmp_path), tokens), logits(model, tokens))
