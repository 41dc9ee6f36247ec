"""`convert --preset`: the published systems, and what a converted checkpoint keeps of them."""

from __future__ import annotations

import json

import pytest
import torch

import retrofox

PRO = ["qk-norm", "output-norm", "output-gate", "k-shift", "v-shift"]


PRESETS = {
    "fox-stretch": ("interpolate", "data", "slopes", 1, []),
    "fox-llama": ("drop", "data", "slopes", 0, []),
    "fox-pro": ("drop", "data", "slopes", 0, PRO),
    "transformer-llama": ("keep", "none", "slopes", 1, []),
    "transformer-pro": ("keep", "none", "slopes", 1, PRO),
    "alibi": ("drop", "fixed", "alibi", 0, []),
    "drope": ("drop", "none", "slopes", 1, []),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_systems(run, source, tmp_path, name):
    code, out, _ = run("convert", source, tmp_path / "out", "--preset", name, "--dry-run", "--json")
    assert code == 0
    spec = json.loads(out)["spec"]
    assert tuple(spec[key] for key in ("rope", "gate", "init", "sink_tokens", "pro")) == PRESETS[name]
    assert spec["preset"] == name


def test_a_converted_preset_carries_its_fields_and_runs(run, source, tmp_path):
    options = "--preset alibi --log-n 2Ki --no-verify"
    code, out, _ = run("convert", source, tmp_path / "out", *options.split())
    assert code == 0
    assert "fixed, ALiBi's slopes" in out
    for file, path in (("config.json", ("fox",)), ("retrofox.json", ("plan", "spec"))):
        spec = json.loads((tmp_path / "out" / file).read_text())
        for key in path:
            spec = spec[key]
        assert (spec["preset"], spec["gate"], spec["init"], spec["log_n"]) == ("alibi", "fixed", "alibi", 2048)
        assert spec["half_life"] is None
    model = retrofox.load(tmp_path / "out")
    bias = model.model.layers[0].self_attn.forget_gate.bias
    slopes = -torch.nn.functional.logsigmoid(bias.double())
    assert slopes.tolist() == pytest.approx([2**-4, 2**-8], rel=1e-5)  # 2^(-8h/H), H = 2
