"""Launching without Triton's binder: a kernel compiled for one problem never runs another that it doesn't fit."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")

from fox_kernels import decode, launch  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


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
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.ran.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_compiled", {})
    return Kernel()


def test_the_same_kind_of_problem_compiles_once(kernel):
    for length in (100, 200, 300):
        x = torch.zeros(length)
        launch.launch(kernel, (length, 2), (x, None, length + 1, 0.5 * length), (True, 64), warps=8, stages=2)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0][2] == {"num_warps": 8, "num_stages": 2}
    assert [grid for grid, _ in kernel.ran] == [(200, 2, 1), (300, 2, 1)]
    x, nothing, number, fraction, *constants = kernel.ran[1][1]
    assert (len(x), nothing, number, fraction, constants) == (300, None, 301, 150.0, [True, 64])


def test_what_triton_specialises_on_compiles_anew(kernel):
    x, block = torch.zeros(64), torch.zeros(8, 64, dtype=torch.float16)
    arguments = [(x, 3), (x.half(), 3), (x[1:], 3), (None, 3), (x, 1), (x, 16), (x, 2**31), (x, 3.0)]
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
    assert launch.KIND.get(torch.nn.Parameter, launch.of_other)(torch.nn.Parameter(x)) == launch.of_tensor(x)


def test_only_a_gpu_with_tma_copies_by_it():
    assert not launch.describable(torch.zeros(1, 64, 2, 64, dtype=torch.float16))


def test_a_dimension_of_size_1_gets_a_stride_that_tma_takes():
    x = torch.zeros(2, 64, 1, 64, dtype=torch.float16)[:1].as_strided((1, 64, 1, 64), (7, 64, 3, 1))
    described = launch.source(x, 16, True)
    assert (described.shape, described.block_shape) == ([1, 64, 1, 64], [1, 16, 1, 64])
    assert described.strides == [64, 64, 64, 1]
    assert launch.source(x, 16, False) is x


@pytest.mark.parametrize("processors", [108, 132, 148])
def test_decoding_keeps_two_thirds_of_the_processors_busy_whatever_the_batch(processors):
    for pairs in range(1, processors + 1):
        programs = pairs * decode.splits_for(pairs, processors)
        assert programs <= 2 * processors
        assert programs / processors >= 0.66 * -(-programs // processors)
    assert decode.splits_for(5000, processors) == 1
