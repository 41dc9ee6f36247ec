"""The rotary dial: which pairs stay, slow down and go, under every kind of RoPE, layer by layer."""

import inspect
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import retrofox
from retrofox import FoxSpec
from retrofox.acceleration.fused_attention import leading
from retrofox.anatomy import attention_mode, attentions
from retrofox.config_values import trained_length
from retrofox.model import modeling_fox as scores
from retrofox.model.modeling_fox import fades, interpolated
from tests import conftest
from tests.model.conftest import close, logits

PICO = {
    **conftest.PICO, "vocab_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
PAIRS = 8
THETA = {"rope_theta": 10000.0}
SHORT = {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(PAIRS)], "long_factor": [2.0 + i for i in range(PAIRS)]}
KINDS = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 2.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **SHORT, **THETA},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT, **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **SHORT, **THETA},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LONG, **SHORT, **THETA},
}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(2, 96, (1, 24), generator=torch.Generator().manual_seed(1))


def make_base(kind: str, family: str = "llama", **config):
    torch.manual_seed(0)
    values = {**PICO, "rope_parameters": KINDS[kind], **config}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).eval()


def convert(base, **spec):
    return retrofox.convert(base, fox=FoxSpec(**{"gate": "none", **spec})).eval()


class Dialled(torch.nn.Module):
    """A base's rotary module with faded frequencies: what a converted model has to equal."""

    def __init__(self, rotary, fade):
        super().__init__()
        self.rotary: Any
        self.rotary, self.fade = rotary, torch.tensor(fade)

    def forward(self, x, position_ids):
        self.rotary(x, position_ids)  # dynamic and longrope RoPE take their frequencies of this length
        angle = position_ids[..., None].float() * (self.rotary.inv_freq * self.fade)
        angle = torch.cat([angle, angle], -1)
        scaling = self.rotary.attention_scaling
        return (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)


MODES = {
    "keep": {"rope": "keep"},
    "partial": {"rope": "partial", "max_wavelength": 150.0},
    "drop": {"rope": "drop"},
    "interpolate": {"rope": "interpolate", "rope_factor": 4.0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["short", "operator"])
def test_a_dialled_model_is_the_base_with_dialled_frequencies(monkeypatch, kind, mode, path, tokens):
    if path == "operator":
        monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    base = make_base(kind)
    model = convert(base, **MODES[mode])
    [fade] = {tuple(module.rotary_fade.fade) for _, module in attentions(model)}
    assert {"keep": fade.count(1.0) == PAIRS, "drop": fade.count(0.0) == PAIRS}.get(mode, 0 < sum(fade) < PAIRS)
    converted = logits(model, tokens)
    with attention_mode(model, "original"):
        original = logits(model, tokens)
    close(original, logits(base, tokens))
    base.model.rotary_emb = Dialled(base.model.rotary_emb, fade)
    close(converted, logits(base, tokens))
    close(logits(model, tokens), converted, 1e-6)


@pytest.mark.parametrize("mode", ["partial", "interpolate"])
def test_interleaved_rotary_channels_are_dialled_pair_by_pair(mode, tokens):
    base = make_base("default", "cohere2", layer_types=["sliding_attention"] * 2, sliding_window=64)
    model = convert(base, **MODES[mode])
    [fade] = {tuple(module.rotary_fade.fade) for _, module in attentions(model)}
    converted = logits(model, tokens)
    rotary = base.model.rotary_emb

    def dialled(x, position_ids):
        angle = (position_ids[..., None].float() * (rotary.inv_freq * torch.tensor(fade))).repeat_interleave(2, -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    rotary.forward = dialled
    close(converted, logits(base, tokens))


@pytest.mark.parametrize("of_layer", [False, True])
def test_a_wavelength_in_rounded_decimals_selects_the_pair_that_it_was_read_from(of_layer):
    inv_freq = [10000.0 ** (-i / PAIRS) for i in range(PAIRS)]

    def kept(limit: float) -> float:
        values: Any = {"rope": "keep", "layer_max_wavelength": {0: limit}} if of_layer else {"max_wavelength": limit}
        return sum(fades(inv_freq, FoxSpec(**values), 0))

    for number, w in enumerate(inv_freq):
        wavelength = 2 * math.pi / w
        assert kept(float(f"{wavelength:.7g}")) == number + 1
        assert kept(wavelength * (1 - 9e-7)) == number + 1
        assert kept(wavelength * (1 - 2e-6)) == number


@pytest.mark.parametrize("mode", MODES)
def test_the_pairs_that_the_fused_rotary_leaves_alone_are_those_that_nothing_is_done_to(kind, mode, tokens):
    """A gone pair under yarn or longrope still carries the attention scaling: it can't be left alone."""
    model = convert(make_base(kind), **MODES[mode])
    positions = torch.arange(tokens.shape[1])[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, tokens.shape[1], 32), positions)
    scaled = kind in ("yarn", "longrope")
    assert (model.model.rotary_emb.attention_scaling != 1.0) == scaled
    for _, module in attentions(model):
        fade = module.rotary_fade
        pairs = leading(fade, cos, sin, positions)[0].shape[-1]
        assert pairs == (PAIRS if scaled or mode == "interpolate" else fade.fade.count(1.0))
        for part, led, left in zip(fade(cos, sin, positions), leading(fade, cos, sin, positions), (1, 0), strict=True):
            torch.testing.assert_close(led, part[..., :pairs])
            assert torch.equal(part[..., pairs:PAIRS], torch.full((1, tokens.shape[1], PAIRS - pairs), float(left)))


def test_a_layer_can_have_its_own_limit():
    base = make_base("default")
    whole, none = convert(base, rope="keep"), convert(base, rope="drop")
    mixed = convert(base, rope="partial", max_wavelength=30.0, layer_max_wavelength={0: math.inf, 1: 0.0})
    first, second = (module for _, module in attentions(mixed))
    assert first.rotary_fade.kept
    assert second.rotary_fade.gone
    hidden, positions = torch.randn(1, 24, 32), torch.arange(24)[None]
    options = {"position_embeddings": base.model.rotary_emb(hidden, positions), "position_ids": positions}
    for index, (module, reference) in enumerate(((first, whole), (second, none))):
        expected = [m for _, m in attentions(reference)][index](hidden, attention_mask=None, **options)[0]
        close(module(hidden, attention_mask=None, **options)[0], expected, 1e-6)


def test_the_trained_length_of_a_published_longrope_is_that_of_its_opened_config():
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {"max_position_embeddings": 512, "original_max_position_embeddings": 32, "rope_scaling": scaling}
    opened = AutoConfig.for_model("phi3", **PICO | values | {"rope_scaling": dict(scaling)})
    assert trained_length(values) == trained_length(opened) == 32


def test_log_n_scales_the_logits_beyond_the_trained_length(tokens):
    base: Any = make_base("default")
    model = convert(base, rope="keep", log_n=8)
    close(logits(model, tokens)[:, :8], logits(base, tokens)[:, :8])
    assert (logits(model, tokens) - logits(base, tokens))[:, 8:].abs().amax(-1).min() > 1e-5
    layer: Any = base.model.layers[0].self_attn
    hidden = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(2))
    position_ids = torch.arange(24)[None]
    factor = (torch.arange(1, 25).log() / math.log(8)).clamp_min(1.0)
    q, k, v = (p(hidden).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    cos, sin = base.model.rotary_emb(hidden, position_ids)
    rotate = inspect.unwrap(type(layer).forward).__globals__["apply_rotary_pos_emb"]
    q, k = rotate(q * factor[:, None], k, cos, sin)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.o_proj(expected.transpose(1, 2).flatten(2))
    _, module = next(attentions(model))
    out, _ = module(hidden, position_embeddings=(cos, sin), attention_mask=None, position_ids=position_ids)
    close(out, expected)


def test_a_dropped_rotary_stays_dropped_under_torch_compile():
    model = convert(make_base("default"), rope="drop")
    hidden = torch.randn(1, 24, 32)
    position_ids = torch.arange(24)[None]
    _, module = next(attentions(model))
    wrong = (torch.full((1, 24, 16), 3.0), torch.full((1, 24, 16), 2.0))
    options = {"position_embeddings": wrong, "attention_mask": None, "position_ids": position_ids}
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        close(compiled(hidden, **options)[0], module(hidden, **options)[0])


def test_interpolation_is_the_ramp_of_yarn():
    """Beside transformers' own yarn frequencies: inv_freq * fade, whatever its temperature."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=8192 * 4, rope_parameters=yarn)
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    plain = [1e5 ** (-2 * pair / 64) for pair in range(32)]
    ours = torch.tensor(plain) * torch.tensor(interpolated(plain, FoxSpec(rope_factor=4).resolved(8192)))
    turns = [8192 * w / (2 * math.pi) for w in plain]
    ends = [number for number, r in enumerate(turns) if r >= 32 or r <= 1]
    assert len(ends) > 16
    assert torch.allclose(ours[ends], theirs[ends], rtol=1e-5)
    assert ours.diff().max() < 0  # a pair stays slower than the one before it
    step = interpolated(plain, FoxSpec(rope_factor=4, beta_fast=8, beta_slow=8).resolved(8192))
    assert step == [1.0 if r > 8 else 0.25 for r in turns]


def test_interpolation_is_the_default_and_its_length_is_the_bases():
    spec = retrofox.convert(make_base("default"), fox=FoxSpec()).config.fox
    assert (spec["rope"], spec["rope_factor"]) == ("interpolate", 8.0)
    assert spec["rope_length"] == make_base("default").config.max_position_embeddings
    for kind in KINDS:  # servers cut texts at max_position_embeddings; other kinds' frequencies hang on it
        base = make_base(kind).config
        stretched = retrofox.convert(make_base(kind), fox=FoxSpec(rope_factor=4)).config
        times = 4 if kind == "default" else 1
        assert stretched.max_position_embeddings == times * base.max_position_embeddings
        assert trained_length(stretched) == trained_length(base)
    fade = next(attentions(convert(make_base("default"), beta_fast=2, beta_slow=2)))[1].rotary_fade
    assert fade.fade == [1.0 if 64 * w / (2 * math.pi) > 2 else 0.125 for w in fade.inv_freq]
    wrong: Any
    for wrong in (0, -1, math.nan, "8"):
        with pytest.raises(ValueError, match="beta_slow must be a number of turns"):
            FoxSpec(beta_slow=wrong)
    with pytest.raises(ValueError, match="beta_fast 4 must not be below beta_slow 8"):
        FoxSpec(beta_fast=4, beta_slow=8)
    assert FoxSpec(max_wavelength=100).rope == "partial"
    for wrong in (0.5, -1.0, math.inf):
        with pytest.raises(ValueError, match="rope_factor must be"):
            FoxSpec(rope_factor=wrong)
