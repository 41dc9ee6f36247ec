"""The peers in benchmarks/generate.py do what they are named for, and its cells hold what the pages read."""

from __future__ import annotations

import json
import sys
from typing import Any

import generate as bench  # pyright: ignore[reportMissingImports]
import pytest
import torch
from transformers import DynamicCache

from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import ids_of


@pytest.fixture(scope="module")
def base(pico_llama) -> Any:
    return pico_llama().eval()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Of the last token, the others being in the cache."""
    model(ids[:, :-1], **{CACHE: cache})
    return model(ids[:, -1:], **{CACHE: cache}).logits


@torch.no_grad()
def test_a_step_in_place_gives_the_dynamic_caches_logits(base):
    ids, cache = ids_of(2, 40), DynamicCache()
    wanted = logits(base, ids, cache)
    layers: list[Any] = cache.layers
    for layer in layers:
        keys, values = (
            torch.cat((x[:, :, :-1], torch.zeros_like(x[:, :, -1:])), 2) for x in (layer.keys, layer.values)
        )
        bench.ROOMS.append((keys, values, torch.tensor([39])))
    before = base.config._attn_implementation
    base.set_attn_implementation(bench.BEST)
    found = base(ids[:, -1:], position_ids=torch.full((2, 1), 39), use_cache=False).logits
    base.set_attn_implementation(before)
    bench.ROOMS.clear()
    torch.testing.assert_close(found, wanted)


def test_streaming_keeps_the_first_and_the_latest_keys(base, monkeypatch):
    monkeypatch.setattr(bench, "KEPT", 16)
    cache: Any
    full: Any
    cache, full, ids = bench.cache_of(base, "base-streaming"), DynamicCache(), ids_of(1, 40)
    logits(base, ids, cache)
    logits(base, ids, full)
    kept, whole = (x.layers[0].keys for x in (cache, full))
    assert cache.get_seq_length() == 40
    torch.testing.assert_close(kept[:, :, :-1], torch.cat((whole[:, :, :4], whole[:, :, -12:-1]), 2))


def test_eight_bits_take_a_byte_and_lose_little(base):
    cache, ids = bench.cache_of(base, "base-fp8"), ids_of(1, 40)
    found, wanted = logits(base, ids, cache), logits(base, ids, DynamicCache())
    assert cache.layers[0].keys.element_size() == 1
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


def test_a_run_measures_every_contender_and_a_second_one_only_what_is_missing(tmp_path, monkeypatch):
    out = tmp_path / "new" / "out.json"
    given = ["generate.py", "--pico", "--device", "cpu", "--dtype", "float32", "--new", "30", "--rounds", "1"]
    given += ["--prefill", "100", "--batches", "1", "--out", str(out)]
    for contexts in ("64", "64,8192"):
        monkeypatch.setattr(sys, "argv", [*given, "--contexts", contexts])
        bench.main()
    report = json.loads(out.read_text())
    assert "; " in report["command"]
    for cell, rows in report["cells"].items():
        assert list(rows) == list(bench.CONTENDERS), cell
        assert all("wall_ms" in row for row in rows.values()), cell
        assert ("first_ms" in rows["fox"]) == (cell == "1 x 64")
    long = report["cells"]["1 x 8192"]
    assert long["fox"]["cache_mb"] < 0.5 * long["fox-full"]["cache_mb"]
