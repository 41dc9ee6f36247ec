"""The Pro parts: exact identities at the start, each formula, caches, documents, padding, calibration, training."""

import pytest
import torch
from transformers import DynamicCache

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attention_mode, is_new_tensor
from retrofox.fox_spec import PRO_PARTS
from retrofox.model.modeling_fox import CACHE, HeadNorm, OutputGate, Shift
from tests.model.conftest import logits

LENGTH = 24
MODULES = {
    "qk-norm": {"q_norm_fox", "k_norm_fox"},
    "output-norm": {"output_norm"},
    "output-gate": {"output_gate"},
    "k-shift": {"k_shift"},
    "v-shift": {"v_shift"},
}
IDENTITIES = ("output-gate", "k-shift", "v-shift")
TRANSFORMER_PRO = {"gate": "none", "rope": "keep", "pro": "all"}


@pytest.fixture(scope="module", params=[*PRO_PARTS, "all", "official", "transformer"])
def fox(request, pico_fox):
    """A stirred model with one part, with all, with all of the authors' code, and Transformer (Pro): no gates."""
    if request.param == "official":
        return pico_fox(pro=(*PRO_PARTS, "official"))
    return pico_fox(**(TRANSFORMER_PRO if request.param == "transformer" else {"pro": request.param}))


def close(actual, expected, tolerance=5e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("part", PRO_PARTS)
def test_each_part_adds_its_own_float32_modules(pico_llama, part):
    model = retrofox.convert(pico_llama().to(torch.bfloat16), fox=FoxSpec(gate="none", pro=(part,)))
    added = {name: p for name, p in model.named_parameters() if is_new_tensor(name)}
    assert {name.split(".")[-2] for name in added} == MODULES[part]
    assert {p.dtype for p in added.values()} == {torch.float32}
    assert all(".self_attn." in name for name in added)


@pytest.mark.parametrize("part", IDENTITIES)
def test_output_gate_and_shifts_start_as_exact_identities(pico_llama, tokens, path, part):
    spec = FoxSpec(rope="keep", half_life=(2.0, 100.0))
    without = retrofox.convert(pico_llama(), fox=spec)
    spec.pro = (part,)
    assert torch.equal(logits(retrofox.convert(pico_llama(), fox=spec), tokens), logits(without, tokens))


def test_a_familys_own_qk_norm_is_kept_instead_of_a_second_one(pico_base, tokens):
    base = pico_base("qwen3")
    model = retrofox.convert(base, fox=FoxSpec(rope="keep", gate="none", pro=("qk-norm",)))
    assert not [name for name, _ in model.named_parameters() if is_new_tensor(name)]
    assert torch.equal(logits(model, tokens), logits(base, tokens))


def test_original_mode_runs_without_the_parts(fox, pico_llama, tokens, path):
    assert (logits(fox, tokens) - logits(pico_llama(), tokens)).abs().max() > 0.05
    with attention_mode(fox, "original"):
        close(logits(fox, tokens), logits(pico_llama(), tokens), 1e-5)


def test_head_norm_formula():
    norm = HeadNorm(3, 4, 1e-6)
    torch.nn.init.normal_(norm.gain)
    x = torch.randn(2, 5, 3, 4)
    expected = torch.stack([torch.nn.functional.rms_norm(x[:, :, h], (4,), norm.gain[h], 1e-6) for h in range(3)], 2)
    close(norm(x), expected, 1e-6)


def test_output_gate_formula():
    gate = OutputGate(6, 3, 4)
    out, hidden = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 6)
    assert torch.equal(gate(out, hidden), out)
    torch.nn.init.normal_(gate.weight)
    close(gate(out, hidden), out * 2 * torch.sigmoid(hidden @ gate.weight.T).view(2, 5, 3, 4), 1e-6)


@pytest.mark.parametrize("from_zero", [False, True])
def test_shift_formula(from_zero):
    shift = Shift(6, 3, from_zero)
    states, before, hidden = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 5, 6)
    joined = torch.tensor([[True, True, False, True, True], [False, True, True, True, True]])
    assert torch.equal(shift(states, before, joined, hidden), states)
    torch.nn.init.normal_(shift.weight)
    torch.nn.init.ones_(shift.gain)  # the paper's form: alpha k_{t-1} + (1 - alpha) k_t
    alpha = torch.sigmoid(hidden @ shift.weight.T)[..., None]
    previous = torch.cat([before[:, None], states[:, :-1]], 1)
    previous = torch.where(joined[..., None, None], previous, 0.0 if from_zero else states)
    close(shift(states, before, joined, hidden), alpha * previous + (1 - alpha) * states, 1e-6)
    first = alpha[:, :1] * (0.0 if from_zero else states[:, :1]) + (1 - alpha[:, :1]) * states[:, :1]
    close(shift(states[:, :1], None, None, hidden[:, :1]), first, 1e-6)


def test_a_layer_with_all_parts_is_the_formula(pico_fox):
    model = pico_fox(pro="all", rope="drop", gate="none")
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(4))
    heads = lambda flat: flat.unflatten(-1, (-1, 8))  # noqa: E731  (a name for a reshape)
    joined = torch.arange(LENGTH)[None] > 0
    q = layer.q_norm_fox(heads(layer.q_proj(x)))
    k = layer.k_norm_fox(layer.k_shift(heads(layer.k_proj(x)), None, joined, x))
    v = layer.v_shift(heads(layer.v_proj(x)), None, joined, x)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = layer.o_proj(layer.output_gate(layer.output_norm(out), x).flatten(2))
    positions = torch.arange(LENGTH)[None]
    rotary = model.model.rotary_emb(x, positions)
    actual, _ = layer(x, position_embeddings=rotary, attention_mask=None, position_ids=positions)
    close(actual, expected, 1e-5)


def test_an_offloaded_cache_is_refused_by_the_shifts(pico_fox, tokens):
    model = pico_fox(pro=("k-shift",))
    cache = DynamicCache(config=model.config)
    logits(model, tokens, **{CACHE: cache})
    cache.offloading = True
    with pytest.raises(ValueError, match="offloaded"):
        model(tokens[:, :1], **{CACHE: cache})


def test_gradients_reach_every_part_from_the_first_step(pico_llama, tokens):
    model = retrofox.convert(pico_llama(), fox=FoxSpec(half_life=(2.0, 100.0), pro=PRO_PARTS)).train()
    model(tokens, labels=tokens).loss.backward()
    missing = {n.split("self_attn.")[-1] for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert missing == {"k_shift.weight", "v_shift.weight"}, "only the shifts' weights wait for their gains to leave 0"


def test_parts_by_name():
    assert FoxSpec.from_dict({"pro": "all"}).pro == PRO_PARTS
    assert FoxSpec.from_dict({"pro": "none"}).pro == ()
    assert FoxSpec.from_dict({"pro": "k-shift,output-gate"}).pro == ("k-shift", "output-gate")
    with pytest.raises(ValueError, match="did you mean 'qk-norm'"):
        FoxSpec.from_dict({"pro": "qknorm"})
