"""The training log: speed and memory, the line on the terminal, log.jsonl."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback

from retrofox.planning.hardware import peak_of
from retrofox.planning.live_share import shares_text
from retrofox.support.files import write_whole
from retrofox.support.memory import bytes_in_use, peak_bytes


class Clock:
    """Tokens per second, MFU, memory and time left, between log lines."""

    def __init__(self, batch_tokens: int, flops_per_token: float | None, device: torch.device):
        self.batch_tokens, self.flops_per_token, self.device = batch_tokens, flops_per_token, device
        self.peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.restart(0)

    def restart(self, step: int) -> None:
        """Starts a new window at a step."""
        self.step, self.time = step, time.perf_counter()

    def read(self, step: int, max_steps: int, world_size: int) -> dict[str, float]:
        """Speed, memory and time left since the last reading, and MFU where it is known."""
        elapsed = max(1e-9, time.perf_counter() - self.time)
        speed = (step - self.step) * self.batch_tokens / elapsed
        # On a CPU the memory in use: its peak may date from before the loop.
        memory = peak_bytes(self.device) if self.device.type == "cuda" else bytes_in_use(self.device)
        found = {"tokens_per_second": speed, "memory_gb": memory / 1e9}
        if speed > 0:
            found["eta_seconds"] = (max_steps - step) * self.batch_tokens / speed
        if (mfu := self.mfu(speed, world_size)) is not None:
            found["mfu"] = mfu
        self.restart(step)
        return found

    def mfu(self, speed: float, world_size: int) -> float | None:
        """The share of the devices' peak at so many tokens per second; None where it or the operations are unknown."""
        if self.peak is None or self.flops_per_token is None:
            return None
        return speed * self.flops_per_token / (self.peak * world_size)


class Progress(ProgressCallback):
    """The Trainer's progress bar; log lines in one fixed form."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                disable=args.disable_tqdm,
                bar_format="{percentage:3.0f}%|{bar}| step {n_fmt} of {total_fmt}",  # speed and time left: `log_line`
            )
        self.current_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "loss" in logs:
            tqdm.write(log_line(logs, state.global_step, state.max_steps), file=sys.stderr)


def log_line(logs: dict[str, Any], step: int, max_steps: int) -> str:
    """One line: step, loss, gradient norm, rate, tokens, speed, MFU, memory, gates in plain words, time left."""
    parts = [f"step {step}/{max_steps}", f"loss {logs['loss']:.4f}"]
    forms: Sequence[tuple[str, str]] = (
        ("grad_norm", "grad {:.3f}"),
        ("learning_rate", "lr {:.2e}"),
        ("tokens", "{:,} tokens"),
        ("tokens_per_second", "{:,.0f} tok/s"),
        ("mfu", "mfu {:.1%}"),
        ("memory_gb", "{:.1f} GB"),
    )
    parts += [form.format(logs[key]) for key, form in forms if logs.get(key) is not None]
    if "half_life_p10" in logs:
        low, mean, high = (logs[f"half_life_{key}"] for key in ("p10", "mean", "p90"))
        parts.append(f"half-lives {low:,.0f} to {high:,.0f} tokens, mean {mean:,.0f}")
    if logs.get("gates_dead"):
        parts.append(f"gates that never forget: {logs['gates_dead']:.0%}")
    if "live_cache_32k" in logs:
        parts.append(f"keys alive, operations/cache: {shares_text(logs)}")
    if "eta_seconds" in logs:
        seconds = int(logs["eta_seconds"])
        parts.append(f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left")
    return " | ".join(parts)


class JsonLog:
    """log.jsonl: one line per log entry; on resume, lines of steps that will be run again are dropped."""

    def __init__(self, path: Path, stage: int, resumed_step: int):
        self.path, self.stage = path, stage
        kept = [line for line in self._lines() if (line["stage"], line["step"]) <= (stage, resumed_step)]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def _lines(self) -> list[dict[str, Any]]:
        """The entries that can be read: a power cut may leave a part of one."""
        found = []
        for line in self.path.read_bytes().split(b"\n") if self.path.is_file() else ():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"stage", "step"} <= entry.keys():
                    found.append(entry)
        return found

    def write(self, values: dict[str, Any]) -> None:
        """Appends one line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.stage, **values}) + "\n")
