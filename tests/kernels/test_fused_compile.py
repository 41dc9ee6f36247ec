"""The fused kernels compiled for Ampere, Ada and Hopper without a GPU: they fit and spill nothing."""

import os

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from fox_kernels.layer import entry, gate, norm, rotary, shift
from test_compile import SHARED_MEMORY, check_spills
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
    "norm": (norm.head_norm_kernel, NORM),
    "norm backward": (norm.head_norm_backward_kernel, NORM),
    "norm backward, D = 256": (norm.head_norm_backward_kernel, NORM | {"D": 256, "COLUMNS": 256, "BLOCK": 8}),
    "shift": (shift.shift_kernel, {"D": 64, "COLUMNS": 64, "BLOCK": 32}),
    "shift backward": (shift.shift_backward_kernel, {"D": 64, "COLUMNS": 64, "BLOCK": 32}),
    "rotary": (rotary.rotary_kernel, {"INVERSE": False, "HALF": 32, "BLOCK": 32}),
    "rotary inverse, D = 128": (rotary.rotary_kernel, {"INVERSE": True, "HALF": 64, "BLOCK": 16}),
    **{f"gate, {H} heads": (gate.gate_kernel, gate.forward_tile(H)) for H in (9, 64)},
    **{f"gate of few rows, {H} heads": (gate.gate_kernel, gate.forward_tile(H, 64)) for H in (9, 64)},
    **{f"gate backward, {H} heads": (gate.gate_backward_kernel, gate.backward_tile(H)) for H in (9, 64)},
    "turn": (entry.turn_kernel, {"HALF": 32, "BLOCK": 32}),
    "pack": (entry.pack_kernel, {"HALF": 32, "HEADS": 16, "BLOCK": 32}),
    "weights": (entry.weights_kernel, {"BK": 1024}),
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
