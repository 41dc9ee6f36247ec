"""Generation configs of published checkpoints that transformers reads and then refuses to save."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from typing import Any

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of a generation config that only sampling reads."""


def savable(config: Any) -> Any:
    """A generation config as it is or, where transformers refuses to save it, a copy without the fields it ignores.

    Published checkpoints have temperatures without do_sample, and -1 for no padding token; most versions of
    transformers then refuse to save the model at all.
    """
    if config is None:
        return None
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ValueError):
        config.save_pretrained(folder)
        return config
    config = copy.deepcopy(config)
    if not config.do_sample:
        for name in SAMPLING:
            setattr(config, name, None)
    if (config.pad_token_id or 0) < 0:
        config.pad_token_id = None
    return config
