"""Recipes for models that are nothing but a config.json."""

from __future__ import annotations

import json

import pytest

from retrofox.config import validate
from retrofox.planning.known import LLAMA_1B


@pytest.fixture
def recipe_of(tmp_path):
    """recipe_of(config, stage fields, **recipe fields) -> a recipe of one extend stage."""

    def build(config=LLAMA_1B, stage=None, **values):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        basic = {"objective": "extend", "tokens": "1Mi", "sequence_length": 8192, "batch_tokens": 32768}
        return validate(
            {
                "model": str(tmp_path / "model"),
                "fox": {"half_life": [256, 65536]},
                "output": str(tmp_path / "out"),
                "data": {"train": ["unused"]},
                "stages": [{**basic, **(stage or {})}],
                **values,
            }
        )

    return build
