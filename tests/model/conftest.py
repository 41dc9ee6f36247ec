"""What the tests of the model's parts share."""

from __future__ import annotations

import pytest

from retrofox.model import scores


@pytest.fixture(params=["parts", "bias", "operator"])
def path(request, monkeypatch) -> str:
    """The ways through the attention on a CPU: torch's kernel in parts, SDPA with a bias, and the operator."""
    if request.param != "parts":
        monkeypatch.setattr(scores, "divides", lambda *_: False)
    if request.param == "operator":
        monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    return request.param
