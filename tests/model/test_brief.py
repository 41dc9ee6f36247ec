"""Tokens through plain layers on a CPU in fewer operations: the same logits, and only where layers are plain."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LogitsProcessorList, StaticCache
from transformers.models.llama import modeling_llama

from retrofox.model import brief as passes
from retrofox.model import captured
from retrofox.model.brief import brief
from retrofox.model.cache import CACHE

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
PLAIN: dict[str, dict[str, Any]] = {
    "partial": {"rope": "partial"},
    "kept": {"rope": "keep"},
    "dropped": {"rope": "drop"},
    "interpolated": {"rope": "interpolate", "rope_factor": 4.0, "rope_length": 128},
    "sinks": {"sink_tokens": 3, "prune": -6.0},
}
MLP = ("gate", "up", "down")
OTHERS: dict[str, dict[str, Any]] = {
    "pro": {"pro": ("qk-norm", "output-norm", "output-gate", "k-shift", "v-shift")},
    "log n": {"log_n": 16},
    "no gate": {"gate": "none", "rope": "keep"},
    "fixed": {"gate": "fixed"},
}


def both(monkeypatch, model, ids, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of brief steps and of the layers' own, after their logits were found equal."""
    found = []
    for own in (False, True):
        with monkeypatch.context() as patch:
            if own:
                patch.setattr(captured, "brief", lambda model: contextlib.nullcontext())
            seen: list[torch.Tensor] = []
            noted: Any = lambda input_ids, scores, seen=seen: seen.append(scores.clone()) or scores  # noqa: E731
            ids_ = model.generate(ids, logits_processor=LogitsProcessorList([noted]), **OPTIONS | options)
            found.append((ids_, seen))
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    return found[0][0], found[1][0]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 288, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("spec", PLAIN)
def test_tokens_and_logits_are_those_of_the_layers_own(pico_fox, monkeypatch, spec, rows):
    model = pico_fox(**PLAIN[spec])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_()
    with brief(model) as found:
        assert len(found.weights) == model.config.num_hidden_layers
    ours, theirs = both(monkeypatch, model, tokens(rows, 40))
    assert torch.equal(ours, theirs)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("spec", OTHERS)
def test_layers_with_more_in_them_are_left_alone(pico_fox, spec):
    model = pico_fox(**OTHERS[spec])
    with brief(model) as found:
        assert len(found.weights) == 0
    model = pico_fox()
    layers = model.model.layers
    layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    layers[1].mlp.act_fn = nn.GELU()
    with brief(model) as found:
        assert len(found.weights) == 1
        assert "forward" not in layers[0].__dict__
    layers[1].self_attn.mode = "open"
    with brief(model) as found:
        assert len(found.weights) == 0


def test_padded_rows_documents_gradients_autocast_and_other_dtypes_take_the_layers_own_way(pico_fox, monkeypatch):
    model, ids = pico_fox(), tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    ours, theirs = both(monkeypatch, model, ids, attention_mask=mask)
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        for call in ({"attention_mask": mask}, {"cu_seqlens": torch.tensor([0, 12, 30, 60])}):
            expected = model(ids, **call).logits
            with brief(model):
                assert torch.equal(model(ids, **call).logits, expected)
    expected = model(ids).logits
    with brief(model):  # gradients are recorded
        found = model(ids).logits
        assert torch.equal(found, expected)
        found.sum().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        with brief(model):
            assert torch.equal(model(ids).logits, expected)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        expected = model(ids).logits
        with brief(model):
            assert torch.equal(model(ids).logits, expected)


def test_a_cache_goes_on_from_brief_steps(pico_fox):
    """Sums that brief steps left are continued by an ordinary call, cut back, and continued again."""
    model, ids = pico_fox(), tokens(1, 30)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        for cut in (0, 3):
            cache = model(ids[:, :10], use_cache=True)[CACHE]
            with brief(model):
                for n in range(10, 25):
                    model(ids[:, n : n + 1], **{CACHE: cache})
                if cut:
                    cache.crop(-cut)
                    for n in range(25 - cut, 25):
                        model(ids[:, n : n + 1], **{CACHE: cache})
            last = model(ids[:, 25:], **{CACHE: cache}).logits[:, -1]
            torch.testing.assert_close(last, whole, atol=1e-5, rtol=1e-4)
            sums = cache.layers[0].cumulative()
            assert torch.equal(sums[0], sums[0].sort(-1, descending=True).values)


@pytest.mark.parametrize("cuts", [(700,), (1, 40, 300), (1600, 1601), (2, 3)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("spec", PLAIN)
def test_prompts_have_the_logits_and_the_cache_of_the_layers_own(pico_fox, spec, rows, cuts):
    """In one call and in several, then a token more from what they left."""
    model, ids = pico_fox(**PLAIN[spec]), tokens(rows, cuts[-1] + 1)
    found = []
    with torch.no_grad():
        for run in (brief(model), contextlib.nullcontext()):
            cache, logits = DynamicCache(config=model.config), []
            with run:
                for start, end in zip((0, *cuts), (*cuts, cuts[-1] + 1), strict=True):
                    out = model(ids[:, start:end], **{CACHE: cache}, output_hidden_states=True)
                    logits += [out.logits, *(x[:, :1] for x in out.hidden_states)]
            found.append((torch.cat([x.flatten() for x in logits]), cache.layers[1]))
    (ours, own), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    for name in ("keys", "values", "sums"):
        torch.testing.assert_close(getattr(own, name), getattr(expected, name), atol=2e-5, rtol=1e-4)


def test_a_prompt_without_a_cache_and_with_a_static_one(pico_fox):
    model, ids = pico_fox(), tokens(2, 50)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with brief(model):
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=2e-5, rtol=1e-4)
            static = StaticCache(config=model.config, max_cache_len=64)
            torch.testing.assert_close(model(ids, **{CACHE: static}).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("spec", PLAIN)
def test_a_prompt_of_one_token(pico_fox, monkeypatch, spec, rows):
    model, ids = pico_fox(**PLAIN[spec]), tokens(rows, 1)
    with torch.no_grad(), brief(model), monkeypatch.context() as patch:
        for layer in model.model.layers:
            patch.setattr(type(layer), "forward", None)  # the layers' own isn't called
        model(ids, **{CACHE: DynamicCache(config=model.config)})
    ours, theirs = both(monkeypatch, model, ids)
    assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("said", "few"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t: avx2 avx512f\n", ()),
        ("vendor_id\t: AuthenticAMD\nflags\t: avx2 avx512f\n", (2, 3, 5)),
        ("vendor_id\t: AuthenticAMD\nflags\t: avx2\n", ()),
        (None, ()),
    ],
)
def test_products_are_those_of_linear_layers_below_and_above_what_one_dnn_pays_for(monkeypatch, said, few):
    def opened(*_, **__):
        if said is None:
            raise FileNotFoundError
        return io.StringIO(f"processor\t: 0\n{said}")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", opened)
        chosen, columns, rows_of_few = passes.choices(passes._processor())
    there = torch.backends.mkldnn.is_available()
    assert (chosen is None) == ("Intel" in str(said) or not there)
    assert (columns is None) == ("avx512f" not in str(said) or not (there and torch.backends.mkl.is_available()))
    assert rows_of_few == frozenset(few)
    monkeypatch.setattr(passes, "FEW", rows_of_few)
    monkeypatch.setattr(passes, "ONE_DNN", chosen)
    taken = []
    if chosen is not None:
        monkeypatch.setattr(passes, "ONE_DNN", lambda x, *rest: taken.append(x.shape[0]) or chosen(x, *rest))
    for width, pays in ((192, [700]), (1024, [114, 700])):
        linear = nn.Linear(576, width)
        pays = [*few[:1], *pays]
        for rows in (1, 2, 113, 114, 700):
            x = torch.randn(rows, 576, generator=torch.Generator().manual_seed(rows))
            found = passes.product(passes.linear_of(linear), x, torch.empty(rows, width))
            torch.testing.assert_close(found, linear(x), atol=1e-5, rtol=1e-5)
        assert taken == (pays if chosen is not None else [])
        taken.clear()


@torch.no_grad()
@pytest.mark.parametrize("one_dnn", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 9, 16, 17, 32, 33])
def test_rows_leave_a_layer_in_columns_and_in_parts_as_they_would_in_rows(monkeypatch, rows, bias, one_dnn):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not there")
    torch.manual_seed(0)
    layer = modeling_llama.LlamaDecoderLayer(
        LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, mlp_bias=bias),
        0,
    )
    made: Any = {"o": layer.self_attn.o_proj} | {name: getattr(layer.mlp, f"{name}_proj") for name in MLP}
    layer.post_attention_layernorm.weight.uniform_()
    weights: Any = SimpleNamespace(**{name: passes.linear_of(x) for name, x in made.items()})
    weights.columns = passes.COLUMNS
    weights.second, weights.act = passes.scaling(layer.post_attention_layernorm), nn.SiLU()
    attended, x = torch.randn(2, rows, 48)
    after = x + made["o"](attended)
    expected = after + layer.mlp(layer.post_attention_layernorm(after))
    given = attended.clone(), x.clone()
    monkeypatch.setattr(passes, "ONE_DNN", passes._one_dnn() if one_dnn else None)
    monkeypatch.setattr(passes, "ONE_DNN_PAYS", 0)
    taken, turned = [], passes.turned
    monkeypatch.setattr(passes, "turned", lambda *given: taken.append(given) or turned(*given))
    for columns, part in ((False, 512), (True, 512), (False, 5)):
        monkeypatch.setattr(passes, "TURNED", passes._one_dnn() if columns else None)
        monkeypatch.setattr(passes, "ROWS", part)
        for weights.silu in (True, False):
            room = passes.Room((6, 3, 8, 80, 48), rows, x)
            found = passes.leave(weights, attended, x, room)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert found.is_contiguous()
            assert torch.equal(attended, given[0])
            assert torch.equal(x, given[1])
            assert len(taken) == (3 if columns and rows in passes.COLUMNS else 0)
            taken.clear()


def test_parts_of_a_prompt_are_as_even_as_can_be():
    assert [passes.part_of(n) for n in (1, 1025, 1537, 2048, 2049, 5000)] == [1, 1025, 769, 1024, 1025, 1000]


@torch.no_grad()
def test_a_norm_is_llamas():
    for dtype in (torch.float32, torch.bfloat16):
        norm = modeling_llama.LlamaRMSNorm(48, eps=1e-3).to(dtype)
        norm.weight.normal_(generator=torch.Generator().manual_seed(1))
        x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2), dtype=dtype)
        torch.testing.assert_close(passes.norm((norm.weight, torch.tensor(1e-3)), x), norm(x))


@torch.no_grad()
def test_two_threads_may_end_at_the_same_time(pico_fox):
    model = pico_fox()
    with brief(model) as found:
        for layer in model.model.layers:  # as the other's end does
            del layer.forward
    assert len(found.weights) == 2
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


@torch.no_grad()
def test_threads_do_not_share_what_lies_between_products(pico_fox):
    """Two texts of one length through the same layers at the same time."""
    model, texts = pico_fox(), [tokens(1, 90), tokens(1, 90).flip(1)]
    expected = [model(ids).logits for ids in texts]

    def read(number: int) -> float:
        with torch.no_grad():
            return max(float((model(texts[number]).logits - expected[number]).abs().max()) for _ in range(40))

    with brief(model), concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert max(pool.map(read, (0, 1))) < 1e-4
