"""Tokens per second on 1, 2 and 4 GPUs of one host, DDP and FSDP2, and a checkpoint saved on 4 that goes on on 2.

    python benchmarks/scale.py --model DIRECTORY --data FILES --out benchmarks/scale.json

recipes/smollm2-partial.yaml through `accelerate launch` and recipes/accelerate/, the same 65536 tokens a step for each
GPU (weak scaling), speeds as the run's own log has them (median of its windows after the first). The FSDP2 run on all
GPUs gets SIGTERM in the middle and is taken up by half of them; its losses are compared with the DDP run's, which had
the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

ROOT = Path(__file__).parent.parent
STEP_TOKENS = 65536


class Runs:
    """Launches training runs of the recipe and reads their logs."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)

    def command(self, name: str, gpus: int, mode: str, steps: int, batch_gpus: int) -> list[str]:
        """The command line; `batch_gpus` sets the tokens of a step, `gpus` how many share them."""
        converted = self.work / "one" / "converted"  # made by the first run
        settings = [f"model={converted}", "fox=null"] if name != "one" else [f"model={self.options.model}"]
        settings += [
            f"output={self.work / name}",
            f"data.train=[{self.options.data}]",
            "data.eval=[]",
            f"data.cache={self.work / 'tokens'}",
            f"stages.0.tokens={steps * STEP_TOKENS * batch_gpus}",
            f"stages.0.batch_tokens={STEP_TOKENS * batch_gpus}",
            f"stages.0.warmup_tokens={STEP_TOKENS}",
            f"checkpoint={{every_steps: {10 * steps}, keep: 1}}",
            "log.every=4",
        ]
        command = [sys.executable]
        if gpus > 1:
            config = ROOT / "recipes" / "accelerate" / f"{mode}.yaml"
            command += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
            command += ["--num_processes", str(gpus), "--main_process_port", str(29500 + os.getpid() % 500 + gpus)]
        return [*command, "-m", "retrofox", "train", str(ROOT / "recipes" / "smollm2-partial.yaml"), *settings]

    def start(self, devices: list[int], name: str, mode: str, steps: int, batch_gpus: int) -> subprocess.Popen:
        """Starts a run in a process group of its own, its output in a file."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        with open(self.work / f"{name}.{len(devices)}.txt", "w") as log:
            return subprocess.Popen(
                self.command(name, len(devices), mode, steps, batch_gpus),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def until(self, process: subprocess.Popen, name: str, step: int, number: int) -> bool:
        """Waits for a step in the run's log, then sends its processes a signal; whether the step was reached."""
        deadline = time.perf_counter() + self.options.timeout
        while time.perf_counter() < deadline and process.poll() is None:
            if any(line["step"] >= step for line in self.lines(name)):
                os.killpg(process.pid, number)
                process.wait()
                return True
            time.sleep(0.2)
        return self.wait(process, name, 0) or any(line["step"] >= step for line in self.lines(name))

    def wait(self, process: subprocess.Popen, name: str, seconds: float) -> bool:
        """Whether a run ended well within so many seconds; prints the end of its output where it did not."""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
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


def windows(lines: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Mean loss of each window of the log, by its first and last step."""
    before = [0, *(line["step"] for line in lines)]
    return {(first + 1, line["step"]): line["loss"] for first, line in zip(before, lines, strict=False)}


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

    # One GPU first, alone: it also converts, prepares the tokens and compiles what all others find in the caches.
    # Runs are killed after their last step: only the checkpoint that another number of GPUs takes up is of use.
    steps, everyone = options.steps, list(range(options.gpus))
    if not runs.until(runs.start([0], "one", "one", steps, 1), "one", steps, signal.SIGKILL):
        raise SystemExit("the run on one GPU failed")
    keep(runs.row("one", 1, "one process"))
    for gpus in sorted({min(2, options.gpus), options.gpus} - {1}):
        name = f"ddp-{gpus}"
        if runs.until(runs.start(everyone[:gpus], name, "ddp", steps, gpus), name, steps, signal.SIGKILL):
            keep(runs.row(name, gpus, "DDP"))
    half, name = max(1, options.gpus // 2), f"fsdp2-{options.gpus}"
    runs.until(runs.start(everyone, name, "fsdp2", steps, options.gpus), name, steps // 2, signal.SIGTERM)
    keep(runs.row(name, options.gpus, "FSDP2"))
    at = max((line["step"] for line in runs.lines(name)), default=0)
    if runs.wait(runs.start(everyone[:half], name, "fsdp2", steps, options.gpus), name, options.timeout):
        keep(runs.row(name, half, "FSDP2", after=at))
        sharded, whole = windows(runs.lines(name)), windows(runs.lines(f"ddp-{options.gpus}"))
        apart = {steps: abs(sharded[steps] - whole[steps]) for steps in sharded if steps in whole}
        found["resumed"] = {
            "saved_on": options.gpus,
            "resumed_on": half,
            "at_step": at,
            "largest_difference_of_loss_to_ddp": max(apart.values(), default=None),
            "differences": {f"{first}-{last}": round(value, 5) for (first, last), value in apart.items()},
        }
        print(json.dumps(found["resumed"]), flush=True)
    found["seconds"] = round(time.perf_counter() - started)
    save()


if __name__ == "__main__":
    main()
