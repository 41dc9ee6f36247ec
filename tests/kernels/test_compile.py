"""The attention kernels compiled without a GPU, for each kind that they are meant for: they fit, and spill no more than
recorded; no dot takes a transposed dot result, which Triton 3.4 to 3.7.0 can miscompile on Hopper."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl
from compiling import SHARED_MEMORY, by_name, check, compiled_launch, noted, transposed_dot_results
from fox_kernels.common import cumsum, edges, first_weights, horizon
from fox_kernels.options import Documents, Options, Saved
from fox_kernels.triton import backward, forward, tiles

KERNELS = ("forward", "dq", "dkdv")
EVERY_OPTION = {"group": 4, "starts": True, "dlse": True, "horizon": 8.0, "sink": 4, "softcap": 300.0}
# (compute capability, kernel, head dim) -> bytes in masked blocks; others none. Hopper's tiles are the fastest there.
SPILLS = {
    (90, "dq", 64): 56, (90, "dkdv", 64): 24, (90, "dq", 128): 56, (90, "dkdv", 128): 24,
    (90, "forward", 256): 176, (90, "dq", 256): 144, (90, "dkdv", 256): 272,
    (120, "dkdv", 80): 16, (120, "dq", 96): 16, (120, "dkdv", 96): 8, (80, "forward", 192): 8,
    (90, "forward", 192): 16, (90, "dkdv", 192): 48, (86, "dq", 192): 16, (89, "dq", 192): 16,
}  # fmt: skip
TRAINED = {
    "recipe": {"group": 3, "starts": True, "horizon": 8.0, "sink": 1},
    "GQA": {"group": 4},
    "GQA, documents": {"group": 4, "starts": True},
    "documents": {"starts": True},
}
# An A100's are outside the loops over blocks; tiles without them read more shared memory in there (kernels/LOG.md).
SPILLS_OF_TRAINED = {
    (80, "dkdv", 64): 16, (80, "dkdv", 128): 48, (90, "forward", 64): 8, (90, "dq", 64): 64, (90, "dkdv", 64): 304,
    (90, "dq", 128): 80, (90, "dkdv", 128): 256,
}  # fmt: skip
HEAD_DIMS = [64, 128, *(pytest.param(D, marks=pytest.mark.slow) for D in (80, 96, 192, 256))]


def launches(
    D: int, arch: int, group: int = 1, starts: bool = False, dlse: bool = False, **options
) -> dict[str, tuple]:
    """Return what a forward and a backward launch in bfloat16, `by_name`."""
    q = torch.zeros(1, 96, 3 * group, D, dtype=torch.bfloat16)
    k, c = torch.zeros(1, 96, 3, D, dtype=torch.bfloat16), torch.zeros(1, 3 * group, 96)
    chosen = Options(0.125, **options)
    documents = Documents(seq_start=torch.zeros(1, dtype=torch.int32) if starts else None)
    modules = (forward, backward, cumsum, edges, first_weights, horizon)
    with noted(*modules) as found, pytest.MonkeyPatch.context() as patch:
        for module in (forward, backward):
            patch.setattr(module, "describable", lambda *_: arch >= 90)
            patch.setattr(
                module, "tile_for",
                lambda kernel, D, dtype, _: tiles.row_for(kernel, D, tiles.table_for(dtype, divmod(arch, 10))),
            )  # fmt: skip
        o, lse2 = forward.launch_forward(q, k, k, c, c, chosen, documents, residual=q)
        backward.launch_backward(q, c if dlse else None, q, k, k, Saved(o, lse2, c, c, q), chosen, documents)
    return by_name(found)


def compiled_tile(kernel: str, D: int, arch: int, **problem):
    """Compile a kernel with the tile that its launcher takes for bfloat16 on a GPU of a compute capability."""
    function, named, warps, stages = launches(D, arch, **problem)[kernel]
    return compiled_launch(function, named, arch, warps, stages)


@triton.jit
def hazard_kernel(q_ptr, k_ptr, o_ptr):
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    k = tl.load(k_ptr + at)
    ds = tl.dot(tl.load(q_ptr + at), k)
    tl.store(o_ptr + at, tl.dot(tl.trans((ds * 2.0).to(tl.bfloat16)), k).to(tl.bfloat16))


def test_the_hazard_would_be_seen():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    ttir = compiled_launch(hazard_kernel, dict.fromkeys(("q_ptr", "k_ptr", "o_ptr"), x), 90).asm["ttir"]
    assert len(transposed_dot_results(ttir)) == 1


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_fits_and_spills_no_more_than_recorded(kernel, D, arch):
    check(compiled_tile(kernel, D, arch), arch, SPILLS.get((arch, kernel, D), 0))


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "problem",
    ["recipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GQA", "GQA, documents", "documents"))],
)
def test_what_users_train_spills_nothing_but_for_what_is_recorded(problem, kernel, D, arch):
    check(compiled_tile(kernel, D, arch, **TRAINED[problem]), arch, SPILLS_OF_TRAINED.get((arch, kernel, D), 0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_programs_fit_a_hopper_processor_at_head_dim_128(kernel):
    assert compiled_tile(kernel, 128, 90).metadata.shared <= SHARED_MEMORY[90] // 2, triton.__version__


@pytest.mark.slow
@pytest.mark.parametrize(("D", "arch"), [(64, 90), (96, 80), (256, 90), (64, 120), (128, 100)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_with_every_option_on(kernel, D, arch):
    check(compiled_tile(kernel, D, arch, **EVERY_OPTION), arch, spilled=512)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("D", [64, 256, *(pytest.param(D, marks=pytest.mark.slow) for D in (80, 128))])
def test_the_first_block_fits_and_spills_little(D, arch):
    function, named, warps, stages = launches(D, arch, group=4, sink=4, softcap=300.0)["first_block"]
    binary = compiled_launch(function, named, arch, warps, stages)
    check(binary, arch, 48 if (arch, D) == (90, 256) else 0)
