"""Problems for proving a kernel right, and the comparison that decides: at most twice eager's error, same dtype."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from fox_kernels import forgetting_attention, reference
from hypothesis import strategies as st

NAMES = ("o", "lse", "dq", "dk", "dv", "dlog_f")
LAYOUTS = ("plain", "heads", "packed", "last", "tokens first", "odd", "shifted", "expanded")
GATES = ("mixed", "open", "short", "shut", "zeros", "unequal", "half-lives")
ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}  # floor where eager happens to be exact


@dataclass
class Case:
    """One problem; `cuts` are document boundaries, `options` go to the operator as they are."""

    T: int = 64
    S: int | None = None
    B: int = 2
    H: int = 2
    Hkv: int = 1
    D: int = 32
    DV: int | None = None  # of v; None = D
    dtype: torch.dtype = torch.float32
    gate: str = "mixed"
    layout: str = "plain"
    cuts: list | None = None
    starts: list | None = None
    options: dict = field(default_factory=dict)

    def name(self) -> str:
        keys = "" if self.cuts is None else f" cu{self.cuts[:6]}"
        keys += "" if self.starts is None else f" start{self.starts}"
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"B{self.B} T{self.T} S{self.S or self.T} H{self.H}/{self.Hkv} D{self.D}/{self.DV or self.D}"
        return f"{shape} {dtype} {self.gate} {self.layout}{keys} {self.options or ''}".strip()


def gates(kind: str, *shape, device="cpu") -> torch.Tensor:
    """Return log f float32 of a kind: open means no forgetting, shut saturated, zeros lie among open ones."""
    x = torch.randn(*shape, device=device)
    if kind == "unequal":  # the first head forgets a hundred times as fast as the last
        return -x.abs() * torch.logspace(0, -2, shape[-1], device=device)
    if kind == "halves":  # some decays are just a horizon of whole nats
        return -torch.randint(3, shape, device=device) / 2
    if kind == "half-lives":  # 16 to 2^20 tokens
        return -2 * torch.rand_like(x) * math.log(2) / torch.logspace(4, 20, shape[-1], base=2, device=device)
    if kind == "open":
        return torch.zeros_like(x)
    if kind == "zeros":
        return torch.where(torch.rand(*shape, device=device) < 0.2, -float("inf"), -0.05)
    shift, spread = {"mixed": (2.0, 2.0), "short": (4.0, 1.0), "shut": (-8.0, 1.0)}[kind]
    return torch.nn.functional.logsigmoid(spread * x + shift)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a copy of x (B, T, H, D) with other strides and the same values, but "expanded" repeats the first head."""
    if layout == "heads":  # as (B, H, T, D) in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # a slice of a wider projection
        return torch.cat((x, x), dim=2)[:, :, : x.shape[2]]
    if layout == "last":  # the last stride is not 1
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "tokens first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "odd":  # strides that are no multiple of 16 bytes
        return torch.cat((x, x[..., :1]), dim=3)[..., : x.shape[3]]
    if layout == "shifted":  # nor is the address
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    if layout == "expanded":
        return x[:, :, :1].expand(x.shape)
    return x.contiguous()


def draw(case: Case, device="cpu"):
    """Return leaf inputs (q, k, v, log_f), the output gradients (do, dlse) and the operator's options."""
    B, T, S, H, Hkv, D = case.B, case.T, case.S or case.T, case.H, case.Hkv, case.D
    DV = case.DV or D
    q, k, v, do = (
        laid_out(torch.randn(B, n, h, d, device=device).to(case.dtype), case.layout)
        for n, h, d in ((T, H, D), (S, Hkv, D), (S, Hkv, DV), (T, H, DV))
    )
    options = dict(case.options)
    if case.cuts is not None:
        options["cu_seqlens"] = torch.tensor([0, *case.cuts, S], dtype=torch.int32, device=device)
    if case.starts is not None:
        options["seq_start"] = torch.tensor(case.starts, dtype=torch.int32, device=device)
    inputs = [x.detach().requires_grad_() for x in (q, k, v, gates(case.gate, B, S, H, device=device))]
    return inputs, (do, torch.randn(B, T, H, device=device)), options


def results(operator, inputs, gradients, options) -> list[torch.Tensor]:
    """Return o, lse and the four gradients through both; lse of -inf counts as 0."""
    o, lse = operator(*inputs, return_lse=True, **options)
    lse = lse.masked_fill(lse == -float("inf"), 0)
    do, dlse = gradients
    loss = (o * do.to(o.dtype)).sum(dtype=lse.dtype) + (lse * dlse.to(lse.dtype)).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let torch.empty hand out NaN (in integers, the greatest), so that an element left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills, unless told otherwise
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def errors(case: Case, device="cpu", backend="triton") -> list[tuple[str, float, float]]:
    """Return (name, error of the backend, error of eager in the same dtype), relative to float64, per output.

    Outputs are written to poisoned memory, and on a GPU two runs that differ in a bit count as infinitely wrong.
    """
    inputs, gradients, options = draw(case, device)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(reference.forgetting_attention, exact_inputs, gradients, options)
    eager = results(reference.forgetting_attention, inputs, gradients, options)
    operator = partial(forgetting_attention, backend=backend)
    with poisoned():
        mine = results(operator, inputs, gradients, options)
        again = mine if device == "cpu" else results(operator, inputs, gradients, options)
    rows = []
    for name, x, repeated, y, z in zip(NAMES, mine, again, eager, exact, strict=True):
        # Shut gates leave dlog_f differences of 1e-9 between numbers near 1, which float32 cannot hold to more digits:
        # below 1e-3 (the inputs' gradients are near 1) the error is judged in absolute terms, eager's likewise.
        size = z.norm().clamp_min(1e-3 * z.numel() ** 0.5)
        error = ((x.double() - z).norm() / size).item() if x is repeated or torch.equal(x, repeated) else float("inf")
        rows.append((name, error, ((y.double() - z).norm() / size).item()))
    return rows


def failures(case: Case, device="cpu", backend="triton") -> list[str]:
    """Return what breaks the rule for a case, empty if nothing does; NaN breaks it."""
    return [
        f"{name}: error {mine:.2e}, eager {eager:.2e} ({case.name()})"
        for name, mine, eager in errors(case, device, backend)
        if not mine <= 2 * eager + ROUNDING[case.dtype]
    ]


def broken(checks: dict[str, Callable], *arguments) -> dict[str, str]:
    """Return the traceback of each check that fails, "" of the others."""
    report = dict.fromkeys(checks, "")
    for name, check in checks.items():
        try:
            check(*arguments)
        except AssertionError:
            report[name] = traceback.format_exc()
    return report


@st.composite
def problems(draw, dtypes, head_dims=(16, 32, 80), longest=48) -> Case:
    """A strategy of whole problems: shapes, layouts, gates, documents or padding, and every option of the operator.

    Sizes shrink to one token, options to none.
    """
    T = draw(st.integers(1, longest))
    S = T + draw(st.one_of(st.just(0), st.integers(0, longest)))
    Hkv = draw(st.integers(1, 2))
    options = {
        "window": draw(st.one_of(st.none(), st.integers(1, longest))),
        "sink": draw(st.one_of(st.just(0), st.integers(0, longest))),
        "softcap": draw(st.one_of(st.none(), st.floats(1.0, 30.0))),
        "scale": draw(st.one_of(st.none(), st.floats(-1.0, 1.0))),
        "horizon": draw(st.one_of(st.none(), st.floats(0.1, 20.0))),
    }
    case = Case(
        T=T, S=S, H=Hkv * draw(st.sampled_from((1, 2, 3, 5, 7))), Hkv=Hkv, D=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)), gate=draw(st.sampled_from(GATES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        options={name: value for name, value in options.items() if value is not None},
    )  # fmt: skip
    case.DV = draw(st.sampled_from((None, case.D - 3)))
    kind = draw(st.sampled_from(("plain", "packed", "padded", "both")))
    if kind in ("packed", "both"):
        case.B = 1
        case.cuts = sorted(draw(st.lists(st.integers(0, S), max_size=5)))
    if kind in ("padded", "both"):
        case.starts = draw(st.lists(st.integers(0, S), min_size=case.B, max_size=case.B))
    return case
