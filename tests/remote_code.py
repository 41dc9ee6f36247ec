"""Code beside a checkpoint, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def remote_code(monkeypatch, tmp_path) -> Iterator[None]:
    """For tests that run the code beside a checkpoint: what transformers registers and imports for it is forgotten."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    import retrofox.model.modeling_fox  # noqa: F401 - registers ours first

    def forget_imports() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The installed classes, once registered, go before the code beside a checkpoint.
    monkeypatch.setattr("retrofox.anatomy._register", lambda *classes: None)
    for mapping in (CONFIG_MAPPING, MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        others = {key: value for key, value in mapping._extra_content.items() if "fox" not in str(key).lower()}
        monkeypatch.setattr(mapping, "_extra_content", others)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setitem(interface._global_mapping, "fox", interface._global_mapping["fox"])
    forget_imports()
    yield
    forget_imports()
