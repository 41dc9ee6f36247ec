"""The Hopper kernels without a GPU: compiled for sm_90 (spills, serialised products); their launcher's decisions."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.hopper.forward import SHAPES, SHORT, copyable, gluon_missing, halved, heads_per_group
from fox_kernels.host.device import triton_version
from fox_kernels.options import Documents, Options, Saved

VERSION = triton_version()
KNOWN = VERSION in hopper_forward.RUN_WITH | hopper_forward.COMPILED_WITH
needs_gluon = pytest.mark.skipif(not KNOWN, reason="what Gluon calls otherwise in this Triton is not known")


def allowed(spills: int) -> int:
    """Bytes that may be spilled, given what Triton 3.6 spills: others half as much again."""
    return spills if VERSION == (3, 6) else 48 + 3 * spills // 2


def compiled(function, arguments: dict, constants: dict, work: Path) -> tuple[dict, str]:
    """Compile a Gluon kernel for sm_90; return (shared memory, spilled bytes) and what ptxas says of it."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    dtypes = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    signature = {}
    constants = constants | {name: None for name, kind in arguments.items() if kind is None}
    for name in function.arg_names:
        kind = arguments.get(name) or "constexpr"
        if isinstance(kind, tuple):
            dtype, block = kind
            shared: Any = gl.NVMMASharedLayout
            layout = shared.get_default_for(list(block), dtypes[dtype])
            kind = f"tensordesc<{dtype}{list(block)},{layout!r}>"
        signature[name] = kind
    places = {n: (i,) for i, n in enumerate(function.arg_names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = GluonASTSource(
        function, signature=signature, constexprs={places[n]: v for n, v in constants.items()}, attrs=aligned
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )
    ptx = work / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", ptx, "-o", work / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return {"shared": kernel.metadata.shared, "spilled": spilled}, said


def forward_source(shape, dtype="bf16", start: int = False, sink=0, across=False, residual=True):
    from fox_kernels.hopper.forward_kernel import fox_forward

    rows = {"q": 64, "k": shape.keys, "v": shape.keys, "o": 64, "r": 64}
    arguments: dict = {f"{n}_desc": (dtype, (1, r, 1, shape.columns)) for n, r in rows.items()}
    for n, r in rows.items():
        arguments[f"{n}x_desc"] = (dtype, (1, r, 1, shape.rest)) if shape.rest else None
    arguments |= dict.fromkeys(("C_HI", "C_LO", "L"), "*fp32") | {"START": "*i32" if start else None, "COUNTER": "*i32"}
    arguments |= {"scale": "fp32"} | dict.fromkeys(("T", "S", "H", "KV_GROUP", "num_m", "num_bh", "group"), "i32")
    constants = {
        "HAS_START": start, "SINK": sink, "NC": shape.consumers, "BN": shape.keys, "D": shape.columns,
        "DX": shape.rest, "NB": shape.stages,
        "ACROSS": across, "HALF": halved(shape, 64, 65 if across else 64), "HAS_RESIDUAL": residual,
        "REGISTERS": shape.registers,
    }  # fmt: skip
    return fox_forward, arguments, constants


def backward_source(
    D, dtype="bf16", start: int = False, sink=0, deterministic=True, heads=1, lost=True, rounds=0
):  # fmt: skip
    from fox_kernels.hopper.backward import CUTS
    from fox_kernels.hopper.backward_kernel import fox_backward

    cut = CUTS[D]
    arguments: dict = {f"{n}_desc": (dtype, (1, cut.queries, 1, D)) for n in ("q", "do")}
    arguments |= {f"{n}_desc": (dtype, (1, 64, 1, D)) for n in ("k", "v", "dk", "dv")}
    arguments["dq_desc"] = ("fp32", (64, D // 2 if cut.queries == 64 else D))
    arguments |= dict.fromkeys(("C_HI", "C_LO", "LSE", "DELTA", "DC", "ROW_SUM"), "*fp32")
    arguments |= dict.fromkeys(("TICKET", "COUNTER"), "*i32")
    arguments |= dict.fromkeys(("START", "END"), "*i32" if start else None)
    arguments |= dict.fromkeys(("TILE_HI", "TILE_LO"), "*i32" if start == 2 else None)
    arguments |= {"LOST": "*fp32" if lost else None, "sm_scale": "fp32"}
    arguments |= dict.fromkeys(("T", "T_PAD", "S", "H", "KV_GROUP", "num_n", "num_bh", "group"), "i32")
    constants = {
        "HAS_START": start, "SINK": sink, "D": D, "BM": cut.queries, "NB": cut.stages,
        "NKV": cut.key_slots, "HEADS": heads, "DETERMINISTIC": deterministic, "REGISTERS": cut.registers,
        "COPIER_REGISTERS": cut.copier_registers, "GENERATIONS": cut.generations,
        "BIAS_BY_MMA": heads == 1 and cut.queries == 128 and sink == 0, "HAS_LOST": lost, "PER_ROUND": rounds,
    }  # fmt: skip
    return fox_backward, arguments, constants


# bytes that ptxas spills; more is a regression
FORWARD = {SHAPES[64]: 104, SHORT[64]: 0, SHAPES[128]: 0}
BACKWARD = {64: 384, 128: 232}


@needs_gluon
@pytest.mark.parametrize("shape", FORWARD, ids=str)
def test_forward_compiles_for_hopper_without_spills_or_serialised_products(shape, tmp_path):
    found, said = compiled(*forward_source(shape), tmp_path)
    assert found["spilled"] <= allowed(FORWARD[shape])
    assert found["shared"] <= 227 * 1024
    assert "serialized" not in said


@needs_gluon
@pytest.mark.parametrize("rounds", [0, 132])
@pytest.mark.parametrize("D", BACKWARD)
def test_backward_compiles_for_hopper_within_the_recorded_spills(D, rounds, tmp_path):
    found, said = compiled(*backward_source(D, rounds=rounds), tmp_path)
    more = 24 if rounds else 0  # nearly all spills are in the producer and the writer, which have time
    assert found["spilled"] <= allowed(BACKWARD[D] + more)
    assert found["shared"] <= 227 * 1024
    assert "serialized" not in said


@needs_gluon
@pytest.mark.parametrize(("D", "spills"), [(64, 464), (128, 328)])
def test_a_horizon_compiles_for_hopper_within_the_recorded_spills(D, spills, tmp_path):
    forward, said = compiled(*forward_source(SHORT.get(D, SHAPES[D]), start=2), tmp_path)
    backward, more = compiled(*backward_source(D, start=2), tmp_path)
    assert forward["spilled"] <= allowed(8)
    assert backward["spilled"] <= allowed(spills)
    assert max(forward["shared"], backward["shared"]) <= 227 * 1024
    assert "serialized" not in said + more


@needs_gluon
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"start": True, "across": True},
        {"sink": 4},
        {"dtype": "fp16", "across": True},
        {"residual": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [*SHAPES.values(), *SHORT.values()], ids=str)
def test_every_forward_variant_compiles(shape, options, tmp_path):
    found, said = compiled(*forward_source(shape, **options), tmp_path)
    # with documents between tiles; in float16 in the loop before the loop, where queries begin amid a block of keys
    assert found["spilled"] <= (1100 if "dtype" in options else 560)
    assert "serialized" not in said


@needs_gluon
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"start": True, "sink": 4}, {"deterministic": False}, {}, {"start": 2}],
    ids=str,
)
@pytest.mark.parametrize("heads", [1, None], ids=["MHA", "GQA"])
@pytest.mark.parametrize("D", BACKWARD)
def test_every_backward_variant_compiles(D, heads, options, tmp_path):
    from fox_kernels.hopper.backward import CUTS

    found, said = compiled(*backward_source(D, heads=heads or CUTS[D].heads, **options), tmp_path)
    assert found["spilled"] <= 2000
    assert found["shared"] <= 227 * 1024
    assert "serialized" not in said


INTERPRETED = """
import torch
from fox_kernels.hopper.backward_steps import finish_kernel, query_ranges_kernel

torch.manual_seed(0)
B, H, T, S = 2, 3, 100, 2000
for D, rows in ((128, 128), (64, 128)):
    dq = torch.randn(B * H * rows, D)
    # of each 64 rows: warps, rows 8 apart, 2 x 4 rows, halves of the columns, blocks of 8, pairs, the pair
    parts = dq.view(-1, 4, 2, 2, 4, D // 64, 8, 4, 2)
    given = parts.permute(0, 1, 6, 3, 5, 4, 7, 2, 8).reshape(dq.shape)
    row_sum, dc, out = torch.randn(B, H, rows), torch.zeros(B, H, S), torch.full((B, T, H, D), float("nan"))
    finish_kernel[(rows // 64 * B * H,)](given, out, row_sum, dc, *out.stride()[:3], 0.5, T, S, H, rows, D=D, BM=64)
    assert torch.equal(out, 0.5 * dq.view(B, H, rows, D)[:, :, :T].transpose(1, 2)), D
    assert torch.equal(dc[..., S - T :], row_sum[..., :T]) and not dc[..., : S - T].any()

T, bound, per, keys, part = 1000, 64, 2, 128, 8
bounds, tiles, num_n = -(-T // bound), -(-T // (bound * per)), -(-S // keys)
lo, hi = torch.full((B, H, tiles), -7, dtype=torch.int32), torch.full((B, H, num_n), -7, dtype=torch.int32)
start = (torch.rand(B, H, S) * S).int()  # a head's edges, in any order: turns and walks must agree all the same
query_ranges_kernel[(B * H * -(-num_n // part),)](
    start, lo, hi, T, S, H, bounds, tiles, num_n, SIZE=16, PER=per, BOUND=bound, BN=keys, PART=part,
)
first = start[..., S - T :: bound]
wanted = (first // keys).flip(-1).cummin(-1).values.flip(-1)[..., ::per]
assert torch.equal(lo, wanted)
assert torch.equal(hi, (wanted[..., None, :] <= torch.arange(num_n)[:, None]).sum(-1).int())
"""


def test_what_follows_and_precedes_the_backward_puts_dq_in_order_and_bounds_each_walk():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_triton_with_which_they_were_compiled_but_not_run_takes_a_word(monkeypatch):
    monkeypatch.setattr(hopper_forward, "triton_version", lambda: (3, 9))
    monkeypatch.delenv("FOX_KERNELS_UNPROVEN", raising=False)
    assert "FOX_KERNELS_UNPROVEN=1" in str(gluon_missing())
    monkeypatch.setenv("FOX_KERNELS_UNPROVEN", "1")
    assert gluon_missing() is None
    for version, reason in (((3, 99), "triton 3.99 is not 3.6"), (None, "not installed")):
        monkeypatch.setattr(hopper_forward, "triton_version", lambda version=version: version)
        assert reason in str(gluon_missing())
        assert "UNPROVEN" not in str(gluon_missing())


def test_a_tensor_off_the_gpu_is_refused_with_the_reason():
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    assert "Hopper" in str(hopper_forward.unsupported(q, q, q, Options(1.0))) or gluon_missing() is not None


def test_launching_what_is_unsupported_raises_with_the_reason():
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    c = torch.zeros(1, 2, 128)
    with pytest.raises(ValueError, match="can't run this"):
        hopper_forward.launch_forward(q, q, q, c, c, Options(0.125))


@needs_gluon
@pytest.mark.parametrize("D", SHAPES)
@pytest.mark.parametrize("horizon", [None, 8.0])
def test_every_launch_names_each_of_its_kernels_arguments(monkeypatch, D, horizon):
    from fox_kernels.hopper import backward as hopper_backward

    launched = []

    def launch(self, *copied, **named):
        assert named.keys() == set(self.names)
        assert len(copied) == len(self.described)
        launched.append(self.kernel.fn.__name__)

    monkeypatch.setattr(hopper_forward.Launch, "__call__", launch)
    edges = None if horizon is None else torch.zeros(2, 1, 2, 128, dtype=torch.int32)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "unsupported", lambda *_: None)
        monkeypatch.setattr(module, "found_edges", lambda *_, **__: Documents(edges=edges))
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(hopper_backward, "lost_to_rounding", lambda *_: None)
    q, c = torch.zeros(1, 128, 2, D, dtype=torch.bfloat16), torch.zeros(1, 2, 128)
    o, lse2 = hopper_forward.launch_forward(q, q, q, c, c, options := Options(0.125, horizon=horizon))
    if D in hopper_backward.CUTS:
        hopper_backward.launch_backward(q, None, q, q, q, Saved(o, lse2, c, c), options)
    backward = ["prepare_kernel", "fox_backward", "finish_kernel"] if D in hopper_backward.CUTS else []
    ranges = ["query_ranges_kernel"] if backward and horizon else []
    assert launched == ["fox_forward", *ranges, *backward]


def test_only_strides_that_the_copy_engine_refuses_are_copied():
    wide = torch.zeros(2, 64, 6, 64, dtype=torch.bfloat16)
    assert copyable(wide[:, :, 2:4]).data_ptr() == wide[:, :, 2:4].data_ptr()
    assert copyable(wide.transpose(1, 2)).stride() == wide.transpose(1, 2).stride()
    odd = torch.zeros(2, 64, 6, 68, dtype=torch.bfloat16)[..., :64]  # 136 bytes from head to head
    assert copyable(odd).is_contiguous()
    assert copyable(wide[:, :, :1].expand(2, 64, 6, 64)).is_contiguous()
    assert copyable(wide.transpose(2, 3)).stride(-1) == 1
    shifted = torch.zeros(1 + wide.numel(), dtype=torch.bfloat16)[1:].view(wide.shape)  # contiguous, 2 bytes off
    assert copyable(shifted).data_ptr() % 16 == 0


@needs_gluon
@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("consumers", [2, 3])
def test_every_warpgroup_of_the_forward_has_the_key_block_that_its_rows_end_in(consumers, sink, monkeypatch):
    """Where padded rows see nothing, too: with a block too few, a warpgroup would wait for ever."""
    from fox_kernels.hopper import forward_producer

    for T, offset, padding in itertools.product((64, 200, 300), (0, 3, 64, 100), (0, 1, 130, 1000)):
        S = T + offset
        start = min(padding, S)  # of every row: the address it is loaded from doesn't matter
        plain = SimpleNamespace(minimum=min, maximum=max, load=lambda address, start=start: start)
        monkeypatch.setattr(forward_producer, "gl", plain)
        monkeypatch.setattr(forward_producer, "edges_of", lambda *_: 0)
        for m in range(-(-T // (64 * consumers))):
            row0, _, nb_hi, n_main, _, n_all, _ = forward_producer.key_blocks.fn(
                m, 0, 0, 0, T, S, True, sink, 64 * consumers, 128
            )
            for w in range(consumers):
                skipped = nb_hi - min((row0 + w * 64 + 63 + offset) // 128 + 1, nb_hi)
                assert skipped <= 1, (T, S, m, w)
                assert skipped < n_main <= n_all, (T, S, padding, m, w)


def test_heads_walked_together_are_a_power_of_two_that_fits_the_cache():
    assert heads_per_group(1 << 20) == 16
    assert heads_per_group(3 << 20) == 8
    assert heads_per_group(1 << 30) == 4


def test_half_a_key_block_is_left_out_only_where_it_lies_behind_all_rows_of_a_consumer():
    assert halved(SHORT[64], 2048, 2048)
    assert halved(SHORT[64], 100, 228)
    assert not halved(SHORT[64], 100, 164)  # the first consumer's rows begin amid a block of keys
    assert not any(halved(shape, 2048, 2048) for shape in SHAPES.values())


def test_more_heads_are_walked_together_where_dq_is_summed_in_order():
    from fox_kernels.hopper.backward import heads_together

    assert heads_together(1 << 20, ordered=False) == 16
    assert heads_together(1 << 20, ordered=True) == heads_together(4 << 20, ordered=True) == 32
    assert heads_together(8 << 20, ordered=True) == heads_together(1 << 30, ordered=True) == 16


def test_walks_of_long_rows_begin_in_rounds_unless_anything_bounds_them(monkeypatch):
    from fox_kernels.hopper import backward

    monkeypatch.setattr(backward, "processors", lambda device: 132)
    q = torch.empty(1, 2 * backward.LONG, 5, 64, dtype=torch.bfloat16)

    def rounds_and_group(length: int, heads: int = 5, started: int = 0):
        queries, keys = q[:, :length], q[:, :length, :heads]
        plan = backward.plan_backward(queries, keys, keys, queries, started, Options(0.125), True, backward.CUTS[64])
        return plan.main.constants[-1], plan.group

    assert rounds_and_group(backward.LONG) == rounds_and_group(2 * backward.LONG, heads=1) == (132, 4)
    assert rounds_and_group(backward.LONG, heads=1) == (0, 16)
    for bounded in (rounds_and_group(backward.LONG, started=1), rounds_and_group(backward.LONG, started=2)):
        assert bounded == rounds_and_group(backward.LONG - 128) == (0, 16)
