"""The kernels of decoding and of a layer's other parts compiled without a GPU: they fit, and spill as recorded."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiling import SHARED_MEMORY, by_name, check, compiled_launch, noted
from fox_kernels.decoding import append, elementwise, planner
from fox_kernels.host import device
from fox_kernels.layer import entry, gate, norm, rotary, shift
from fox_kernels.options import Options

EVERY_OPTION = {"starts": True, "window": 4096, "sink": 4, "softcap": 30.0, "horizon": 8.0}


def launches(
    D: int, arch: int, T: int = 1, dtype=torch.bfloat16, starts: bool = False, at_length: bool = False,
    shared: bool = False, **options,
) -> dict[str, tuple]:  # fmt: skip
    """Return what a decoding call of a kind launches, `by_name`."""
    B, S, H, Hkv = 16, 65536, 32, 8
    q, k = torch.empty(B, T, H, D, dtype=dtype), torch.empty(D, dtype=dtype).expand(B, S, Hkv, D)
    c = torch.empty(S).expand(B, H, S)
    tokens = torch.zeros(B * Hkv, dtype=torch.int32)
    with noted(planner) as found, pytest.MonkeyPatch.context() as patch:
        for name in ("block_for", "stages_for"):
            choose = getattr(planner, name)
            patch.setattr(planner, name, lambda *given, choose=choose: choose(*given[:-1], divmod(arch, 10)))
        decoder = planner.Decoder(q.shape, Hkv, dtype, q.device, Options(0.125, **options), padded=starts)
        given = {"length": tokens[:1], "first": tokens} if at_length else {}
        given |= {"offset": tokens[:B]} if shared else {}
        decoder(q, k, k, c, c, seq_start=tokens[:B] if starts else None, **given)
    return by_name(found)


def states(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)


def gains(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, requires_grad=True)


def append_a_token(width: int, length: int | torch.Tensor = 5) -> None:
    k, v = torch.empty(1, 2, 1, width, dtype=torch.bfloat16), torch.empty(1, 2, 1, 64, dtype=torch.bfloat16)
    buffers = [k.expand(1, 2, 64, width), v.expand(1, 2, 64, 64), torch.empty(1, 12, 64, 1)]
    append.append(buffers, length, k, v, torch.empty(1, 1, 6))


@torch.no_grad()
def append_a_step(K: int, D: int, pairs: int, heads_per_gate: int, offset: torch.Tensor | None = None) -> None:
    buffers = [torch.empty(2, 3, 64, D, dtype=torch.bfloat16)] * 2 + [torch.empty(2, 18 // heads_per_gate, 64, 1)]
    weight, angles = torch.empty(9 // heads_per_gate, K), torch.empty(2, 2, 1, pairs, dtype=torch.bfloat16)
    x, q, k = (torch.empty(2, 1, width, dtype=torch.bfloat16) for width in (K, 9 * D, 3 * D))
    length = torch.zeros(1, dtype=torch.int32)
    bias = weight[:, 0].contiguous()
    append.append_step(buffers, length, x, q, k, k, weight, bias, *angles, bias if pairs else None, offset=offset)


@torch.no_grad()
def decode_a_token(width: int) -> None:
    x = states(2, 1, width)
    elementwise.add_norm(x, x, states(width), 1e-5)
    elementwise.silu_mul(x, x)
    elementwise.gate_rows(x, gains(9, width), gains(9))


DECODED = {
    "split, D = 64": (64, {}),
    **{f"split, D = {D}, every option": (D, EVERY_OPTION) for D in (64, 128)},
    "split at a length, D = 64": (64, {"at_length": True}),
    "split at a length, D = 128, every option": (128, EVERY_OPTION | {"at_length": True}),
    "split at a length, D = 64, in shared buffers": (64, EVERY_OPTION | {"at_length": True, "shared": True}),
    "merge at a length, in shared buffers": (64, EVERY_OPTION | {"at_length": True, "shared": True}),
    "merge at a length": (64, {"horizon": 8.0, "at_length": True}),
    "split, D = 80": (80, {}),
    "split, D = 256, every option": (256, EVERY_OPTION),
    **{f"split, D = {D}, 64 rows": (D, EVERY_OPTION | {"T": 16}) for D in (64, 128)},
    "split, D = 256, float32": (256, EVERY_OPTION | {"dtype": torch.float32}),
    "split at a length, D = 80, window": (80, {"window": 4096, "sink": 4, "at_length": True}),
    "merge, D = 256": (256, EVERY_OPTION),
    "search": (64, EVERY_OPTION),
}
ANGLES = torch.zeros(2, 1, 64, 32)
OTHERS = {
    "append with shifts": (append_a_token, 240),
    "append at a length": (append_a_token, 64, torch.zeros(1, dtype=torch.int32)),
    "append a step": (append_a_step, 576, 64, 32, 3),
    "append a step to shared buffers": (append_a_step, 576, 64, 32, 3, torch.zeros(6, dtype=torch.int32)),
    "append a step, D = 256": (append_a_step, 4096, 256, 128, 1),
    "append a step, nothing turned": (append_a_step, 576, 80, 0, 1),
    **{f"decode, {n} channels": (decode_a_token, n) for n in (1024, 16384)},
    **{f"norm, D = {D}": (norm.head_norm, states(2, 64, 9, D), gains(9, D), states(2, 64, 9 * D)) for D in (64, 256)},
    "shift": (shift.shift, states(2, 64, 9, 64), gains(2, 64, 9)),
    **{f"rotary, D = {D}": (rotary.rotary, states(2, 9, 64, D), states(2, 3, 64, D), *ANGLES) for D in (64, 128)},
    **{f"gate, {H} heads": (gate.gate, states(2, 64, 576), gains(H, 576), gains(H)) for H in (9, 64)},
    "entry": (
        entry.entry, states(2, 64, 96), gains(576, 96), gains(192, 96), gains(192, 96), None, gains(9, 96), gains(9),
        *ANGLES, 64,
    ),
}  # fmt: skip
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
def test_fits_and_spills_nothing(name, arch, monkeypatch):
    monkeypatch.setattr(device, "no_triton_on", lambda device: None)
    with noted(append, elementwise, norm, shift, rotary, gate, entry) as found:
        function, *inputs = OTHERS[name]
        made = function(*inputs)
        if made is not None:
            outputs = made if isinstance(made, tuple) else (made,)
            sum(x.sum() for x in outputs).backward()
    for kernel, named, warps, stages in found:
        check(compiled_launch(kernel, named, arch, warps, stages), arch)
