"""The process that runs vLLM's jobs one after the other, with a program in vLLM's place."""

import sys

import pytest

from retrofox.serving.engines import DONE, Engines, Job, last_error, run_vllm

PROGRAM = f"""
import json, os, sys
for line in sys.stdin:
    asked, answered = line.rstrip("\\n").split("\\t")
    job = json.load(open(asked))
    print("INFO loading", job["model"], flush=True)
    if job["model"] == "bad":
        print("ValueError: retrofox can't serve bad: a fp8 cache", file=sys.stderr, flush=True)
        os._exit(1)
    ranks = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    said = {{"process": os.getpid(), "model": job["model"], "rounds": job["rounds"], "cores": ranks}}
    json.dump(said, open(answered, "w"))
    print("{DONE}" + answered, flush=True)
"""
VLLM = (sys.executable, "-c", PROGRAM)


def job(ranks: int = 1) -> Job:
    return Job("a", {"tensor_parallel_size": ranks}, [{"prompts": [[1, 2]]}])


def test_jobs_share_a_process_and_ranks_get_one_of_their_own_with_a_core_each():
    with Engines(VLLM, reuse=True) as vllm:
        first, second, split = vllm.run(job(), "x"), vllm.run(job(), "y"), vllm.run(job(2), "y")
        process = vllm._process
    assert (first["model"], second["model"]) == ("x", "y")
    assert first["rounds"] == [{"prompts": [[1, 2]]}]
    assert first["process"] == second["process"] != split["process"]
    assert (first["cores"], split["cores"]) == ("auto", "0|1")
    assert process is not None
    assert process.poll() == 0


def test_on_a_gpu_each_job_has_a_process():
    with Engines(VLLM, reuse=False) as vllm:
        assert vllm.run(job(), "x")["process"] != vllm.run(job(), "x")["process"]


def test_a_job_that_fails_is_one_line_and_the_next_one_runs():
    with Engines(VLLM, reuse=True) as vllm:
        with pytest.raises(ValueError, match=r"^vLLM stopped on bad: retrofox can't serve bad: a fp8 cache$"):
            vllm.run(job(), "bad")
        assert vllm.run(job(), "x")["model"] == "x"


def test_a_process_that_does_not_start_is_one_line():
    with pytest.raises(ValueError, match="vLLM stopped on x: ModuleNotFoundError: No module named 'missing'"):
        Engines((sys.executable, "-c", "import missing")).run(job(), "x")


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr("retrofox.serving.engines.PATIENCE", 0.2)
    hangs = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    vllm = Engines((sys.executable, "-c", hangs))
    process = vllm._started(1)
    assert process.stdout is not None
    process.stdout.readline()
    vllm.stop()
    assert process.poll() == -9


def test_one_job_alone(monkeypatch):
    monkeypatch.setattr("retrofox.serving.engines.PROGRAM", VLLM)
    assert run_vllm(job(), "x")["model"] == "x"


def test_vllms_reason_is_found_in_its_log():
    log = "INFO a\nValueError: retrofox can't serve m: a fp8 cache\nRuntimeError: engine core failed\n"
    assert last_error(log) == "retrofox can't serve m: a fp8 cache"
    assert last_error("x\nKeyError: 'y'\nbye") == "KeyError: 'y'"
    assert last_error("") == "it said nothing"
