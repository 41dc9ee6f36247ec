"""The kernels of decoding compiled for Ampere, Ada and Hopper without a GPU: they fit, and spill as recorded."""

import os

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from fox_kernels.decoding import decode, lean, planner, search
from fox_kernels.decoding.append import append_kernel
from fox_kernels.plain import tiles
from test_compile import SHARED_MEMORY, check_spills
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALVES = {
    "x_ptr",
    "r_ptr",
    "w_ptr",
    "s_ptr",
    "y_ptr",
    "gate_ptr",
    "up_ptr",
    "out_ptr",
    "q_ptr",
    "k_ptr",
    "v_ptr",
    "o_ptr",
    "keys_ptr",
    "values_ptr",
}
FLOATS = {"scale2", "softcap2", "inverse_cap", "floor", "eps", "horizon2"}
OPTIONS = {"STARTS": False, "WINDOW": False, "SINK": False, "CAP": False, "HORIZON": False, "PAIRS": 0}
ALL = {"STARTS": True, "WINDOW": True, "SINK": True, "CAP": True, "HORIZON": True, "PAIRS": 128}
ABSENT = {"start_ptr": None, "first_ptr": None}
FIXED = {"length_ptr": None}  # known on the host
MERGE = {"BN": 64, "STARTS": True, "WINDOW": True, "HORIZON": True, "PAIRS": 128}
SEARCH = {"GROUP": 4, "STEPS": 3}


def split(D: int, rows: int = 16, size: int = 2, **options):
    D0, D1 = tiles.split_head_dim(D)
    absent = {} if options.get("HORIZON") else ABSENT
    shape = {"GROUP": 4, "D0": D0, "D1": D1, "ROWS": rows, "BN": planner.block_for(D, rows, size)}
    options["PRECISION"] = "ieee" if size == 4 else "tf32"
    return decode.split_kernel, shape | FIXED | OPTIONS | options | absent


def append(group: int, D: int, width: int):
    padded = {"GP": planner.power_of_2(group), "KP": planner.power_of_2(width), "VP": planner.power_of_2(D)}
    return append_kernel, FIXED | {"GROUP": group, "KW": width, "VW": D} | padded


def at_length(kernel, constants: dict):
    """The same kernel, the cache's length read from the device."""
    return kernel, {name: value for name, value in constants.items() if name != "length_ptr"}


KERNELS = {
    "split, D = 80": split(80),
    **{f"split, D = {D}, every option": split(D, **ALL) for D in (64, 128, 256)},
    **{f"split, D = {D}, 64 rows": split(D, 64, **ALL) for D in (64, 128)},
    "split, D = 256, float32": split(256, size=4, **ALL),
    "merge, 256 parts": (decode.merge_kernel, FIXED | {"GROUP": 4, "D": 256, "DP": 256, "PARTS": 64} | MERGE),
    **{f"search, {rows} rows": (search.search_kernel, FIXED | SEARCH | {"ROWS": rows}) for rows in (4, 64)},
    "append with shifts": append(3, 80, 240),
    "split at a length, D = 64": at_length(*split(64)),
    "split at a length, D = 80, window": at_length(*split(80, WINDOW=True, SINK=True)),
    "split at a length, D = 128, every option": at_length(*split(128, **ALL)),
    "merge at a length": at_length(decode.merge_kernel, {"GROUP": 4, "D": 64, "DP": 64, "PARTS": 64} | MERGE),
    "search at a length": at_length(search.search_kernel, SEARCH | {"ROWS": 4}),
    "residual sum and norm, 576": (lean.add_norm_kernel, {"COLUMNS": 1024}),
    "residual sum and norm, 16384": (lean.add_norm_kernel, {"COLUMNS": 16384}),
    "gates of a few rows": (lean.gate_rows_kernel, {"BLOCK": 1024}),
    "SiLU and product": (lean.silu_mul_kernel, {"BLOCK": lean.BLOCK}),
    "append at a length": at_length(*append(3, 64, 64)),
}
SPILLS = {  # bytes; others none
    (89, "split, D = 64, 64 rows"): 2260,
    (89, "split, D = 128, 64 rows"): 1248,
    (90, "split, D = 64, 64 rows"): 16,
    (80, "split, D = 256, float32"): 16,
}


def compiled(name: str, arch: int):
    """Compile with bf16 states and aligned pointers and strides, as a cache has them."""
    function, constants = KERNELS[name]
    signature, attributes, single = {}, {}, "float32" in name
    for index, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            integer = argument in ("start_ptr", "first_ptr", "length_ptr")
            weights = name.startswith("gates") and argument == "w_ptr"
            signature[argument] = (
                "*bf16" if argument in HALVES and not single and not weights else "*i32" if integer else "*fp32"
            )
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
            if argument.startswith(("sq_", "sk_", "sv_")):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    warps, stages = 1 if name.startswith("append") else 4, 3
    if name.startswith("residual"):
        warps = max(1, min(16, constants["COLUMNS"] // 256))
    if name.startswith("split"):
        D = constants["D0"] + constants["D1"]
        stages = planner.stages_for(constants["ROWS"], constants["BN"], D, 4 if single else 2, divmod(arch, 10))
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_fits_and_spills_no_more_than_recorded(name, arch, tmp_path):
    binary = compiled(name, arch)
    assert binary.metadata.shared <= SHARED_MEMORY[arch]
    check_spills(binary, arch, tmp_path, SPILLS.get((arch, name), 0))
