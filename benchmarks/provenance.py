"""What stands beside every measured number: the command, the versions, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("retrofox", "torch", "triton", "transformers", "tokenizers", "accelerate", "peft", "liger-kernel")


def provenance() -> dict[str, Any]:
    """The command (of absolute paths only the last part), the versions of what is installed, processor and Python."""
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "versions": versions,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
    }
