"""What the parity proof refuses to call a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofox.conversion import verify

PROVEN = {
    "equal": True,
    "base_tells_tokens_apart": True,
    "loss_base": 3.0,
    "dtype": "float32",
    "text": "a fixed text",
    "max_difference": 0.0,
    "tolerance": 1e-5,
}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"loss_base": float("nan")}, "the base's own loss is nan"),
        ({"base_tells_tokens_apart": False}, "all tokens one score"),
        ({"equal": False}, "parity proof failed"),
    ],
)
def test_a_base_without_sense_and_other_logits_are_refused(changed, why, pico_llama, monkeypatch):
    base = pico_llama()
    monkeypatch.setattr(verify, "compare", lambda source, out: PROVEN)
    assert verify.prove(base, Path("out")) == PROVEN
    monkeypatch.setattr(verify, "compare", lambda source, out: PROVEN | changed)
    with pytest.raises(ValueError, match=why):
        verify.prove(base, Path("out"))
