"""The fused kernels compiled for Ampere, Ada and Hopper without a GPU: they fit and spill nothing."""

import os

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from fox_kernels import fused_entry, fused_gate, fused_norm, fused_rotary, fused_shift  # noqa: E402
from test_compile import SHARED_MEMORY, check_spills  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

FLOATS = {
    "gain_ptr",
    "dgain_ptr",
    "amount_ptr",
    "damount_ptr",
    "w_ptr",
    "b_ptr",
    "log_f_ptr",
    "z_ptr",
    "dlog_f_ptr",
    "dw_ptr",
    "db_ptr",
    "f_ptr",
}
NORM = {"NORM": True, "GATE": True, "D": 64, "COLUMNS": 64, "BLOCK": 32}
KERNELS = {
    "norm": (fused_norm.head_norm_kernel, NORM),
    "norm backward": (fused_norm.head_norm_backward_kernel, NORM),
    "norm backward, D = 256": (fused_norm.head_norm_backward_kernel, NORM | {"D": 256, "COLUMNS": 256, "BLOCK": 8}),
    "shift": (fused_shift.shift_kernel, {"D": 64, "COLUMNS": 64, "BLOCK": 32}),
    "shift backward": (fused_shift.shift_backward_kernel, {"D": 64, "COLUMNS": 64, "BLOCK": 32}),
    "rotary": (fused_rotary.rotary_kernel, {"INVERSE": False, "HALF": 32, "BLOCK": 32}),
    "rotary inverse, D = 128": (fused_rotary.rotary_kernel, {"INVERSE": True, "HALF": 64, "BLOCK": 16}),
    **{f"gate, {H} heads": (fused_gate.gate_kernel, fused_gate.forward_tile(H)) for H in (9, 64)},
    **{f"gate backward, {H} heads": (fused_gate.gate_backward_kernel, fused_gate.backward_tile(H)) for H in (9, 64)},
    "turn": (fused_entry.turn_kernel, {"HALF": 32, "BLOCK": 32}),
    "pack": (fused_entry.pack_kernel, {"HALF": 32, "HEADS": 16, "BLOCK": 32}),
    "weights": (fused_entry.weights_kernel, {"BK": 1024}),
}


def compiled(name: str, arch: int):
    """Compile with bf16 states, float32 gates and aligned pointers, as a training step has them."""
    function, constants = KERNELS[name]
    constants = dict(constants)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    signature, attributes = {}, {}
    for index, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in FLOATS else "*bf16"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument == "eps" else "i32"
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_fits_and_spills_nothing(name, arch, tmp_path):
    binary = compiled(name, arch)
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    check_spills(binary, arch, tmp_path, 0)
