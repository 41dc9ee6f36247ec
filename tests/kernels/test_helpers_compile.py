"""The kernels of decoding and of a layer's other parts compiled without a GPU: they fit, and spill as recorded."""

import contextlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiling import SHARED_MEMORY, check, compiled, compiled_launch
from fox_kernels.decoding import append as append_module
from fox_kernels.decoding import elementwise, planner
from fox_kernels.layer import entry, gate, norm, rotary, shift
from fox_kernels.options import Options

EVERY_OPTION = {"starts": True, "window": 4096, "sink": 4, "softcap": 30.0, "horizon": 8.0}
NORM = {"D": 64, "COLUMNS": 64, "BLOCK": 32}
SHIFT = {"D": 64, "COLUMNS": 64, "BLOCK": 32}


def launches(
    D: int, arch: int, T: int = 1, dtype=torch.bfloat16, starts: bool = False, at_length: bool = False, **options
) -> dict[str, tuple]:
    """Return (kernel, its arguments, warps, stages) by name of what a decoding call of a kind launches."""
    found: dict[str, tuple] = {}

    def note(kernel, grid, *, warps=4, stages=3, **named) -> None:
        found[kernel.fn.__name__.removesuffix("_kernel")] = kernel, named, warps, stages

    B, S, H, Hkv = 16, 65536, 32, 8
    q, k = torch.empty(B, T, H, D, dtype=dtype), torch.empty(D, dtype=dtype).expand(B, S, Hkv, D)
    c = torch.empty(S).expand(B, H, S)
    tokens = torch.zeros(B * Hkv, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "launch", note)
        for name in ("block_for", "stages_for"):
            choose = getattr(planner, name)
            patch.setattr(planner, name, lambda *given, choose=choose: choose(*given[:-1], divmod(arch, 10)))
        decoder = planner.Decoder(q.shape, Hkv, dtype, q.device, Options(0.125, **options), padded=starts)
        given = {"length": tokens[:1], "first": tokens} if at_length else {}
        decoder(q, k, k, c, c, seq_start=tokens[:B] if starts else None, **given)
    return found


def append(group: int, width: int, **length):
    k, v = torch.empty(1, 2, 1, width, dtype=torch.bfloat16), torch.empty(1, 2, 1, 64, dtype=torch.bfloat16)
    found: list[tuple] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_module, "launch", lambda kernel, grid, *, warps, **named: found.append((kernel, named)))
        patch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
        rooms = [k.expand(1, 2, 64, width), v.expand(1, 2, 64, 64), torch.empty(1, 4 * group, 64, 1)]
        append_module.append(rooms, length.get("at", 5), k, v, torch.empty(1, 1, 2 * group))
    return found[0]


DECODED = {
    "split, D = 64": (64, {}),
    **{f"split, D = {D}, every option": (D, EVERY_OPTION) for D in (64, 128)},
    "split at a length, D = 64": (64, {"at_length": True}),
    "split at a length, D = 128, every option": (128, EVERY_OPTION | {"at_length": True}),
    "merge at a length": (64, {"horizon": 8.0, "at_length": True}),
    "split, D = 80": (80, {}),
    "split, D = 256, every option": (256, EVERY_OPTION),
    **{f"split, D = {D}, 64 rows": (D, EVERY_OPTION | {"T": 16}) for D in (64, 128)},
    "split, D = 256, float32": (256, EVERY_OPTION | {"dtype": torch.float32}),
    "split at a length, D = 80, window": (80, {"window": 4096, "sink": 4, "at_length": True}),
    "merge, D = 256": (256, EVERY_OPTION),
    "search": (64, EVERY_OPTION),
}
OTHERS = {
    "append with shifts": append(3, 240),
    "append at a length": append(3, 64, at=torch.zeros(1, dtype=torch.int32)),
    **{f"residual sum and norm, {n}": (elementwise.add_norm_kernel, {"COLUMNS": n}) for n in (1024, 16384)},
    "gates of a few rows": (elementwise.gate_rows_kernel, {"BLOCK": 1024}),
    "SiLU and product": (elementwise.silu_mul_kernel, {"BLOCK": elementwise.BLOCK}),
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


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("name", DECODED)
def test_decoding_fits_and_spills_no_more_than_recorded(name, arch):
    D, problem = DECODED[name]
    kernel, named, warps, stages = launches(D, arch, **problem)[name.split(",")[0].split()[0]]
    check(compiled_launch(kernel, named, arch, warps, stages), arch, SPILLS.get((arch, name), 0))


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=[] if arch in (80, 89, 90) else pytest.mark.slow)
        for name in OTHERS
        for arch in SHARED_MEMORY
    ],
)
def test_fits_and_spills_nothing(name, arch):
    function, constants = OTHERS[name]
    if name.startswith("append"):
        check(compiled_launch(function, constants, arch, warps=1), arch)
        return
    warps, stages = constants.get("num_warps", 4), constants.get("num_stages", 3)
    types: dict = {"strides": entry.PackedStrides(*["i32"] * 7)} if name == "pack" else {}
    if name.startswith("residual"):
        warps, types = max(1, min(16, constants["COLUMNS"] // 256)), {"w_ptr": "*bf16"}
    check(compiled(function, constants, arch, warps, stages, **types), arch)
