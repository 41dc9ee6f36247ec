"""What the tests of the model's parts share."""

from __future__ import annotations

import pytest

from retrofox.model import modeling_fox as scores


@pytest.fixture(params=["bias", "operator"])
def path(request, monkeypatch) -> str:
    """The ways through the attention on a CPU: SDPA with a bias, and the operator."""
    if request.param == "operator":
        monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    return request.param
