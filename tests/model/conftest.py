"""What the tests of the model's parts share."""

from __future__ import annotations

import pytest

from retrofox.model import scores


@pytest.fixture(params=["short", "operator"])
def path(request, monkeypatch) -> str:
    """Both ways through the attention: SDPA with a bias for short texts on a CPU, and the operator."""
    if request.param == "operator":
        monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    return request.param
