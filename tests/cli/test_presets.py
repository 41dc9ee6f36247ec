"""`convert --preset`: the published systems, and what a converted checkpoint keeps of them."""

from __future__ import annotations

import json

import pytest

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
