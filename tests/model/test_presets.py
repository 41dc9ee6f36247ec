"""Presets name the papers' systems; ALiBi's slopes and the FoX paper's time constants are kinds of half-lives."""

from __future__ import annotations

import math

import pytest
import torch

from retrofox import FoxSpec
from retrofox.fox_spec import PRESETS, PRO_PARTS
from retrofox.half_lives import alibi_half_lives, initial_bias


def test_checkpoints_that_name_an_earlier_preset_load():
    assert FoxSpec.from_dict({"preset": "fox-partial"}) == FoxSpec.from_dict({"preset": "fox-stretch"})


def test_a_preset_is_its_fields_and_changes_go_before_them():
    assert FoxSpec.from_dict({"preset": "fox-stretch"}) == FoxSpec()
    assert FoxSpec.from_dict({"preset": "fox-pro"}) == FoxSpec(rope="drop", sink_tokens=0, pro=PRO_PARTS)
    changed = FoxSpec.from_dict({"preset": "fox-pro", "pro": "k-shift", "sink_tokens": 3})
    assert changed == FoxSpec(rope="drop", sink_tokens=3, pro=("k-shift",))
    assert FoxSpec.from_dict({"preset": "alibi", "gate": "none"}) == FoxSpec(rope="drop", gate="none")
    with pytest.raises(
        ValueError, match=r"of fox must be .* max_wavelength, layer_max_wavelength, gate, .* preset; got"
    ):
        FoxSpec.from_dict({"preset": "fox-pro", "sink": 1})


SYSTEMS = {
    "fox-stretch": ("interpolate", "data", "slopes", 1, ()),
    "fox-llama": ("drop", "data", "slopes", 0, ()),
    "fox-pro": ("drop", "data", "slopes", 0, PRO_PARTS),
    "transformer-llama": ("keep", "none", "slopes", 1, ()),
    "transformer-pro": ("keep", "none", "slopes", 1, PRO_PARTS),
    "alibi": ("drop", "fixed", "alibi", 0, ()),
    "drope": ("drop", "none", "slopes", 1, ()),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_systems(name):
    spec = FoxSpec.from_dict({"preset": name}).resolved(8192)
    assert (spec.rope, spec.gate, spec.init, spec.sink_tokens, spec.pro) == SYSTEMS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back_as_the_fields_it_wrote(name):
    spec = FoxSpec.from_dict({"preset": name}).resolved(8192)
    spec.version = "0.1.0"  # as a conversion leaves it: every field filled in, also those without effect
    assert spec.preset == name
    again = FoxSpec.from_dict(spec.to_dict())
    assert (again, again.preset) == (spec, name)
    assert FoxSpec.from_dict({**spec.to_dict(), "preset": None}) == spec  # the fields say it all


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-h for h in range(1, 9)]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (1, [2**-8]),
    ],
)
def test_alibis_slopes_are_those_of_press_et_al(heads, slopes):
    assert [math.log(2) / half_life for half_life in alibi_half_lives(heads)] == pytest.approx(slopes)
    log_f = torch.nn.functional.logsigmoid(torch.tensor(initial_bias(FoxSpec.from_dict({"preset": "alibi"}), heads)))
    assert (-log_f).tolist() == pytest.approx(slopes, rel=1e-5)
