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
LIGHT = """
heavy = {"torch", "transformers", "numpy", "triton", "fox_kernels"} & set(sys.modules)
assert not heavy, heavy
"""


def ran(directory, check: str, first: str = "", last: str = "") -> str:
    """What a fresh process writes to stderr."""
    program = PROGRAM.format(first=first, last=last, check=check)
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("order", [{"first": "import retrofox"}, {"last": "import retrofox"}], ids=["before", "after"])
def test_auto_classes_open_a_converted_model_without_trust(pico_fox_checkpoint, order):
    ran(pico_fox_checkpoint, OPENED, **order)


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoConfig", "AutoTokenizer", "LlamaForCausalLM"])
def test_any_class_of_transformers_may_be_imported_first(pico_fox_checkpoint, name):
    ran(pico_fox_checkpoint, OPENED, first=f"import retrofox\nfrom transformers import {name}")


def test_a_tokenizer_opens_without_a_question_or_a_warning(converted):
    assert ran(converted, TOKENIZED, first="import retrofox") == ""


def test_importing_retrofox_imports_nothing_heavy():
    program = f"import sys, retrofox\n{LIGHT}"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_load_passes_options_on_to_transformers(pico_fox_checkpoint):
    model = retrofox.load(pico_fox_checkpoint, device_map={"": "meta"}, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "meta"
    with pytest.raises(ValueError, match="tp_plan"):
        retrofox.load(pico_fox_checkpoint, tp_plan="auto")


def test_a_device_and_a_device_map_are_one_too_many(pico_fox_checkpoint):
    with pytest.raises(ValueError, match="both place the model"):
        retrofox.load(pico_fox_checkpoint, device="cpu", device_map="auto")
