"""Which families of the installed transformers follow the convention that surgery needs, read from their source."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from retrofox.families import check_supported
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.model.modeling_fox import CACHE


def fitting_families() -> dict[str, str]:
    """model_type -> attention class of every causal LM in the installed transformers that follows the convention.

    The convention: an attention whose forward takes (hidden_states, position_embeddings, attention_mask,
    the cache, **kwargs), rotates with apply_rotary_pos_emb, updates the cache and passes **kwargs on to the
    registered attention function. Read from the source, so that hardly anything is imported. A family that fits is
    supported once it has a row in SUPPORTED and a configuration in the tests.
    """
    root = Path(transformers.__file__).parent / "models"
    found = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        module = model_type_to_module_name(model_type)
        source = root / module / f"modeling_{module}.py"
        if not source.is_file():  # it runs with another family's classes
            source = Path(inspect.getfile(getattr(transformers, name)))
        fitting = _fitting_attentions(source.read_text(encoding="utf-8"))
        if fitting:
            found[model_type] = fitting[0]
    return found


def _fitting_attentions(source: str) -> list[str]:
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    forwards = [
        (node.name, item)
        for node in classes
        for item in node.body
        if node.name.endswith("Attention") and isinstance(item, ast.FunctionDef) and item.name == "forward"
    ]
    return [name for name, forward in forwards if _follows_convention(forward)]


def _follows_convention(forward: ast.FunctionDef) -> bool:
    arguments = {argument.arg for argument in forward.args.args}
    text = ast.unparse(forward)
    return (
        {"hidden_states", "position_embeddings", "attention_mask", CACHE} <= arguments
        and forward.args.kwarg is not None
        and all(call in text for call in (f"{CACHE}.update(", "attention_interface(", "apply_rotary_pos_emb("))
    )


def test_families_that_borrow_the_classes_of_another_are_found():
    borrowed = {name for name, c in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if c == "LlamaForCausalLM"}
    assert borrowed <= set(fitting_families())


FIT_WITHOUT_A_ROW = {"glm", "helium", "nemotron", "phi", "stablelm"}
"""Families of every supported transformers that follow the convention and have no row in SUPPORTED."""
DO_NOT_FIT = {"bloom", "gpt2", "gpt_neox", "mamba", "mpt", "opt", "rwkv"}
"""Families that don't: other attentions, positions or caches."""


def test_the_convention_tells_fitting_families_from_others():
    fitting = set(fitting_families())
    assert set(SUPPORTED) <= fitting, "a supported family no longer follows the attention convention"
    assert fitting - set(SUPPORTED) >= FIT_WITHOUT_A_ROW
    assert not fitting & DO_NOT_FIT
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= DO_NOT_FIT
    for model_type in fitting - set(SUPPORTED):
        with pytest.raises(ValueError, match="not supported"):
            check_supported({"model_type": model_type})
