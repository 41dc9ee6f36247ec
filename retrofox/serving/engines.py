"""vLLM in a process of its own, which runs one job after the other: its imports take longer than a tiny model's job."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

PROGRAM = (sys.executable, "-m", "retrofox.serving.vllm_run")
DONE = "retrofox: answered "
"""How the line begins by which the process says that a job's result is written."""
WAITS = ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS")
"""vLLM's own limits, of 600 and 300 seconds: ranks on busy cores, each importing vLLM for itself, take longer."""
PATIENCE = 5.0
"""Seconds that a process has to end: by itself, then when asked to."""


@dataclass
class Job:
    """One engine: arguments for vLLM and rounds of prompts."""

    name: str
    engine: dict[str, Any]
    rounds: list[dict[str, Any]]


class Engines:
    """Runs jobs with vLLM; use it in a `with`, whose end stops the process.

    The process is started by the first job and used for the next ones. A new one is started where a job failed, where
    the number of ranks changes, and for each job on a GPU, whose memory vLLM gives back only when it ends.
    """

    def __init__(self, program: tuple[str, ...] | None = None, reuse: bool | None = None):
        self.program = program or PROGRAM
        self.reuse = not torch.cuda.is_available() if reuse is None else reuse
        self._process: subprocess.Popen[str] | None = None
        self._ranks = 0

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, job: Job, model: str) -> dict[str, Any]:
        """What `retrofox.serving.vllm_run` gives for a job.

        Raises:
            ValueError: vLLM stopped, with the last error that it named.
        """
        process = self._started(job.engine["tensor_parallel_size"])
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
            asked.write_text(json.dumps({"model": model, "engine": job.engine, "rounds": job.rounds}), encoding="utf-8")
            log = []
            with contextlib.suppress(BrokenPipeError):  # its log says why
                process.stdin.write(f"{asked}\t{answered}\n")
                process.stdin.flush()
            for line in process.stdout:
                if line.startswith(f"{DONE}{answered}"):
                    return json.loads(answered.read_text(encoding="utf-8"))
                log.append(line)
            self.stop()
            raise ValueError(f"vLLM stopped on {model}: {last_error(''.join(log))}")

    def leave_gpu(self) -> None:
        """Ends the process where it holds a GPU's memory, which a next job's process would take anew anyway."""
        if not self.reuse:
            self.stop()

    def stop(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # without more jobs it ends by itself, and its ranks with it
        for end in (lambda: None, process.terminate, process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
                break
        process.stdout.close()

    def _started(self, ranks: int) -> subprocess.Popen[str]:
        if self._process is not None and self.reuse and self._ranks == ranks and self._process.poll() is None:
            return self._process
        self.stop()
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **dict.fromkeys(WAITS, "3600"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))) if ranks > 1 else "auto",  # a core a rank
            **os.environ,
        }
        self._ranks = ranks
        self._process = subprocess.Popen(
            self.program,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return self._process


def run_vllm(job: Job, model: str) -> dict[str, Any]:
    """One job in a process of its own; see `Engines.run`."""
    with Engines() as engines:
        return engines.run(job, model)


def last_error(log: str) -> str:
    """The sentence of retrofox's refusal in vLLM's log, or the last line that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line[line.index("retrofox can't serve") :] for line in lines if "retrofox can't serve" in line]
    errors = [line for line in lines if "Error" in line and "Engine core initialization failed" not in line]
    return (ours or errors[-1:] or lines[-1:] or ["it said nothing"])[0]
