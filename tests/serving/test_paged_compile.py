"""The kernels over pages compiled for Ampere, Ada and Hopper without a GPU: they fit and spill nothing."""

import os
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from retrofox.serving import paged_attention, paged_rows

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from compiling import check

FLOATS = ("scale", "softcap", "horizon")
TYPES = {
    **dict.fromkeys(("query", "key", "value", "cache", "output"), "*bf16"),
    **dict.fromkeys(("floats", "log_f", "parts", "weights"), "*fp32"),
    **dict.fromkeys(("query_start", "seq_lens", "block_table", "owner", "pages"), "*i32"),
    **dict.fromkeys(("slots", "source", "source_request"), "*i64"),
    **dict.fromkeys(FLOATS, "fp32"),
    "sums": "*fp64",
}
UNALIGNED = ("requests", "heads", "query_heads", "sinks", "first", "length", "table_row", "log_f_token", *FLOATS)
NONE = ("owner", "source", "source_request")
SIZES = {"GROUPS": 3, "PADDED": 4, "DIM": 64, "CHANNELS": 64, "PER": 2, "PAGE": 16}
WRITE = {"CHUNK": 512, **SIZES}


def attend(dim, channels, **options):
    sizes = {"GROUPS": 3, "ROWS": 16, "DIM": dim, "CHANNELS": channels, "PER": 2, "PAGE": 16}
    sizes["BLOCK"] = paged_attention.KEYS
    plain = {"PARTS": 8, "REACH": 0, "SINK": 0, "CAP": False, "SEARCH": 0}
    return paged_attention._attend_kernel, sizes | plain | options, 4


KERNELS = {
    "sums": (paged_rows._sums_kernel, {"GROUPS": 3, "PADDED": 4, "CHUNK": 512, "BLOCK": 128}, 4),
    "write a token": (paged_rows._write_kernel, WRITE | {"BLOCK": 1, "SINGLE": True}, 1),
    "write": (paged_rows._write_kernel, WRITE | {"BLOCK": 128, "SINGLE": False}, 4),
    "write, at most a chunk": (paged_rows._write_kernel, WRITE | {"BLOCK": 128, "SINGLE": False, "sums": None}, 4),
    "attend, 64": attend(64, 64),
    "attend, 64, one part": attend(64, 64, PARTS=1, SINK=1),
    "attend, 80, a window": attend(80, 128, REACH=4096),
    "attend, 64, a horizon": attend(64, 64, SINK=1, SEARCH=2),
    "attend, 128, a horizon and a reach": attend(128, 128, SINK=1, SEARCH=2, REACH=5909),
    "attend, 128, softcap": attend(128, 128, CAP=True, SINK=4),
    "merge": (paged_attention._merge_kernel, {"DIM": 64, "CHANNELS": 64, "PARTS": 8}, 1),
    "merge, most parts": (paged_attention._merge_kernel, {"DIM": 128, "CHANNELS": 128, "PARTS": 64}, 4),
    "gather": (paged_rows._gather_kernel, SIZES | {"BLOCK": 64}, 4),
}


def compiled(name: str, arch: int):
    """Compiled with bfloat16 states, aligned pointers and strides."""
    function, constants, warps = KERNELS[name]
    constants = constants | {name: None for name in NONE if name in function.arg_names}
    signature, attributes = {}, {}
    for index, argument in enumerate(function.arg_names):
        signature[argument] = "constexpr" if argument in constants else TYPES.get(argument, "i32")
        if argument not in constants and argument not in UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": 3})


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_fits_and_spills_nothing(name, arch):
    check(compiled(name, arch), arch)
