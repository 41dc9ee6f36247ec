"""Launching without Triton's binder: a kernel compiled for one problem never runs another that it doesn't fit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")

from fox_kernels.common.groups import Gates
from fox_kernels.decoding import planner
from fox_kernels.host import launch, strides
from triton.tools.tensor_descriptor import TensorDescriptor


class Kernel:
    """Stands in for a Triton kernel: counts what is compiled, and what the compiled one is run with."""

    def __init__(self):
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled(self)

        return compile_and_run


class Compiled:
    run = None  # of Triton's launchers, none

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.ran.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_runners", {})
    monkeypatch.setattr(planner, "decoder_for", planner.Decoder)  # it would remember these kernels
    return Kernel()


def test_the_same_kind_of_problem_compiles_once(kernel):
    for length in (100, 200, 300):
        x = torch.zeros(length)
        launch.launch(kernel, (length, 2), (x, None, length + 1, 0.5 * length), (True, 64), warps=8, stages=2)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0][2] == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    assert [grid for grid, _ in kernel.ran] == [(200, 2, 1), (300, 2, 1)]
    assert kernel.ran[1][1][1:] == (None, 301, 150.0, True, 64)


def test_what_triton_specialises_on_compiles_anew(kernel):
    x, block = torch.zeros(64), torch.zeros(8, 64, dtype=torch.float16)
    arguments = [(x, 3), (x.half(), 3), (x[1:], 3), (None, 3), (x, 1), (x, 16), (x, 2**31), (x, 3.0)]
    arguments += [(Gates(x, n), 3) for n in (None, 1, 3, 16, x, x.half(), x[1:])]
    arguments += [(TensorDescriptor(block, [8, 64], [64, 1], [rows, 64]), 3) for rows in (4, 8)]
    for chosen in arguments:
        launch.launch(kernel, (1,), chosen, ())
    launch.launch(kernel, (1,), arguments[0], (64,))
    launch.launch(kernel, (1,), arguments[0], (), warps=8)
    launch.launch(kernel, (1,), arguments[0], (), stages=1)
    assert len(kernel.compiled) == len(arguments) + 3
    for chosen in arguments:
        launch.launch(kernel, (1,), chosen, ())
    assert len(kernel.compiled) == len(arguments) + 3
    assert launch.examined((torch.nn.Parameter(x),))[0] == launch.examined((x,))[0]
    assert launch.examined((Gates(x, 3), None))[1] == ((x.data_ptr(), 3), None)


@pytest.mark.skipif(torch.cuda.is_available() or shutil.which("cc") is None, reason="needs a compiler and no GPU")
def test_a_direct_launch_passes_what_tritons_own_way_passes():
    """Nothing else would notice another order of arguments in another Triton but a GPU."""
    command = [sys.executable, str(Path(__file__).with_name("driverless.py"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout)
    assert set(kernels) == {"fox_forward", "relative_kernel", "forward_kernel", "append_kernel"}
    assert all(found == [launch.KNOWN, True] for found in kernels.values())


def test_arguments_by_name_come_in_the_order_of_the_kernel():
    from fox_kernels.triton import backward, forward

    for kernel in (forward.forward_kernel, backward.dq_kernel, backward.dkdv_kernel):
        names = {name: name for name in kernel.arg_names}
        arguments, constants = launch.in_order(kernel, dict(reversed(names.items())))
        assert [*arguments, *constants] == kernel.arg_names
        assert {"PROBLEM", "TILE"} <= {*constants} <= {"PROBLEM", "TILE", "NEXT_BM"}
        for wrong in ({**names, "prune": 1}, {n: n for n in kernel.arg_names if n != "T"}):
            with pytest.raises(TypeError, match=r"_kernel: \['(prune|T)'\] too many or missing"):
                launch.in_order(kernel, wrong)


def test_a_dimension_of_size_1_gets_a_stride_that_tma_takes():
    x = torch.zeros(2, 64, 1, 64, dtype=torch.float16)[:1].as_strided((1, 64, 1, 64), (7, 64, 3, 1))
    described = strides.source(x, 16, True)
    assert (described.shape, described.block_shape) == ([1, 64, 1, 64], [1, 16, 1, 64])
    assert described.strides == [64, 64, 64, 1]
    assert strides.source(x, 16, False) is x


def test_only_rows_that_products_of_16_bits_cannot_take_are_copied():
    """Those of other strides Triton 3.6 multiplied wrongly on Hopper at head dims 80 and 96."""
    wide = torch.randn(2, 6, 4, 96).half()
    for x in (wide, wide[:, :, 1:3], wide[..., 8:-8], wide.transpose(1, 2), wide[:, :, :1].expand(2, 6, 4, 96)):
        assert strides.aligned(x) is x
    odd = torch.randn(1, 6, 4, 84).half()[..., :80]
    shifted = torch.randn(1 + wide.numel()).half()[1:].view(wide.shape)
    lonely = wide[:1].as_strided((1, 6, 4, 96), (7, 384, 96, 1))  # of size 1, its stride counts for the compiler
    turned = torch.randn(2, 6, 96, 4).half().transpose(2, 3)
    for x in (odd, shifted, lonely, turned):
        y = strides.aligned(x)
        assert torch.equal(x, y)
        assert y.data_ptr() % 16 == 0
        assert y.stride()[3] == 1
        assert all(stride % 16 == 0 for stride in y.stride()[:3])
    in_float32 = torch.randn(1, 6, 4, 84)[..., :80]
    assert strides.aligned(in_float32) is in_float32
