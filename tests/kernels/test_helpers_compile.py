"""The kernels of decoding and of a layer's other parts compiled without a GPU: they fit, and spill as recorded."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiling import HALVES, SHARED_MEMORY, check, compiled
from fox_kernels.decoding import decode, lean, planner, search
from fox_kernels.decoding.append import append_kernel
from fox_kernels.layer import entry, gate, norm, rotary, shift
from fox_kernels.plain import tiles

NO_OPTION = {"STARTS": False, "WINDOW": False, "SINK": False, "CAP": False, "HORIZON": False, "PAIRS": 0}
NO_OPTION |= {"ALIGNED": 4}
ALL = {"STARTS": True, "WINDOW": True, "SINK": True, "CAP": True, "HORIZON": True, "PAIRS": 128}
FIXED = {"length_ptr": None}  # known on the host
MERGE = {"GROUP": 4, "PARTS": 64, "SEARCHED": 4}
SEARCH = {"GROUP": 4, "STEPS": 3}
NORM = {"NORM": True, "GATE": True, "D": 64, "COLUMNS": 64, "BLOCK": 32}
SHIFT = {"D": 64, "COLUMNS": 64, "BLOCK": 32}


def split(D: int, rows: int = 16, size: int = 2, **options):
    D0, D1 = tiles.split_head_dim(D)
    absent = {} if options.get("HORIZON") else {"start_ptr": None, "first_ptr": None, "begin_ptr": None}
    shape = {"GROUP": 4, "D0": D0, "D1": D1, "ROWS": rows}
    options["PRECISION"] = "ieee" if size == 4 else "tf32"
    return decode.split_kernel, shape | FIXED | NO_OPTION | options | absent


def append(group: int, D: int, width: int):
    padded = {"GP": planner.power_of_2(group), "KP": planner.power_of_2(width), "VP": planner.power_of_2(D)}
    return append_kernel, FIXED | {"GROUP": group, "KW": width, "VW": D} | padded


def at_length(kernel, constants: dict):
    """The same kernel, the cache's length read from the device."""
    return kernel, {name: value for name, value in constants.items() if name != "length_ptr"}


DECODED = {
    "split, D = 64": split(64),
    **{f"split, D = {D}, every option": split(D, **ALL) for D in (64, 128)},
    "split at a length, D = 64": at_length(*split(64)),
    "split at a length, D = 128, every option": at_length(*split(128, **ALL)),
    "merge at a length": at_length(decode.merge_kernel, MERGE | {"D": 64, "DP": 64}),
}
OTHERS = {
    "split, D = 80": split(80),
    "split, D = 256, every option": split(256, **ALL),
    **{f"split, D = {D}, 64 rows": split(D, 64, **ALL) for D in (64, 128)},
    "split, D = 256, float32": split(256, size=4, **ALL),
    "split at a length, D = 80, window": at_length(*split(80, WINDOW=True, SINK=True)),
    "merge, 256 parts": (decode.merge_kernel, FIXED | MERGE | {"D": 256, "DP": 256}),
    "search": (search.search_kernel, FIXED | SEARCH | {"ROWS": 4}),
    "search at a length": at_length(search.search_kernel, SEARCH | {"ROWS": 4}),
    "append with shifts": append(3, 80, 240),
    "append at a length": at_length(*append(3, 64, 64)),
    **{f"residual sum and norm, {n}": (lean.add_norm_kernel, {"COLUMNS": n}) for n in (1024, 16384)},
    "gates of a few rows": (lean.gate_rows_kernel, {"BLOCK": 1024}),
    "SiLU and product": (lean.silu_mul_kernel, {"BLOCK": lean.BLOCK}),
    "norm": (norm.head_norm_kernel, NORM),
    "norm backward": (norm.head_norm_backward_kernel, NORM),
    "norm backward, D = 256": (norm.head_norm_backward_kernel, NORM | {"D": 256, "COLUMNS": 256, "BLOCK": 8}),
    "shift": (shift.shift_kernel, SHIFT),
    "shift backward": (shift.shift_backward_kernel, SHIFT),
    "rotary": (rotary.rotary_kernel, {"INVERSE": False, "HALF": 32, "BLOCK": 32}),
    "rotary inverse, D = 128": (rotary.rotary_kernel, {"INVERSE": True, "HALF": 64, "BLOCK": 16}),
    **{f"gate, {H} heads": (gate.gate_kernel, gate.forward_tile(H)) for H in (9, 64)},
    **{f"gate of few rows, {H} heads": (gate.gate_kernel, gate.forward_tile(H, 64)) for H in (9, 64)},
    **{f"gate backward, {H} heads": (gate.gate_backward_kernel, gate.backward_tile(H)) for H in (9, 64)},
    "turn": (entry.turn_kernel, {"HALF": 32, "BLOCK": 32}),
    "pack": (entry.pack_kernel, {"HALF": 32, "HEADS": 16, "BLOCK": 32}),
    "weights": (entry.weights_kernel, {"BK": 1024}),
}
SPILLS = {(90, "split, D = 64, 64 rows"): 16, (100, "split, D = 64, 64 rows"): 8, (80, "split, D = 256, float32"): 16}


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, arch) for name in DECODED for arch in SHARED_MEMORY]
    + [
        pytest.param(name, arch, marks=[] if arch in (80, 89, 90) else pytest.mark.slow)
        for name in OTHERS
        for arch in SHARED_MEMORY
    ],
)
def test_fits_and_spills_no_more_than_recorded(name, arch):
    function, constants = (DECODED | OTHERS)[name]
    warps, stages = constants.get("num_warps", 4), constants.get("num_stages", 3)
    types: dict[str, str] = {}
    if name.startswith("append"):
        warps = 1
    if name.startswith("residual"):
        warps, types = max(1, min(16, constants["COLUMNS"] // 256)), {"w_ptr": "*bf16"}
    if name.startswith("split"):
        size = 4 if "float32" in name else 2
        types = {} if size == 2 else dict.fromkeys(HALVES & {*function.arg_names}, "*fp32")
        D, rows, capability = constants["D0"] + constants["D1"], constants["ROWS"], divmod(arch, 10)
        constants = constants | {"BN": planner.block_for(D, rows, size, capability)}
        stages = planner.stages_for(rows, constants["BN"], D, size, capability)
    check(compiled(function, constants, arch, warps, stages, **types), arch, SPILLS.get((arch, name), 0))
