"""vLLM in a process of its own: its memory comes back when it ends, and its log is shown only if it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PROGRAM = (sys.executable, "-m", "retrofox.serving.vllm_run")
WAITS = ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS")
"""vLLM's own limits, of 600 and 300 seconds: ranks on busy cores, each importing vLLM for itself, take longer."""


@dataclass
class Job:
    """One engine: arguments for vLLM and rounds of prompts."""

    engine: dict[str, Any]
    rounds: list[dict[str, Any]]


def run_vllm(jobs: Sequence[Job], model: str) -> list[dict[str, Any]]:
    """Runs `retrofox.serving.vllm_run`; returns its results for each job. ValueError has the last error in its log."""
    if torch.cuda.is_available() and len(jobs) > 1:  # vLLM gives a GPU's memory back only when its process ends
        return [result for job in jobs for result in run_vllm([job], model)]
    ranks = max(job.engine["tensor_parallel_size"] for job in jobs)
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        **dict.fromkeys(WAITS, "3600"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))) if ranks > 1 else "auto",  # a core a rank
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `vllm_run` looks at the scheduler
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "jobs.json", Path(folder) / "results.json"
        asked.write_text(json.dumps({"model": model, "jobs": [asdict(job) for job in jobs]}), encoding="utf-8")
        done = subprocess.run(
            [*PROGRAM, str(asked), str(answered)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise ValueError(f"vLLM stopped on {model}: {last_error(done.stdout)}")
        return json.loads(answered.read_text(encoding="utf-8"))


def last_error(log: str) -> str:
    """The sentence of retrofox's refusal in vLLM's log, or the last line that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line[line.index("retrofox can't serve") :] for line in lines if "retrofox can't serve" in line]
    errors = [line for line in lines if "Error" in line and "Engine core initialization failed" not in line]
    return (ours or errors[-1:] or lines[-1:] or ["it said nothing"])[0]
