"""Tokens per second on 1, 2 and 4 GPUs of one host, DDP and FSDP2; a checkpoint saved on 4 that goes on on 2; a kill.

    python benchmarks/scale.py --model DIRECTORY --data FILES --out benchmarks/scale.json

recipes/smollm2-partial.yaml through `accelerate launch` and recipes/accelerate/, the same 65536 tokens a step for each
GPU (weak scaling), speeds as the run's own log has them (median of its windows after the first). FSDP2, whose work on
the host is as much as a small model's own, takes 16 rows at a time instead of 8. Its run on all GPUs gets SIGTERM in
the middle and is taken up by half of them; its losses are compared with the DDP run's, which had the same batches.
Beside the run on one GPU, the last two train a short FSDP2 run twice, `deterministic: true`, once whole and once killed
with SIGKILL and taken up later: losses and gradient norms are compared digit by digit. JSON is written after each part.
Short runs go beside the run on one GPU and the one that is taken up, on other GPUs; the rows of DDP and those on all
GPUs run alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from provenance import provenance

import retrofox
from retrofox.config import load_recipe
from retrofox.data.prepare import prepare

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2-partial.yaml"
STEP_TOKENS = 65536
KILL_STEPS, KILL_TOKENS = 10, 16384
FSDP_SETTINGS = ("stages.0.micro_batch=16",)
FSDP_MODE = "FSDP2, 16 rows to a micro-batch"
KILL_SETTINGS = ("deterministic=true", "stages.0.micro_batch=2", "checkpoint={every_steps: 4, keep: 9}", "log.every=1")


class Runs:
    """Launches training runs of the recipe and reads their logs."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Converts the model and makes the tokens that all runs share."""
        recipe = load_recipe(RECIPE, [f"model={self.options.model}", *self.data()])
        self.converted = self.work / "converted"
        if not (self.converted / "config.json").is_file():
            retrofox.convert(self.options.model, self.converted, fox=recipe.fox)
        prepare(recipe)

    def data(self) -> list[str]:
        """The part of the settings that says what is trained on."""
        return [f"data.train=[{self.options.data}]", "data.eval=[]", f"data.cache={self.work / 'tokens'}"]

    def command(self, name: str, gpus: int, mode: str, steps: int, batch_tokens: int, more: list[str]) -> list[str]:
        """The command line; `batch_tokens` are a step's, `gpus` how many share them."""
        settings = [
            f"model={self.converted}",
            "fox=null",
            f"output={self.work / name}",
            *self.data(),
            f"stages.0.tokens={steps * batch_tokens}",
            f"stages.0.batch_tokens={batch_tokens}",
            f"stages.0.warmup_tokens={batch_tokens}",
            f"checkpoint={{every_steps: {10 * steps}, keep: 1}}",
            "log.every=4",
            *more,
        ]
        command = [sys.executable]
        if gpus > 1:
            config = ROOT / "recipes" / "accelerate" / f"{mode}.yaml"
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            command += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
            command += ["--num_processes", str(gpus), "--main_process_port", str(port)]
        return [*command, "-m", "retrofox", "train", str(RECIPE), *settings]

    def start(
        self, devices: list[int], name: str, mode: str, steps: int, batch_tokens: int, *more: str
    ) -> subprocess.Popen:
        """Starts a run in a process group of its own, its output in a file; `more` are further settings."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        with open(self.work / f"{name}.{len(devices)}.txt", "a") as log:
            return subprocess.Popen(
                self.command(name, len(devices), mode, steps, batch_tokens, list(more)),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def until(self, process: subprocess.Popen, name: str, step: int, number: int) -> bool:
        """Waits for a step in the run's log, then sends its processes a signal; whether the step was reached."""
        deadline = time.perf_counter() + self.options.timeout
        while time.perf_counter() < deadline and process.poll() is None:
            if any(line["step"] >= step for line in self.lines(name)):
                if number == signal.SIGKILL:
                    kill(process)
                else:
                    send(psutil.Process(process.pid).children(recursive=True), number)
                    self.wait(process, name, self.options.timeout)
                return True
            time.sleep(0.05)
        return self.wait(process, name, 0) or any(line["step"] >= step for line in self.lines(name))

    def wait(self, process: subprocess.Popen, name: str, seconds: float) -> bool:
        """Whether a run ended well within so many seconds; prints the end of its output where it did not."""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            code = process.wait()
        if code:
            print(f"{name}: exit code {code}", flush=True)
            for file in sorted(self.work.glob(f"{name}.*.txt")):
                print(file.name, file.read_text()[-2500:], flush=True)
        return code == 0

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The run's log so far."""
        file = self.work / name / "log.jsonl"
        text = file.read_text().split("\n") if file.is_file() else []
        return [json.loads(line) for line in text if line.endswith("}")]

    def row(self, name: str, gpus: int, mode: str, after: int = 0) -> dict[str, Any]:
        """Median speed of the windows after the first, beyond step `after`."""
        lines = [line for line in self.lines(name) if line["step"] > after][1:]
        speeds = sorted(line["tokens_per_second"] for line in lines)
        return {
            "gpus": gpus,
            "mode": mode,
            "tokens_per_second": round(speeds[len(speeds) // 2]) if speeds else None,
            "peak_memory_gb": lines[-1]["memory_gb"] if lines else None,
            "mfu": lines[-1].get("mfu") if lines else None,
            "windows": len(lines),
        }


def send(processes: list[psutil.Process], number: int) -> None:
    """A signal to each process that still runs."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a launcher and its workers, which have sessions of their own."""
    launcher = psutil.Process(process.pid)
    send([launcher, *launcher.children(recursive=True)], signal.SIGKILL)
    process.wait()


def windows(lines: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Mean loss of each window of the log, by its first and last step."""
    before = [0, *(line["step"] for line in lines)]
    return {(first + 1, line["step"]): line["loss"] for first, line in zip(before, lines, strict=False)}


def ddp(runs: Runs, devices: list[int], steps: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measures DDP on some GPUs, if there are several."""
    name, gpus = f"ddp-{len(devices)}", len(devices)
    if gpus == 1:
        return
    if runs.until(runs.start(devices, name, "ddp", steps, STEP_TOKENS * gpus), name, steps, signal.SIGKILL):
        keep(runs.row(name, gpus, "DDP"))


def compare(runs: Runs, name: str) -> dict[str, Any]:
    """How far the losses of a sharded run are from those of the DDP run with the same batches."""
    sharded, whole = windows(runs.lines(name)), windows(runs.lines(f"ddp-{runs.options.gpus}"))
    apart = {steps: abs(sharded[steps] - whole[steps]) for steps in sharded if steps in whole}
    return {
        "largest_difference_of_loss_to_ddp": max(apart.values(), default=None),
        "differences": {f"{first}-{last}": round(value, 5) for (first, last), value in apart.items()},
    }


def after_kill(runs: Runs) -> dict[str, Any]:
    """Largest differences of loss and gradient norm between the run that was killed and taken up and the whole one."""
    whole, again = ({line["step"]: line for line in runs.lines(name)} for name in ("whole", "killed"))
    said = [line for line in (runs.work / "killed.2.txt").read_text().splitlines() if line.startswith("resumed")]
    both = sorted(whole.keys() & again.keys())
    return {
        "steps_compared": len(both),
        "resumed": said[-1].split(" from ")[0] if said else None,
        **{
            f"largest_difference_of_{key}": max((abs(whole[s][key] - again[s][key]) for s in both), default=None)
            for key in ("loss", "grad_norm")
        },
        "losses": [[s, whole[s]["loss"], again[s]["loss"]] for s in both],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=120, help="seconds a run may take")
    parser.add_argument("--work", type=Path, default=Path("runs/scale"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs, started = Runs(options), time.perf_counter()
    found: dict[str, Any] = {
        **provenance(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "tokens_per_gpu_and_step": STEP_TOKENS,
        "rows": [],
    }

    def keep(row: dict[str, Any]) -> None:
        one = next((r["tokens_per_second"] for r in found["rows"] if r["gpus"] == 1), None)
        if one and row["tokens_per_second"]:
            row["efficiency"] = round(row["tokens_per_second"] / (one * row["gpus"]), 3)
        found["rows"].append(row)
        print(json.dumps(row), f"{time.perf_counter() - started:.0f} s", flush=True)
        save()

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    # Runs are killed after their last step: only the checkpoint that another number of GPUs takes up is of use.
    runs.prepare()
    steps, everyone = options.steps, list(range(options.gpus))
    half, whole_batch = max(1, options.gpus // 2), STEP_TOKENS * options.gpus
    # The first run compiles what all others find in the cache; beside it, on the last two GPUs, whole and killed.
    pair = everyone[-2:] if options.gpus >= 4 else []
    first = runs.start([0], "one", "one", steps, STEP_TOKENS)
    short = {
        name: runs.start(pair, name, "fsdp2", KILL_STEPS, KILL_TOKENS, *KILL_SETTINGS)
        for name in (("whole", "killed") if pair else ())
    }
    with ThreadPoolExecutor() as threads:
        ends = {"killed": KILL_STEPS // 2 + 2, "whole": KILL_STEPS}
        beside = [threads.submit(runs.until, run, name, ends[name], signal.SIGKILL) for name, run in short.items()]
        if not runs.until(first, "one", steps, signal.SIGKILL):
            raise SystemExit("the run on one GPU failed")
        keep(runs.row("one", 1, "one process"))
        for end in beside:
            end.result()
    name = f"fsdp2-{options.gpus}"
    running = runs.start(everyone, name, "fsdp2", steps, whole_batch, *FSDP_SETTINGS)
    runs.until(running, name, steps // 2, signal.SIGTERM)
    keep(runs.row(name, options.gpus, FSDP_MODE))
    at = max((line["step"] for line in runs.lines(name)), default=0)
    taken_up = runs.start(everyone[:half], name, "fsdp2", steps, whole_batch, *FSDP_SETTINGS)
    if pair:  # the other half is free meanwhile
        again = runs.start(pair, "killed", "fsdp2", KILL_STEPS, KILL_TOKENS, *KILL_SETTINGS)
        runs.until(again, "killed", KILL_STEPS, signal.SIGKILL)
        found["killed"] = after_kill(runs)
        print(json.dumps(found["killed"]), flush=True)
        save()
    resumed = runs.until(taken_up, name, steps, signal.SIGKILL)
    found["resumed"] = {"saved_on": options.gpus, "resumed_on": half, "at_step": at, "reached_the_end": resumed}
    print(json.dumps(found["resumed"]), flush=True)
    save()
    ddp(runs, everyone, steps, keep)
    found["resumed"] |= compare(runs, name)
    print(json.dumps(found["resumed"]), flush=True)
    save()
    if half > 1:
        ddp(runs, everyone[:half], steps, keep)
    found["seconds"] = round(time.perf_counter() - started)
    save()


if __name__ == "__main__":
    main()
