"""Converted models saved by an earlier layout of the package load, generate and are pushed as they were saved.

saved-at-d454864.zip was made with the code of commit d454864: three pico Llamas (hidden size 16, two layers, float32),
converted, all parameters stirred, `save_pretrained`; with each, tokens, every sixth position's logits and the greedy
continuation as that commit computed them. The code that lay beside all three is in it once.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import retrofox
from retrofox.model.modeling_fox import CACHE, REMOTE_FILES

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
NAMES = ["default", "all-parts", "no-gate"]
PROGRAM = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for where in sys.argv[2:]:
    tokens = load_file(where + "/expected")["tokens"]
    model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(tokens).logits[:, ::6].contiguous()
    save_file({"logits": logits, "generated": model.generate(tokens, **eval(sys.argv[1]))}, where + "/answer")
    print("retrofox" in sys.modules, type(model).__name__)
"""


@pytest.mark.parametrize("name", NAMES)
def test_retrofox_loads_it(saved_before, name, tmp_path):
    before = saved_before(name)
    expected = load_file(before / "expected")
    model: Any = retrofox.load(before)
    model.save_pretrained(tmp_path / "again")
    again: Any = retrofox.load(tmp_path / "again")
    for opened in (model, again):
        with torch.no_grad():
            logits = opened(expected["tokens"]).logits[:, ::6]
        torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=0)
        assert torch.equal(opened.generate(expected["tokens"], **OPTIONS), expected["generated"])


def test_transformers_loads_it_with_the_code_beside_it(saved_before, tmp_path):
    before = [saved_before(name) for name in NAMES]
    command = [sys.executable, "-c", PROGRAM, repr(OPTIONS), *map(str, before)]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    if CACHE == "cache":  # that code knows the cache as past_key_values alone: it stops, rather than go on without
        assert done.returncode == 1
        assert "ValueError: continuous batching" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["False", "FoxLlamaForCausalLM"] * len(NAMES)
    for directory in before:
        expected, answer = load_file(directory / "expected"), load_file(directory / "answer")
        torch.testing.assert_close(answer["logits"], expected["logits"], atol=1e-5, rtol=0)
        assert torch.equal(answer["generated"], expected["generated"])


def test_a_model_saved_again_brings_todays_code(saved_before, tmp_path):
    before = saved_before("default")
    retrofox.load(before).save_pretrained(tmp_path / "again")
    there = {file.name for file in (tmp_path / "again").glob("*.py")}
    assert there == set(REMOTE_FILES)
    old, new = (json.loads((path / "config.json").read_text()) for path in (before, tmp_path / "again"))
    assert {key: new["fox"][key] for key in old["fox"]} == old["fox"]
    assert new["auto_map"] == old["auto_map"]
