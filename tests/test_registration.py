"""`import retrofox` makes transformers' own classes open converted models, asks nothing and imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import retrofox

PROGRAM = """
import builtins, sys
builtins.input = lambda *_: sys.exit("it asks")
{first}
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
{last}
{check}
"""
OPENED = """
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "retrofox.model.modeling_fox", type(model)
assert type(model) is type(retrofox.load(sys.argv[1]))
assert type(AutoModelForCausalLM.from_config(config)) is type(model)
"""
TOKENIZED = """
assert AutoTokenizer.from_pretrained(sys.argv[1])("a")["input_ids"]
assert "retrofox.model.modeling_fox" in sys.modules  # a family's classes come with its config
"""


def ran(directory, check: str, first: str = "", last: str = "") -> str:
    """What a fresh process writes to stderr."""
    program = PROGRAM.format(first=first, last=last, check=check)
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


CLASSES = ["AutoModelForCausalLM", "AutoConfig", "AutoTokenizer", "LlamaForCausalLM"]
ORDERS = [{"first": "import retrofox"}, {"last": "import retrofox"}]
ORDERS += [{"first": f"import retrofox\nfrom transformers import {name}"} for name in CLASSES]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_auto_classes_open_a_converted_model_without_trust_whatever_is_imported_first(pico_fox_checkpoint, order):
    ran(pico_fox_checkpoint, OPENED, **order)


def test_a_tokenizer_opens_without_a_question_or_a_warning(converted):
    assert ran(converted, TOKENIZED, first="import retrofox") == ""


def test_load_passes_options_on_to_transformers(pico_fox_checkpoint):
    model = retrofox.load(pico_fox_checkpoint, device_map={"": "meta"}, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "meta"
    with pytest.raises(ValueError, match="tp_plan"):
        retrofox.load(pico_fox_checkpoint, tp_plan="auto")
    with pytest.raises(ValueError, match="returns the model alone"):
        retrofox.load(pico_fox_checkpoint, output_loading_info=True)


def test_a_device_and_a_device_map_are_one_too_many(pico_fox_checkpoint):
    with pytest.raises(ValueError, match="both place the model"):
        retrofox.load(pico_fox_checkpoint, device="cpu", device_map="auto")
