"""benchmarks/train_step.py without a GPU: its control attends as a document at a time does, and turns are timed."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import train_step as bench  # pyright: ignore[reportMissingImports]


def flash(q, k, v, ends, ends_of_keys, longest, longest_of_keys, dropout, causal, debug, *, scale):
    """FlashAttention's operator for rows of several lengths, by SDPA."""
    assert ends is ends_of_keys
    assert longest == longest_of_keys == int(ends.diff().max())
    assert (dropout, causal, debug) == (0.0, True, False)
    parts = []
    for start, stop in itertools.pairwise(ends.tolist()):
        one = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True, scale=scale)[0])
    return (torch.cat([x.transpose(0, 1) for x in parts]),)


@pytest.mark.parametrize("ends", [[0, 5, 32, 40, 64], None], ids=str)
def test_all_documents_at_once_attend_as_one_at_a_time(monkeypatch, ends):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    q, k, v = (torch.randn(2, heads, 32, 16).bfloat16() for heads in (6, 3, 3))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    given = (module, q, k, v, None, ends)
    found, wanted = (f(*given, scaling=0.3)[0] for f in (bench.attend_at_once, bench.attend_by_document))
    torch.testing.assert_close(found, wanted)


def test_a_run_times_both_models_in_each_window(tmp_path, monkeypatch, pico_checkpoint, pico_fox_checkpoint):
    monkeypatch.setattr(bench, "STEP_TOKENS", 64)
    monkeypatch.setattr(bench, "MICRO_BATCH_TOKENS", 64)
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the gate is open and the fox forgets " * 200)
    given = [pico_fox_checkpoint, "--base", pico_checkpoint, "--text", text, "--out", out, "--windows", "32,64"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", *map(str, given), "--steps", "2", "--turns", "1"])
    bench.main()
    AttentionInterface.register(bench.NAME, bench.attend_by_document)
    rows = json.loads(out.read_text())["rows"]
    timed = {(row["window"], row["model"]) for row in rows if row.get("tokens_per_second", 0) > 0}
    assert timed == {(window, name) for window in (32, 64) for name in ("converted", "control by document")}
