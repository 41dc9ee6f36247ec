"""Compiles kernels without a GPU: what they take of a multiprocessor, and products that Triton may get wrong."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# compute capability -> bytes of shared memory that a program may have: A100, RTX 30, RTX 40, H100, B200, RTX 50
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@contextlib.contextmanager
def noted(*modules) -> Iterator[list[tuple]]:
    """Let what modules launch not run, but become (kernel, its arguments by name, warps, stages) in a list."""
    found = []

    def note(kernel, grid, arguments=(), constants=(), *, warps=4, stages=3, **named) -> None:
        named |= dict(zip(kernel.arg_names, (*arguments, *constants), strict=False))
        found.append((kernel, named, warps, stages))

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "launch", note)
        yield found


def by_name(found: list[tuple]) -> dict[str, tuple]:
    """Return launches by their kernels' names, less `_kernel`."""
    return {launch[0].fn.__name__.removesuffix("_kernel"): launch for launch in found}


class Driver:
    """Stands in for a GPU of a compute capability: a launch that only compiles asks for no more."""

    def __init__(self, arch: int):
        self.get_current_device = lambda: arch  # Triton keeps what it has compiled by device
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)


def compiled_launch(kernel, named: dict, arch: int, warps: int = 4, stages: int = 3):
    """Compile a kernel as a launch with these arguments does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Driver(arch))
        return kernel.warmup(grid=(1,), num_warps=warps, num_stages=stages, enable_fp_fusion=True, **named)


def check(binary, arch: int, spilled: int = 0) -> None:
    """Assert that a kernel fits, that no dot takes a transposed dot result, and that it spills no more than recorded.

    spilled: bytes a thread, compiled by Triton 3.6; with another, that check is skipped.
    """
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    assert transposed_dot_results(binary.asm["ttir"]) == []
    if not triton.__version__.startswith("3.6."):
        pytest.skip("it compiles and fits; spills are recorded for Triton 3.6")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", report)
    assert stack is not None, report
    assert int(stack[1]) <= spilled


def transposed_dot_results(ttir: str) -> list[str]:
    """Return the dots of a Triton IR that take, transposed, something computed from a dot of the same loop body."""
    made, latest = {}, {}  # loops beside each other use a name for two values: a name means what it last was made
    for n, line in enumerate(ttir.splitlines()):
        match = re.match(r"\s*(%[\w#]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        if match:
            operands = [latest.get(x, x) for x in re.findall(r"%[\w]+", match[3].split(" : ")[0])]
            latest[match[1]] = f"{match[1]} of line {n}"
            made[latest[match[1]]] = (match[2], operands)

    def hazardous(value: str, turned: bool, seen: set) -> bool:
        kind, operands = made.get(value, ("", []))
        if kind == "tt.dot":
            return turned
        if (value, turned) in seen or kind in ("tt.load", "scf.for", ""):
            return False
        seen.add((value, turned))
        return any(hazardous(x, turned or kind == "tt.trans", seen) for x in operands)

    dots = [(value, operands[:2]) for value, (kind, operands) in made.items() if kind == "tt.dot"]
    return [value for value, operands in dots if any(hazardous(x, False, set()) for x in operands)]
