"""Which rows a stage's memory is measured on."""

from __future__ import annotations

import torch

from retrofox.config import Recipe, stage_of
from retrofox.training import memory_probe
from retrofox.training.memory_probe import probe_rows


def test_long_rows_are_probed_near_their_own_length():
    cuda = torch.device("cuda")
    assert probe_rows(cuda, 0, 16384) == probe_rows(cuda, 0, 32768) == (512, 2048, 4096, 8192)
    assert probe_rows(cuda, 0, 65536) == probe_rows(cuda, 0, 131071) == (16384, 32768, 65536)
    assert probe_rows(cuda, 0, 524288) == (32768, 65536, 131072)
    assert probe_rows(cuda, 16384, 524288) == (32768, 65536, 131072)
    assert probe_rows(cuda, 16384, 65536) == (32768, 49152, 65536, 98304)  # at least two tiles
    assert probe_rows(torch.device("cpu"), 0, 524288) == (64, 128, 192)


def test_a_probe_that_runs_out_of_memory_takes_shorter_rows(monkeypatch, pico_llama):
    asked = []

    def measured(lm, recipe, stage, lengths, tile, device):
        asked.append(lengths)
        if lengths[-1] > 8192:
            raise torch.OutOfMemoryError("no room")
        return "a probe"

    stage = stage_of({"objective": "extend", "tokens": 131072, "sequence_length": 131072})
    recipe = Recipe.model_construct(precision="bf16", lora=None, attention="auto")
    monkeypatch.setattr(memory_probe, "_measured", measured)
    monkeypatch.setattr(memory_probe, "_probes", {})
    monkeypatch.setattr(memory_probe, "PROBE_ROWS", {"meta": (512, 2048, 4096, 8192)})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert memory_probe.probe(recipe, stage, pico_llama(), True, torch.device("meta")) == "a probe"
    assert [lengths[-1] for lengths in asked] == [131072, 65536, 32768, 16384, 8192]
