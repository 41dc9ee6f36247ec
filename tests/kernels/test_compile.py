"""Every kernel compiled for Ampere, Ada and Hopper without a GPU: it fits, spills no more than recorded, no dot takes a
transposed dot result, which Triton 3.4 to 3.7.0 can miscompile on Hopper."""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl
from fox_kernels.common import first_weights
from fox_kernels.plain import backward, forward, tiles
from recorded import RECORDED
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
KERNELS = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkdv": backward.dkdv_kernel}
HALVES = {"q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "residual_ptr"}
FLOATS = {"scale", "scale2", "softcap2", "inverse_cap"}
INTEGERS = {"start_ptr", "end_ptr", "lower_ptr", "unseen_ptr"}


def compiled(function, constants: dict, arch: int, warps: int, stages: int, described: dict[str, int]):
    """Compile with pointers and strides known to be multiples of 16, as they are for ordinary tensors.

    described: the rows of a block by the names of the tensors that TMA copies.
    """
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in described:
            rows = described[name]
            block = f"fp32[{rows}]" if name == "c_rel_ptr" else f"bf16[1, {rows}, 1, {constants['D0']}]"
            signature[name] = f"tensordesc<{block}>"
            continue
        pointer = "*bf16" if name in HALVES else "*i32" if name in INTEGERS else "*fp32"
        signature[name] = pointer if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        if name.endswith("_ptr") or re.match(r"s(q|k|v|o|do)_|TP|SP", name):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    )


def copied_by_tma(kernel: str, tile, tma: int) -> dict[str, int]:
    """Return the rows of a block by the names of the tensors that a kernel copies by TMA."""
    m, n = tile.block_m, tile.block_n
    stages = {
        "forward": ({"k_ptr": n, "v_ptr": n}, {"q_ptr": m}),
        "dq": ({"k_ptr": n, "v_ptr": n}, {"q_ptr": m, "do_ptr": m}),
        "dkdv": ({"q_ptr": m, "do_ptr": m}, {"v_block_ptr": n} if tma == 2 else {"v_ptr": n}, {"k_ptr": n}),
    }
    named = {name: rows for some in stages[kernel][:tma] for name, rows in some.items()}
    return named | ({"c_rel_ptr": n} if tma and int(tile.gates_by_tma) else {})


def compiled_tile(kernel: str, D: int, arch: int, **flags):
    tile = tiles.row_for(kernel, D, tiles.table_for(torch.bfloat16, divmod(arch, 10)))
    D0, D1 = tiles.split_head_dim(D)
    constants = {
        "GROUP": 1, "D0": D0, "D1": D1, "BM": tile.block_m, "BN": tile.block_n, "CAUSAL": True, "STARTS": False,
        "LOWER": 0, "SINK": False, "CAP": False, "SHIFT": False, "DLSE": False, "RESIDUAL": True,
        "NEXT_BM": 32, "PRECISION": "tf32", "LOST": 64, "TMA": int(tile.tma) if D1 == 0 else 0,
        "ROWS": int(tile.gates_by_tma) if D1 == 0 and tile.tma else 0,
    }  # fmt: skip
    needs = {"start_ptr": "STARTS", "end_ptr": "STARTS", "c_offset_ptr": "SHIFT", "dlse_ptr": "DLSE"}
    needs |= {"lower_ptr": "LOWER", "unseen_ptr": "LOWER"}
    constants |= {pointer: None for pointer, flag in needs.items() if not flags.get(flag)}
    described = copied_by_tma(kernel, tile, constants["TMA"])
    if "v_block_ptr" not in described:
        constants["v_block_ptr"] = None
    return compiled(KERNELS[kernel], constants | flags, arch, tile.warps, tile.stages, described)


def registers_and_spills(binary, arch: int, folder: Path) -> tuple[int, int]:
    """Return registers per thread and bytes of spill stores, as ptxas reports them."""
    (folder / "kernel.ptx").write_text(binary.asm["ptx"])
    name = f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    command = [get_ptxas(arch).path, "-v", "--gpu-name", name, folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None, report
    assert spills is not None, report
    return int(registers[1]), int(spills[1])


def check_spills(binary, arch: int, folder: Path, recorded: int) -> None:
    """Fail if ptxas spills more bytes than recorded; skip the rest of the test where the compiler is another."""
    _, spills = registers_and_spills(binary, arch, folder)
    if not triton.__version__.startswith("3.6."):
        pytest.skip("it compiles and fits; spills are recorded for Triton 3.6")
    assert spills <= recorded


def transposed_dot_results(ttir: str) -> list[str]:
    """Return the dots of a Triton IR that take, transposed, something computed from a dot of the same loop body."""
    made, latest = {}, {}  # loops beside each other use a name for two values: a name means what it last was made
    for n, line in enumerate(ttir.splitlines()):
        match = re.match(r"\s*(%[\w#]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        if match:
            operands = [latest.get(x, x) for x in re.findall(r"%[\w]+", match[3].split(" : ")[0])]
            latest[match[1]] = f"{match[1]} of line {n}"
            made[latest[match[1]]] = (match[2], operands)

    def comes_from(value: str, op: str, seen: set) -> bool:
        kind, operands = made.get(value, ("", []))
        if value in seen or kind in ("tt.load", "scf.for", ""):
            return False
        seen.add(value)
        return kind == op or (kind != "tt.dot" and any(comes_from(x, op, seen) for x in operands))

    bad = []
    for value, (kind, operands) in made.items():
        for operand in operands[:2] if kind == "tt.dot" else ():
            through = {operand} | {
                x for x in made if comes_from(operand, made[x][0], set()) and made[x][0] == "tt.trans"
            }
            chain = [x for x in through if made.get(x, ("", []))[0] == "tt.trans" and reaches(made, operand, x)]
            if any(comes_from(made[x][1][0], "tt.dot", set()) for x in chain):
                bad.append(value)
    return bad


def reaches(made: dict, value: str, target: str) -> bool:
    """Return whether target is value or feeds it without a dot or a load between."""
    if value == target:
        return True
    kind, operands = made.get(value, ("", []))
    return kind not in ("tt.dot", "tt.load", "scf.for", "") and any(reaches(made, x, target) for x in operands)


@triton.jit
def hazard_kernel(q_ptr, k_ptr, o_ptr):
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    k = tl.load(k_ptr + at)
    ds = tl.dot(tl.load(q_ptr + at), k)
    tl.store(o_ptr + at, tl.dot(tl.trans((ds * 2.0).to(tl.bfloat16)), k).to(tl.bfloat16))


def test_the_hazard_would_be_seen():
    ttir = compiled(hazard_kernel, {}, 90, 4, 2, {}).asm["ttir"]
    assert len(transposed_dot_results(ttir)) == 1
    hazard = "%ds = tt.dot %q, %k : t\n%x = tt.trans %ds : t\n%dk = tt.dot %x, %k : t\n"
    harmless = hazard.replace("tt.dot %q, %k", "tt.load %p")
    for loops, count in ((hazard + harmless, 1), (harmless + hazard, 1), (harmless + "%ds = tt.dot %q, %k : t\n", 0)):
        assert len(transposed_dot_results(loops)) == count


def fast(D: int, arch: int) -> bool:
    return (D in (64, 128) and arch in (80, 90)) or (D, arch) == (64, 89)


TABLE = [
    pytest.param(kernel, D, arch, marks=[] if fast(D, arch) else pytest.mark.slow)
    for kernel in KERNELS for D in (64, 80, 96, 128, 256) for arch in (80, 89, 90)
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "D", "arch"), TABLE)
def test_fits_and_spills_no_more_than_recorded(kernel, D, arch, tmp_path):
    binary = compiled_tile(kernel, D, arch)
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    assert transposed_dot_results(binary.asm["ttir"]) == []
    check_spills(binary, arch, tmp_path, RECORDED[arch, kernel, D][1])


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_horizon_makes_no_kernel_spill_more_than_recorded_on_hopper(kernel, D, tmp_path):
    more = {("forward", 64): 4, ("dkdv", 64): 84, ("dkdv", 128): 24}  # in masked blocks
    spills = more.get((kernel, D), RECORDED[90, kernel, D][1])
    check_spills(compiled_tile(kernel, D, 90, LOWER=2), 90, tmp_path, spills)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("D", [64, 256, *(pytest.param(D, marks=pytest.mark.slow) for D in (80, 128))])
def test_the_first_block_fits_and_spills_little(D, arch, tmp_path):
    constants = {"GROUP": 4, "D": D, "WIDTH": 1 << (D - 1).bit_length(), "BLOCK": 64, "SINK": True, "CAP": 2}
    warps = first_weights.warps_for(constants["WIDTH"])
    binary = compiled(first_weights.first_block_kernel, constants, arch, warps, 1, {})
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    assert transposed_dot_results(binary.asm["ttir"]) == []
    check_spills(binary, arch, tmp_path, 44 if (arch, D) == (90, 256) else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "arch"), [(64, 90), (96, 80), (256, 90)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_with_every_option_on(kernel, D, arch):
    flags = {"STARTS": True, "LOWER": 2, "SINK": True, "CAP": 2, "SHIFT": True, "DLSE": True, "GROUP": 4}
    binary = compiled_tile(kernel, D, arch, **flags)
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    assert transposed_dot_results(binary.asm["ttir"]) == []
