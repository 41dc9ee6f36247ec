"""The process that runs vLLM's jobs, with a program in vLLM's place."""

import sys

import pytest
import torch

from retrofox.serving import engines
from retrofox.serving.engines import Job, run_vllm

PROGRAM = """
import json, os, sys
given = json.load(open(sys.argv[1]))
if given["model"] == "bad":
    print("INFO loading bad\\nValueError: retrofox can't serve bad: a fp8 cache", flush=True)
    os._exit(1)
cores = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
json.dump([{"process": os.getpid(), "cores": cores, **job} for job in given["jobs"]], open(sys.argv[2], "w"))
"""


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(engines, "PROGRAM", (sys.executable, "-c", PROGRAM))


def job(ranks: int = 1) -> Job:
    return Job({"tensor_parallel_size": ranks}, [{"prompts": [[1, 2]]}])


@pytest.mark.parametrize("gpu", [False, True])
def test_jobs_share_a_process_but_on_a_gpu(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    first, second = run_vllm([job(), job()], "x")
    assert first["rounds"] == [{"prompts": [[1, 2]]}]
    assert (first["process"] != second["process"]) == gpu


@pytest.mark.parametrize(("ranks", "cores"), [(1, "auto"), (2, "0|1")])
def test_each_rank_has_a_core(ranks, cores):
    assert run_vllm([job(ranks)], "x")[0]["cores"] == cores


def test_a_job_that_fails_is_one_line():
    with pytest.raises(ValueError, match=r"^vLLM stopped on bad: retrofox can't serve bad: a fp8 cache$"):
        run_vllm([job()], "bad")
