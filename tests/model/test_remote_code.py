"""The artefact where it lands: torch and transformers alone load it and give the same logits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import retrofox
from retrofox.model import modeling_fox
from tests.conftest import DEEPSEEK

WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24}
TOKENS = torch.randint(2, 288, (2, 24), generator=torch.Generator().manual_seed(1))
SPECS = {
    "plain": {},
    "all parts": {"pro": "all", "rope": "interpolate"},
    "latent": {"family": "deepseek_v2", "config": DEEPSEEK, "rope": "interpolate", "pro": "output-norm,output-gate"},
    "latent, horizon": {"family": "deepseek_v3", "config": DEEPSEEK, "horizon": 6.0, "half_life": (1.0, 9.0)},
    "no gate": {"gate": "none", "rope": "drop", "log_n": 8},
    "caps": {
        "family": "gemma2",
        "config": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
    "logits divided": {"family": "granite", "config": {"attention_multiplier": 0.2, "logits_scaling": 3.0}},
    "logits scaled": {"family": "cohere", "config": {"logit_scale": 0.25, "use_qk_norm": True}},
}
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("retrofox", "fox_kernels", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for where in sys.argv[1:]:
    out = where + "-again"
    tokens = torch.load(where + "/tokens.pt")
    model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=True).eval()
    assert type(AutoConfig.from_pretrained(where, trust_remote_code=True)).__name__.startswith("Fox")
    with torch.no_grad():
        logits = model(tokens).logits
        hidden = AutoModel.from_pretrained(where, trust_remote_code=True).eval()(tokens).last_hidden_state
    config, scores = model.config, model.lm_head(hidden)
    scores = scores * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if getattr(config, "final_logit_softcapping", None) is not None:
        scores = config.final_logit_softcapping * torch.tanh(scores / config.final_logit_softcapping)
    assert torch.allclose(scores, logits, atol=1e-6)
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    generated = model.generate(tokens, **options)
    assert torch.equal(generated, model.generate(tokens, use_cache=False, **options))
    assert torch.equal(generated, model.generate(tokens, cache_implementation="static", **options))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    padded = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits[1, 5:]
    assert torch.allclose(padded, model(tokens[1:, 5:]).logits[0], atol=1e-4)
    holes = torch.ones_like(tokens)
    holes[:, 5:8] = 0
    unseen = torch.where(holes.bool(), tokens, tokens.flip(1))
    after = [model(ids, attention_mask=holes).logits[:, 8:] for ids in (tokens, unseen)]
    assert torch.allclose(*after, atol=1e-5)
    model.train()(tokens, labels=tokens).loss.backward()
    half = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=True, dtype=torch.bfloat16)
    kinds = {p.dtype for n, p in half.named_parameters() if "forget_gate" in n}
    assert kinds <= {torch.float32}, kinds
    model.save_pretrained(out)
    torch.save((logits, generated), out + "/answer.pt")
assert not {"retrofox", "fox_kernels", "triton"} & set(sys.modules), "not alone"
"""


@pytest.fixture(scope="module")
def artefacts(pico_fox, tmp_path_factory) -> list[Path]:
    """A saved model of each spec, with tokens and what the model answers to them."""
    folder, found = tmp_path_factory.mktemp("artefacts"), []
    for name, spec in SPECS.items():
        path = folder / name.replace(" ", "_")
        model = pico_fox(**spec)
        model.save_pretrained(path)
        torch.save(TOKENS, path / "tokens.pt")
        with torch.no_grad():
            logits = model(TOKENS).logits
        generated = model.generate(TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None)
        torch.save((logits, generated), path / "expected.pt")
        found.append(path)
    return found


def test_without_retrofox_kernels_and_triton(artefacts):
    """`make test-oldest` and `test-newest` run it under the oldest and newest versions of transformers."""
    folder = artefacts[0].parent
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, artefacts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("slow path") == len(artefacts), done.stderr  # each brings code of its own
    for artefact in artefacts:
        again = artefact.with_name(f"{artefact.name}-again")  # where the program saves what it loaded, and its answers
        answers = zip(torch.load(again / "answer.pt"), torch.load(artefact / "expected.pt"), strict=True)
        for answer, expected in answers:
            torch.testing.assert_close(answer, expected, atol=1e-5, rtol=0)
        with torch.no_grad():
            logits = retrofox.load(again)(TOKENS).logits
        torch.testing.assert_close(logits, torch.load(artefact / "expected.pt")[0], atol=1e-5, rtol=0)


def test_remote_files_are_all_of_the_model_and_import_nothing_else():
    directory = Path(modeling_fox.__file__).parent
    assert {f.name for f in directory.glob("*.py")} == {*modeling_fox.REMOTE_FILES, "__init__.py"}
    from transformers.dynamic_module_utils import get_imports

    for name in modeling_fox.REMOTE_FILES:
        foreign = {i.partition(".")[0] for i in get_imports(directory / name)} - {"torch", "transformers"}
        assert foreign <= set(sys.stdlib_module_names), f"{name} imports {foreign}"


FORBIDDEN = (
    *("/proc", "co_code", "__code__", "FunctionType", "ops.aten._", "ops.mkldnn", "threading", "import gc", "gc."),
    *("ctypes", "subprocess", "shutil", "eval(", "exec(", "__globals__"),
)
"""What a reader of trusted code would stop at: the machine, bytecode, other globals, private operators, threads, gc."""


@pytest.mark.parametrize("name", modeling_fox.REMOTE_FILES)
def test_a_remote_file_has_nothing_that_a_reviewer_would_stop_at(name):
    text = (Path(modeling_fox.__file__).parent / name).read_text()
    assert not [word for word in FORBIDDEN if re.search(rf"(?<!\w){re.escape(word)}", text)]


def test_the_remote_code_is_three_files_of_at_most_1300_lines():
    assert len(modeling_fox.REMOTE_FILES) == 3
    directory = Path(modeling_fox.__file__).parent
    assert sum(len((directory / name).read_text().splitlines()) for name in modeling_fox.REMOTE_FILES) <= 1300
