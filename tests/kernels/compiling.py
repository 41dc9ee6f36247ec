"""Compiles kernels without a GPU: what they take of a multiprocessor, and products that Triton may get wrong."""

import re
import subprocess
import tempfile

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

# compute capability -> bytes of shared memory that a program may have: A100, RTX 30, RTX 40, H100, B200, RTX 50
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
STATES = (
    "q k v o do dq dk dv residual x y dx dy r s gate up out keys values logit dlogit cos sin oq ok qkv g"
)  # fmt: skip
HALVES = {f"{name}_ptr" for name in STATES.split()}
INTEGERS = {f"{name}_ptr" for name in ("start", "end", "lower", "unseen", "first", "length")}
FLOATS = {"scale", "scale2", "softcap2", "inverse_cap", "horizon2", "floor", "eps"}


def type_of(argument: str) -> str:
    """Return an argument's usual type by its name: states are bfloat16, gates and sums float32."""
    if argument.endswith("_ptr"):
        return "*bf16" if argument in HALVES else "*i32" if argument in INTEGERS else "*fp32"
    return "fp32" if argument in FLOATS else "i32"


def compiled(function, constants: dict, arch: int, warps: int = 4, stages: int = 3, **types: str):
    """Compile a kernel whose addresses and rows are multiples of 16, as they are for ordinary tensors.

    constants: may hold others than the kernel's. types: of arguments that are not of their usual one.
    """
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    usual = {name: "constexpr" if name in constants else type_of(name) for name in function.arg_names}
    signature = usual | types
    aligned = [re.match(r"s(q|k|v|o|do)_|TP$|SP$|.*_ptr$", name) for name in signature]
    attributes = {
        (n,): [["tt.divisibility", 16]]
        for n, (match, kind) in enumerate(zip(aligned, signature.values(), strict=True))
        if match and not kind.startswith(("constexpr", "tensordesc"))
    }
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


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
