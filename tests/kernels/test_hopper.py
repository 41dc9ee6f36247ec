"""The Hopper kernels without a GPU: compiled for sm_90 (spills, serialised products); their launcher's decisions."""

import contextlib
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from compiling import compiled_launch
from fox_kernels.common.groups import Strides
from fox_kernels.hopper import backward as hopper_backward
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.hopper.backward import CUTS
from fox_kernels.hopper.forward import SHAPES, SHORT, Blocks, copyable, gluon_missing, halved
from fox_kernels.host.device import KNOWN_TRITON, triton_version
from fox_kernels.host.launch import names_of
from fox_kernels.options import Documents, Options, Saved

VERSION = triton_version()
KNOWN = VERSION in KNOWN_TRITON
needs_gluon = pytest.mark.skipif(not KNOWN, reason="what Gluon calls otherwise in this Triton is not known")


@contextlib.contextmanager
def without_gpu(note: Callable, edges: torch.Tensor | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Let `note(launch, *copied, **named)` stand in for a launch, on a GPU of 132 multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_forward, hopper_backward):
            patch.setattr(module, "found_edges", lambda *_, **__: Documents(edges=edges))
            patch.setattr(module, "_plans", {})
            patch.setattr(module, "processors", lambda device: 132)
        patch.setattr(hopper_backward, "lost_to_rounding", lambda q, *_: q.float())
        patch.setattr(hopper_forward.Launch, "__call__", note)
        yield patch


def launches(
    D: int, T: int = 256, S: int | None = None, group: int = 1, started: int = 0, sink: int = 0,
    dtype=torch.bfloat16, residual: bool = True, deterministic: bool = True, rounds: bool = False,
    packed: bool = False,
) -> dict[str, tuple]:  # fmt: skip
    """Return (kernel, its arguments) by name of what a forward and a backward launch.

    started: 1 with left padding, 2 with a horizon. packed: documents have edges of their own, for sinks.
    rounds: tiles begin in rounds, as for long rows.
    """
    found: dict[str, tuple] = {}

    def note(self, *copied, **named) -> None:
        assert named.keys() == set(self.names)
        assert len(copied) == len(self.described)
        arguments, constants = names_of(self.kernel)
        blocks = [how and Blocks(x, *how).descriptor() for x, how in zip(copied, self.described, strict=True)]
        described = dict(zip(arguments, blocks, strict=False))
        found[self.kernel.fn.__name__] = (
            self.kernel, described | named | dict(zip(constants, self.constants, strict=True)),
        )  # fmt: skip

    S = S or T
    q, k = (torch.zeros(1, n, h, D, dtype=dtype) for n, h in ((T, group), (S, 1)))
    c = torch.zeros(1, group, S)
    options = Options(0.125, sink=sink, horizon=8.0 if started == 2 else None)
    documents = Documents(seq_start=torch.zeros(1, dtype=torch.int32) if started == 1 or packed else None)
    edges = torch.zeros(2, *((1, group, S) if started == 2 else (1, S)), dtype=torch.int32) if started else None
    with without_gpu(note, edges) as patch:
        patch.setattr(hopper_backward, "WALKS", 0)
        patch.setattr(hopper_forward, "edges", lambda *_: torch.zeros(2, S, dtype=torch.int32) if packed else None)
        if rounds:
            patch.setattr(hopper_backward, "LONG", T // 2)
        lost = torch.empty_like(q) if residual else None
        o, lse2 = hopper_forward.launch_forward(q, k, k, c, c, options, documents, residual=lost)
        saved = Saved(o, lse2, c, c, lost)
        if not (sink and started == 2):  # the backward has no such thing
            hopper_backward.launch_backward(q, None, q, k, k, saved, options, documents, deterministic=deterministic)
    return found


def compiled(kernel, named: dict, work: Path) -> tuple[dict, str]:
    """Compile a Gluon kernel for sm_90; return (shared memory, spilled bytes) and what ptxas says of it."""
    from triton.backends.nvidia.compiler import get_ptxas

    binary = compiled_launch(kernel, named, 90)
    ptx = work / "kernel.ptx"
    ptx.write_text(binary.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", ptx, "-o", work / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return {"shared": binary.metadata.shared, "spilled": spilled}, said


# (problem, bytes that ptxas may spill of the forward, of the backward). Nearly all of a backward's are in its producer
# and its writer, which have time; a forward's are between tiles with documents, in float16 amid a block of keys.
USUAL = [
    ({"D": 64, "T": 4160}, 104, 384), ({"D": 64}, 0, 384), ({"D": 128}, 0, 232),
    ({"D": 64, "rounds": True}, 0, 408), ({"D": 128, "rounds": True}, 0, 256),
    ({"D": 64, "started": 2}, 8, 464), ({"D": 128, "started": 2}, 8, 328),
    ({"D": 64, "started": 2, "sink": 1}, 56, 0),
    ({"D": 80}, 0, 256), ({"D": 96}, 0, 288), ({"D": 256}, 0, 112), ({"D": 256, "started": 2}, 8, 364),
]  # fmt: skip
VARIANTS = [
    {"started": 1, "S": 300}, {"sink": 4}, {"started": 2, "sink": 1, "packed": True}, {"residual": False},
    {"started": 1, "sink": 4}, {"deterministic": False},
    {"dtype": torch.float16, "S": 300},
]  # fmt: skip
SLOW = [({"D": D, **options}, 1100, 2000) for D in SHAPES for options in VARIANTS]
SLOW += [({"D": D, "group": cut.heads, **options}, 560, 2000) for D, cut in CUTS.items() for options in VARIANTS]
SLOW += [({"D": D, "group": cut.heads, "started": 2}, 560, 2000) for D, cut in CUTS.items()]


@needs_gluon
@pytest.mark.parametrize(
    ("problem", "forward", "backward"), [*USUAL, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
def test_compiles_for_hopper_within_the_recorded_spills_and_without_serialised_products(
    problem, forward, backward, tmp_path
):
    ran = launches(**problem)
    for name, most in (("fox_forward", forward), ("fox_backward", backward)):
        if name in ran:
            found, said = compiled(*ran[name], tmp_path)
            assert found["spilled"] <= (most if VERSION == (3, 6) else 112 + 3 * most // 2)
            assert found["shared"] <= 227 * 1024
            assert "serialized" not in said


@needs_gluon
@pytest.mark.parametrize("D", SHAPES)
def test_a_horizon_has_its_walks_searched(D):
    backward = ["prepare_kernel", "fox_backward", "finish_kernel"]
    assert [*launches(D)] == ["fox_forward", *backward]
    assert [*launches(D, started=2)] == ["fox_forward", "query_ranges_kernel", *backward]


@needs_gluon
@pytest.mark.parametrize(("T", "together"), [(8448, 2), (8320, 1)])
def test_heads_of_a_group_walk_apart_below_two_key_tiles_a_multiprocessor(T, together):
    """Gradients of k and v are then the sums over their query heads: here, each head's are k and v."""
    heads = []

    def note(launch, *copied, **named):
        if launch.kernel.fn.__name__ == "fox_backward":
            _, k, v, _, _, dk, dv = copied
            heads.append(launch.constants[0].HEADS)
            dk.copy_(k)
            dv.copy_(v)

    q, k, v, c = torch.zeros(2, T, 4, 64), torch.randn(2, T, 2, 64), torch.randn(2, T, 2, 64), torch.zeros(2, 4, T)
    with without_gpu(note):
        found = hopper_backward.launch_backward(q, None, q, k, v, Saved(q, c, c, c, None), Options(0.125))
    assert heads == [together]
    for gradient, x in zip(found[1:3], (k, v), strict=True):
        assert torch.equal(gradient, x if together == 2 else 2 * x)


def in_interpreter() -> str:
    """What precedes and follows the backward puts dq in order and bounds each walk."""
    from fox_kernels.hopper.backward_steps import finish_kernel, query_ranges_kernel

    torch.manual_seed(0)
    B, H, T, S = 2, 3, 100, 2000
    for D, width, rows in ((128, 128, 128), (64, 64, 128), (80, 128, 128), (256, 256, 128)):
        dq = torch.randn(B * H * rows, width)
        # of each 64 rows: warps, rows 8 apart, 2 x 4 rows, halves of the columns, blocks of 8, pairs, the pair
        parts = dq.view(-1, 4, 2, 2, 4, width // 64, 8, 4, 2)
        given = parts.permute(0, 1, 6, 3, 5, 4, 7, 2, 8).reshape(dq.shape)
        row_sum, dc, out = torch.randn(B, H, rows), torch.zeros(B, H, S), torch.full((B, T, H, D), float("nan"))
        finish_kernel[(rows // 64 * B * H,)](
            given, out, row_sum, dc, Strides(*out.stride()[:3]), 0.5, T, S, H, rows, D=D, WIDTH=width, BM=64
        )
        assert torch.equal(out, 0.5 * dq.view(B, H, rows, width)[:, :, :T, :D].transpose(1, 2)), D
        assert torch.equal(dc[..., S - T :], row_sum[..., :T])
        assert not dc[..., : S - T].any()

    T, bound, per, keys, part = 1000, 64, 2, 128, 8
    bounds, tiles, num_n = -(-T // bound), -(-T // (bound * per)), -(-S // keys)
    lo, hi = torch.full((B, H, tiles), -7, dtype=torch.int32), torch.full((B, H, num_n), -7, dtype=torch.int32)
    start = (torch.rand(B, H, S) * S).int()  # a head's edges, in any order: turns and walks must agree all the same
    sizes = {"SIZE": 16, "PER": per, "BOUND": bound, "BN": keys, "PART": part}
    query_ranges_kernel[(B * H * -(-num_n // part),)](start, lo, hi, T, S, H, bounds, tiles, num_n, **sizes)
    first = start[..., S - T :: bound]
    wanted = (first // keys).flip(-1).cummin(-1).values.flip(-1)[..., ::per]
    assert torch.equal(lo, wanted)
    assert torch.equal(hi, (wanted[..., None, :] <= torch.arange(num_n)[:, None]).sum(-1).int())
    return "as they should"


def test_what_precedes_and_follows_the_backward(report):
    assert report == "as they should"


def test_another_triton_than_those_they_were_run_with_gets_the_reason(monkeypatch):
    for version, reason in (((3, 10), "triton 3.10 is not 3.6 to 3.9"), (None, "not installed"), ((3, 8), "None")):
        monkeypatch.setattr(hopper_forward, "triton_version", lambda version=version: version)
        assert reason in str(gluon_missing())


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
@pytest.mark.parametrize(("consumers", "keys"), [(2, 128), (3, 128), (2, 64)])
def test_every_warpgroup_of_the_forward_has_the_key_block_that_its_rows_end_in(consumers, keys, sink, monkeypatch):
    """Where padded rows see nothing, too: with a block too few, a warpgroup would wait for ever."""
    from fox_kernels.hopper import forward_producer

    monkeypatch.setattr(forward_producer, "origin_of", forward_producer.origin_of.fn)
    for T, offset, padding in itertools.product((64, 200, 300), (0, 3, 64, 100), (0, 1, 130, 1000)):
        S = T + offset
        start = min(padding, S)  # of every row: the address it is loaded from doesn't matter
        plain = SimpleNamespace(minimum=min, maximum=max, load=lambda address, start=start: start)
        monkeypatch.setattr(forward_producer, "gl", plain)
        monkeypatch.setattr(forward_producer, "edges_of", lambda *_: 0)
        for m in range(-(-T // (64 * consumers))):
            row0, _, nb_hi, n_main, _, n_all, _ = forward_producer.key_blocks.fn(
                m, 0, 0, 0, None, T, S, True, sink, 64 * consumers, keys
            )
            for w in range(consumers):
                skipped = nb_hi - min((row0 + w * 64 + 63 + offset) // keys + 1, nb_hi)
                assert skipped <= 1, (T, S, m, w)
                assert skipped < n_main <= n_all, (T, S, padding, m, w)


def test_half_a_key_block_is_left_out_only_where_it_lies_behind_all_rows_of_a_consumer():
    assert halved(SHORT[64], 2048, 2048)
    assert halved(SHORT[64], 100, 228)
    assert not halved(SHORT[64], 100, 164)  # the first consumer's rows begin amid a block of keys
    assert not any(halved(shape, 2048, 2048) for shape in SHAPES.values())
