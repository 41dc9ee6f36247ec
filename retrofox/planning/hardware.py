"""GPUs by name: memory, peak rate, and which one is here. Importing it imports no torch."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

import psutil

USABLE = 0.94
"""Share of a GPU's memory that is left beside its context and the allocator's losses."""
NAMES = {
    "a100-40": ("NVIDIA A100 40GB", 40e9),
    "a100-80": ("NVIDIA A100 80GB", 80e9),
    "h100": ("NVIDIA H100", 80e9),
    "h200": ("NVIDIA H200", 141e9),
    "b200": ("NVIDIA B200", 180e9),
    "l40s": ("NVIDIA L40S", 48e9),
    "4090": ("NVIDIA GeForce RTX 4090", 24e9),
    "5090": ("NVIDIA GeForce RTX 5090", 32e9),
}
"""Short name -> the driver's name, and bytes that a run can use: the vendor's figure in GB is about what the context
leaves of the driver's figure in GiB."""
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
    "RTX 3090": 71e12,
}
"""Part of a GPU's name -> dense bfloat16 operations per second with float32 sums, as the vendors publish them."""
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class Hardware(NamedTuple):
    """The machine that a run is planned for.

    Attributes:
        memory: bytes that a run can have on each device.
        flops: peak operations per second of each, None where it is unknown.
        host: bytes of CPU memory, None where another machine is planned for.
        gpus: devices that the run is spread over.
        sharding: "ddp" (weights whole on each GPU), "fsdp2" or "zero3" (weights, gradients, optimizer split).
    """

    name: str
    memory: float
    flops: float | None
    gpu: bool = True
    host: float | None = None
    gpus: int = 1
    sharding: str = "ddp"

    @property
    def shards(self) -> int:
        """Parts into which weights, gradients and the optimizer's state are split."""
        return 1 if self.sharding == "ddp" else self.gpus


def peak_of(name: str) -> float | None:
    """Peak operations per second of a GPU by its driver's name, None where it is not in the table."""
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def hardware(gpu: str | None = None, memory: str | None = None, flops: str | None = None) -> Hardware:
    """The device named, with another memory or rate where given; without a name the one that is here."""
    if gpu is not None:
        short = gpu.lower()
        if short not in NAMES:
            raise ValueError(f"--gpu is one of {', '.join(NAMES)}, got {gpu!r}: or give --memory 80G --flops 990T")
        name, size = NAMES[short]
        found = Hardware(name, size, peak_of(name))
    elif memory is not None:
        found = Hardware(f"a GPU of {memory}", 0.0, None)
    else:
        found = here()
    if memory is not None:
        found = found._replace(memory=quantity(memory))
    return found if flops is None else found._replace(flops=quantity(flops))


def here() -> Hardware:
    """This machine's first GPU, as nvidia-smi tells; without one its CPU."""
    host = float(psutil.virtual_memory().total)
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        name, mebibytes = told.splitlines()[0].rsplit(",", 1)
        return Hardware(name.strip(), USABLE * float(mebibytes) * 2**20, peak_of(name), host=host)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Hardware("this machine's CPU", host, None, gpu=False, host=host)


def quantity(text: str) -> float:
    """A number with a suffix in powers of 1000, or 1024 with an i: "80G", "79.6GiB"; ValueError under 1G, as for 80."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is not None:
        value = float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].lower()]
        if value >= 1e9:
            return value
    raise ValueError(f"{text!r} is no quantity of 1G or more: give one such as 80G, 79.6GiB or 990T")
