"""The attention kernels compiled without a GPU, for each kind that they are meant for: they fit, and spill no more than
recorded; no dot takes a transposed dot result, which Triton 3.4 to 3.7.0 can miscompile on Hopper."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl
from compiling import SHARED_MEMORY, check, compiled, transposed_dot_results
from fox_kernels.common import first_weights
from fox_kernels.plain import backward, forward, tiles

KERNELS = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkdv": backward.dkdv_kernel}
EVERY_OPTION = {"STARTS": True, "LOWER": 2, "SINK": True, "CAP": 2, "DLSE": True, "GROUP": 4}
# (compute capability, kernel, head dim) -> bytes in masked blocks; others none. Hopper's tiles are the fastest there.
SPILLS = {
    (90, "dq", 64): 56, (90, "dkdv", 64): 24, (90, "dq", 128): 56, (90, "dkdv", 128): 16, (90, "forward", 96): 8,
    (90, "forward", 256): 176, (90, "dq", 256): 192, (90, "dkdv", 256): 264,
    (120, "dkdv", 80): 16, (120, "dq", 96): 16, (80, "forward", 192): 8, (90, "forward", 192): 16,
    (90, "dkdv", 192): 40, **{(arch, kernel, 192): 8 for arch in (86, 89) for kernel in ("dq", "dkdv")},
}  # fmt: skip
WITH_HORIZON = {("forward", 64): 8, ("dq", 64): 40, ("dkdv", 64): 80, ("dq", 128): 56, ("dkdv", 128): 24}
HEAD_DIMS = [64, 128, *(pytest.param(D, marks=pytest.mark.slow) for D in (80, 96, 192, 256))]


def copied_by_tma(kernel: str, tile, tma: int) -> dict[str, int]:
    """Return the rows of a block by the names of the tensors that a kernel copies by TMA."""
    m, n = tile.block_m, tile.block_n
    stages = {
        "forward": ({"k_ptr": n, "v_ptr": n}, {"q_ptr": m}),
        "dq": ({"k_ptr": n, "v_ptr": n}, {"q_ptr": m, "do_ptr": m}),
        "dkdv": ({"q_ptr": m, "do_ptr": m}, {"v_block_ptr": n} if tma == 2 else {"v_ptr": n}, {"k_ptr": n}),
    }
    return {name: rows for some in stages[kernel][:tma] for name, rows in some.items()}


def compiled_tile(kernel: str, D: int, arch: int, **flags):
    """Compile a kernel with the tile that its launcher takes for bfloat16 on a GPU of a compute capability."""
    tile = tiles.row_for(kernel, D, tiles.table_for(torch.bfloat16, divmod(arch, 10)))
    D0, D1 = tiles.split_head_dim(D)
    tma = int(tile.tma) if D1 == 0 else 0
    constants = {
        "GROUP": 1, "D0": D0, "D1": D1, "BM": tile.block_m, "BN": tile.block_n, "STARTS": False,
        "LOWER": 0, "SINK": False, "CAP": False, "DLSE": False, "RESIDUAL": True,
        "NEXT_BM": 32, "PRECISION": "tf32", "LOST": 64, "TMA": tma, "ROWS": int(tile.gates_by_tma and tma > 0),
    }  # fmt: skip
    constants |= flags
    needs = {"start_ptr": "STARTS", "end_ptr": "STARTS", "dlse_ptr": "DLSE"}
    needs |= {"lower_ptr": "LOWER", "unseen_ptr": "LOWER"}
    constants |= {pointer: None for pointer, flag in needs.items() if not constants[flag]}
    rows = copied_by_tma(kernel, tile, tma)
    types = {name: f"tensordesc<bf16[1, {n}, 1, {D0}]>" for name, n in rows.items()}
    if constants["ROWS"]:
        types["c_rel_ptr"] = f"tensordesc<fp32[{tile.block_n}]>"
    if "v_block_ptr" not in types:
        constants["v_block_ptr"] = None
    return compiled(KERNELS[kernel], constants, arch, tile.warps, tile.stages, **types)


@triton.jit
def hazard_kernel(q_ptr, k_ptr, o_ptr):
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    k = tl.load(k_ptr + at)
    ds = tl.dot(tl.load(q_ptr + at), k)
    tl.store(o_ptr + at, tl.dot(tl.trans((ds * 2.0).to(tl.bfloat16)), k).to(tl.bfloat16))


def test_the_hazard_would_be_seen():
    ttir = compiled(hazard_kernel, {}, 90).asm["ttir"]
    assert len(transposed_dot_results(ttir)) == 1


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_fits_and_spills_no_more_than_recorded(kernel, D, arch):
    check(compiled_tile(kernel, D, arch), arch, SPILLS.get((arch, kernel, D), 0))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in SHARED_MEMORY if arch != 90])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents_spill_nothing(kernel, D, arch):
    check(compiled_tile(kernel, D, arch, STARTS=True), arch)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_horizon_spills_no_more_than_recorded_on_hopper(kernel, D):
    check(compiled_tile(kernel, D, 90, LOWER=2), 90, WITH_HORIZON.get((kernel, D), 0))


@pytest.mark.slow
@pytest.mark.parametrize(("D", "arch"), [(64, 90), (96, 80), (256, 90), (64, 120), (128, 100)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_with_every_option_on(kernel, D, arch):
    check(compiled_tile(kernel, D, arch, **EVERY_OPTION), arch, spilled=512)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("D", [64, 256, *(pytest.param(D, marks=pytest.mark.slow) for D in (80, 128))])
def test_the_first_block_fits_and_spills_little(D, arch):
    constants = {"GROUP": 4, "D": D, "WIDTH": 1 << (D - 1).bit_length(), "BLOCK": 64, "SINK": True, "CAP": 2}
    warps = first_weights.warps_for(constants["WIDTH"])
    binary = compiled(first_weights.first_block_kernel, constants, arch, warps, stages=1)
    check(binary, arch, 48 if (arch, D) == (90, 256) else 0)
