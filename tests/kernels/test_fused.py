"""The fused helpers of a training step against their eager twins: in Triton's interpreter on a CPU, and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from fox_kernels.layer.entry import entry
from fox_kernels.layer.gate import gate
from fox_kernels.layer.norm import head_norm
from fox_kernels.layer.rotary import rotary
from fox_kernels.layer.shift import shift
from twins import entry_torch, gate_torch, head_norm_torch, rotary_torch, shift_torch

SMALL = {
    "norm": [(2, 70, 3, 64, 1, 1), (1, 1, 2, 80, 1, 0), (2, 9, 4, 16, 0, 1), (1, 300, 2, 24, 1, 1)],
    "shift": [(2, 70, 3, 64), (1, 1, 2, 80), (1, 300, 1, 24)],
    "rotary": [(2, 3, 1, 70, 64, 16, False), (1, 2, 2, 1, 80, 40, True), (2, 4, 2, 5, 16, 0, False)],
    "gate": [((2, 70), 96, 9), ((1, 1), 33, 3), ((3, 50), 64, 17), ((130,), 40, 70), ((0, 3), 16, 2)],
    "entry": [(2, 70, 48, 3, 1, 16, 5, False), (1, 40, 33, 4, 2, 32, 16, True), (2, 65, 40, 9, 3, 16, 0, False),
              (0, 3, 8, 1, 1, 4, 2, False), (2, 0, 8, 1, 1, 4, 2, False)],
}  # fmt: skip
REAL = {
    "norm": [(8, 4096, 9, 64, 1, 1), (1, 3001, 32, 128, 1, 0), (2, 1000, 8, 256, 0, 1), (2, 1000, 4, 80, 1, 1)],
    "shift": [(8, 4096, 3, 64), (1, 3001, 8, 128), (2, 1000, 4, 80)],
    "rotary": [(8, 9, 3, 4096, 64, 16, False), (1, 32, 8, 4096, 128, 64, True), (2, 8, 4, 1000, 256, 128, False)],
    "gate": [((8, 4096), 576, 9), ((1, 4097), 4096, 32), ((3, 1001), 2048, 64), ((5,), 64, 128)],
    "entry": [(8, 4096, 576, 9, 3, 64, 16, False), (1, 3001, 2048, 32, 8, 64, 32, True), (2, 700, 96, 9, 3, 80, 0, 0)],
}  # fmt: skip


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.double().norm()
    return ((found.double() - wanted.double()).norm() / (norm if norm > 0 else 1.0)).item()


def gradients(function, inputs: list, seeds: list | None = None):
    """Outputs, gradients of all inputs that want one, and the upstream gradients that were used."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [torch.randn_like(x) for x in outputs] if seeds is None else seeds
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return [
        *outputs,
        *torch.autograd.grad(outputs, leaves, [s.to(x) for s, x in zip(seeds, outputs, strict=True)]),
    ], seeds


def widened(inputs: list) -> list:
    return [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]


def compared(function, twin, inputs: list, floor: float) -> tuple[list[str], list, list]:
    """Return what breaks the bound, and the outputs and gradients of the function and of its twin in float64.

    The bound: at most twice the eager twin's error, or the dtype's rounding. Two runs give the same bits.
    """
    ours, seeds = gradients(function, inputs)
    eager, _ = gradients(twin, inputs, seeds)
    wide, _ = gradients(twin, widened(inputs), seeds)
    again, _ = gradients(function, inputs, seeds)
    errors = [(relative(a, c), relative(b, c)) for a, b, c in zip(ours, eager, wide, strict=True)]
    failed = [f"{n}: {a:.1e} against {b:.1e}" for n, (a, b) in enumerate(errors) if not a <= max(2 * b, floor)]
    differ = [n for n, (a, b) in enumerate(zip(ours, again, strict=True)) if not a.equal(b)]
    return failed + [f"{n} differs from run to run" for n in differ], ours, wide


FLOOR = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def check_rotary(device: str, dtype: torch.dtype, B, H, Hkv, T, D, P, per_row) -> list[str]:
    q = torch.randn(B, T, H, D, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    k = torch.randn(B, Hkv, T, D, device=device, dtype=dtype, requires_grad=True)
    cos, sin = torch.randn(2, B if per_row else 1, T, P + 3, device=device)[..., :P]
    ours, seeds = gradients(rotary, [q, k, cos, sin])
    wide, _ = gradients(rotary_torch, [x.detach().float().requires_grad_() for x in (q, k)] + [cos, sin], seeds)
    failed = [] if all(relative(a, b) <= FLOOR[dtype] for a, b in zip(ours, wide, strict=True)) else ["rotary"]
    half, still = D // 2, slice(P, D // 2)
    for x, y in zip((q, k), ours, strict=False):
        if not torch.equal(x[..., still], y[..., still]) or not torch.equal(x[..., half + P :], y[..., half + P :]):
            failed.append("a pair that stays was changed")
    return failed


def check_gate(device: str, dtype: torch.dtype, rows, K, H) -> list[str]:
    x = torch.randn(*rows, K, device=device, dtype=dtype, requires_grad=True)
    w = (torch.randn(H, K, device=device) * 0.1).requires_grad_()
    b = (torch.randn(H, device=device) * 6 + 6).requires_grad_()  # shut to open: log f from -10 to -1e-10
    failed, ours, wide = compared(gate, gate_torch, [x, w, b], 2e-6)
    if x.numel() and not ((ours[0] - wide[0]) / wide[0]).abs().max() < 2e-5:
        failed.append("an open gate's log f lost its digits")
    return failed


def check_entry(device: str, dtype: torch.dtype, B, T, K, H, Hkv, D, P, bias) -> list[str]:
    x = torch.randn(B, T, K, device=device, dtype=dtype)
    x = (x if B > 1 else x.mT.contiguous().mT).requires_grad_()  # flattened, one row keeps its last stride
    weights = [(torch.randn(n * D, K, device=device) * 0.1).requires_grad_() for n in (H, Hkv, Hkv)]
    b = torch.randn((H + 2 * Hkv) * D, device=device).requires_grad_() if bias else None
    wf = (torch.randn(H, K, device=device) * 0.1).requires_grad_()
    bf = torch.randn(H, device=device).requires_grad_()
    angle = torch.randn(1 if P == 16 else B, T, P, device=device)
    inputs = [x, *weights, b, wf, bf, angle.cos(), angle.sin(), D]
    floor = 3e-6 if dtype == torch.float32 else FLOOR[dtype] / 4
    failed, ours, wide = compared(entry, entry_torch, inputs, floor)
    last = len(ours) - 2  # dW_f: its dz travels as two 16-bit numbers, so it has float32's digits
    if relative(ours[last], wide[last]) > 2e-5:
        failed.append(f"dW_f: {relative(ours[last], wide[last]):.1e}")
    return failed


def check_norm(device: str, dtype: torch.dtype, B, T, H, D, with_gain, with_logit) -> list[str]:
    x = torch.randn(B, H, T, D, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    gain = torch.randn(H, D, device=device).requires_grad_() if with_gain else None
    logit = torch.randn(B, T, H * D, device=device, dtype=dtype).requires_grad_() if with_logit else None
    eps = 1e-5 if B > 1 else 0.0
    return compared(head_norm, head_norm_torch, [x, gain, logit, eps], FLOOR[dtype] / 2)[0]


def check_shift(device: str, dtype: torch.dtype, B, T, H, D) -> list[str]:
    x = torch.randn(B, H, T, D, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    amount = torch.rand(B, T, H, device=device) * (torch.rand(B, T, 1, device=device) > 0.2)  # some documents start
    amount.requires_grad_()

    return compared(shift, shift_torch, [x, amount], FLOOR[dtype])[0]


CHECKS = {"norm": check_norm, "shift": check_shift, "rotary": check_rotary, "gate": check_gate, "entry": check_entry}


def check_compiled(device: str, name: str) -> list[str]:
    """torch.compile takes each function whole, as operators, and differentiates it as eager mode does."""

    def wants(*shape):
        return torch.randn(*shape, device=device).requires_grad_()

    function, inputs = {
        "rotary": (rotary, [wants(2, 3, 7, 16), wants(2, 1, 7, 16), *torch.randn(2, 1, 7, 5, device=device)]),
        "gate": (gate, [wants(2, 7, 24), wants(3, 24), wants(3)]),
        "norm": (head_norm, [wants(2, 7, 3, 16), wants(3, 16), wants(2, 7, 48), 1e-5]),
        "norm alone": (head_norm, [wants(2, 7, 3, 16), wants(3, 16), None, 1e-5]),
        "shift": (shift, [wants(2, 7, 3, 16), wants(2, 7, 3)]),
    }[name]
    eager, seeds = gradients(function, inputs)
    found, _ = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs, seeds)
    return [f"{n}" for n, (a, b) in enumerate(zip(eager, found, strict=True)) if relative(a, b) > 1e-6]


COMPILED = ("rotary", "gate", "norm", "norm alone", "shift")


def in_interpreter() -> dict[str, list[str]]:
    report = {f"compiled {name}": check_compiled("cpu", name) for name in COMPILED}
    for name, sizes in SMALL.items():
        for n, size in enumerate(sizes):
            for dtype in (torch.float32, torch.float16):
                torch.manual_seed(n)
                report[f"{name} {n} {dtype}"] = CHECKS[name]("cpu", dtype, *size)
    return report


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float16"])
@pytest.mark.parametrize("case", [f"{name} {n}" for name, sizes in SMALL.items() for n in range(len(sizes))])
def test_in_the_interpreter(case, dtype, report):
    assert report[f"{case} {dtype}"] == []


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_without_graph_breaks(name, report):
    assert report[f"compiled {name}"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_on_a_gpu(name):
    assert check_compiled("cuda", name) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "n"), [(name, n) for name, sizes in REAL.items() for n in range(len(sizes))])
def test_on_a_gpu(name, n, dtype):
    torch.manual_seed(n)
    assert CHECKS[name]("cuda", dtype, *REAL[name][n]) == []


def test_what_they_cannot_take_is_refused_with_the_reason():
    """Shapes and dtypes that don't fit, and tensors that are on no GPU."""
    x, w, b, angle = torch.zeros(1, 5, 2, 8), torch.zeros(2, 8), torch.zeros(2), torch.zeros(1, 5, 4)
    q, square = x.transpose(1, 2), torch.zeros(8, 8)
    states = (x[:, :, 0], square, square, square, None)
    for message, function, arguments in [
        ("on cpu, Triton needs cuda; use torch's own", gate, (x, w, b)),
        ("on cpu, Triton needs cuda; use torch's own", entry, (*states, w[:1], b[:1], angle, angle, 8)),
        ("got torch.float64: cast it", gate, (x.double(), w, b)),
        ("float32", gate, (x, w.bfloat16(), b)),
        ("don't fit", gate, (x, w[:, 1:], b)),
        ("gain", head_norm, (x, w[:, :4], None)),
        ("logit", head_norm, (x, None, x[0, :, 0])),
        ("of a float dtype", head_norm, (x, None, torch.zeros(1, 5, 16, dtype=torch.int32))),
        ("amount", shift, (x, x[..., 0, :4])),
        ("one dtype", rotary, (q, q.half(), angle, angle)),
        ("D / 2", rotary, (q, q, torch.zeros(1, 5, 5), torch.zeros(1, 5, 5))),
        ("cos and sin", entry, (*states, w[:1], b[:1], angle[:, :4], angle[:, :4], 8)),
        ("must be float32", entry, (*states, w[:1].half(), b[:1], angle, angle, 8)),
        ("don't fit", entry, (*states[:3], square[:4], None, w[:1], b[:1], angle, angle, 8)),
    ]:
        with pytest.raises(ValueError, match=message):
            function(*arguments)
