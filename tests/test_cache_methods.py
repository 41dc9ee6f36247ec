"""Cache eviction beside the horizon: at ratio 1 nothing changes, evicted keys have no effect, scores by definition."""

from __future__ import annotations

import json
import math
from typing import Any

import cache_methods
import pytest
import torch
from eviction import FUTURE, METHODS, SCORES, SINKS, Evicting

LENGTH, TAIL = 90, 6
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def llama(pico_llama) -> Any:
    return pico_llama(rope_parameters=YARN).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, 288, (LENGTH + TAIL,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("method", METHODS)
def test_ratio_1_is_the_model_itself(llama, ids, method):
    with torch.no_grad():
        whole = llama(ids[None]).logits[0, LENGTH:]
    evicting = Evicting(llama)
    with evicting.installed():
        cache = evicting.prefill(ids[:LENGTH])
        keep = evicting.kept(method, 1.0, torch.zeros(2, 2))
        assert all(layer.all() for layer in keep)
        torch.testing.assert_close(evicting.tail(ids[LENGTH:], cache, keep), whole, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(llama(ids[None]).logits[0, LENGTH:], whole), "the model's attention is its own again"


@pytest.mark.parametrize("method", SCORES)
def test_evicted_keys_have_no_effect_and_kept_ones_have(llama, ids, method):
    evicting = Evicting(llama)
    with evicting.installed():
        cache = evicting.prefill(ids[:LENGTH])
        keep = evicting.kept(method, 0.3, None)
        assert [int(layer.sum()) for layer in keep] == [2 * round(0.3 * LENGTH)] * 2
        before = evicting.tail(ids[LENGTH:], cache, keep)
        for layer, kept in zip(cache.layers, keep, strict=True):
            layer.values[0][~kept] += 1
        assert torch.equal(evicting.tail(ids[LENGTH:], cache, keep), before)
        cache.layers[1].values[0][keep[1]] += 1
        assert (evicting.tail(ids[LENGTH:], cache, keep) - before).abs().max() > 1e-2


def test_expected_attention_is_that_of_gaussian_queries_at_the_next_positions(llama, ids):
    queries = []
    hook = llama.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, i, out: queries.append(out))
    evicting = Evicting(llama)
    with evicting.installed():
        cache = evicting.prefill(ids[:LENGTH])
    hook.remove()
    query = queries[0][0].view(LENGTH, 4, 8)[SINKS:].detach()  # before RoPE
    cos, sin = llama.model.rotary_emb(query, torch.arange(LENGTH, LENGTH + FUTURE)[None])
    turn = torch.zeros(8, 8)
    for n in range(8):
        turn[n, n] += cos[0, :, n].mean()
        turn[n, (n + 4) % 8] += sin[0, :, n].mean() * (-1 if n < 4 else 1)
    key, value = cache.layers[0].keys[0], cache.layers[0].values[0]
    for kv_head in range(2):
        shares = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            mean, spread = query[:, head].mean(0), torch.cov(query[:, head].T, correction=0)
            mean, spread = turn @ mean, turn @ spread @ turn.T
            logits = torch.stack([k @ mean / math.sqrt(8) + k @ spread @ k / 16 for k in key[kv_head, SINKS:]])
            shares.append(logits.softmax(0))
        wanted = sum(shares) / 2 * value[kv_head, SINKS:].norm(dim=-1)
        torch.testing.assert_close(evicting.scores["expected"][0][kv_head, SINKS:], wanted, atol=1e-5, rtol=1e-4)


def test_the_command_writes_rows_of_a_plain_and_a_forgetting_model(pico_checkpoint, pico_fox, saved, tmp_path):
    text = tmp_path / "hay.txt"
    text.write_text("".join(f"A fox crossed field {n}. Rain fell on the mill! " for n in range(200)), encoding="utf-8")
    fox = saved(pico_fox(half_life=(2.0, 1000.0), horizon=4.0), tmp_path / "fox")
    words = f"{pico_checkpoint} {pico_checkpoint}+yarn:4 {fox} --haystack {text} --lengths 400"
    words += f" --ratios 1,.5 --prompts 5 --texts 2 --device cpu --out {tmp_path / 'out.json'}"
    rows = cache_methods.main(words.split())["rows"]
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert [row["method"] for row in rows] == [*("dense", *METHODS) * 2, "horizon"]
    assert {row["prompts"] for row in rows} == {5}
    assert rows[1]["kept"] == pytest.approx(0.5, abs=0.01)
    assert rows[1]["difference"]["mean"] == pytest.approx(rows[1]["loss"] - rows[0]["loss"])
    assert 0 < rows[-1]["kept"] < 1
    assert (tmp_path / "out.png").stat().st_size > 1000
