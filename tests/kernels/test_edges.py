"""Where what positions see begins and ends: by one kernel as by torch, and as drawn by hand."""

import itertools
import json
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from fox_kernels.common.edges import edges
from twins import edges_torch

CUTS = (None, [0, 9], [0, 3, 4, 9], [0, 0, 1, 9, 9], [0, *range(1, 2000, 3), 2500], [0, 2, 2, 7])  # the last is short


def differences(device) -> list[str]:
    """Problems for which the kernel and its twin differ."""
    wrong = []
    dtypes = (torch.int32, torch.int64)
    for cuts, starts, window, dtype in itertools.product(CUTS, (None, [0], [4], [9], [2, 9, 0]), (None, 1, 5), dtypes):
        S, B = (9 if cuts is None or cuts[-1] < 9 else cuts[-1]), len(starts or [0])
        if cuts is not None and B > 1:
            continue
        cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=dtype, device=device)
        seq_start = None if starts is None else torch.tensor(starts, dtype=dtype, device=device)
        got = edges(B, S, cu_seqlens, seq_start, window, device)
        wanted = edges_torch(B, S, cu_seqlens, seq_start, window, device)
        same = got is wanted is None
        if got is not None and wanted is not None:
            same = torch.equal(got[:, : B * S].view(2, B, S), wanted)
        if not same:
            wrong.append(f"{cuts and cuts[:6]} {starts} {window} {dtype}")
    return wrong


def test_the_kernel_finds_what_torch_finds(report):
    assert report == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_finds_what_torch_finds_on_a_gpu():
    assert differences("cuda") == []


def test_edges_join_documents_padding_and_window():
    cu_seqlens = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    seq_start = torch.tensor([0, 2], dtype=torch.int32)

    def rows(B, S, cu_seqlens, seq_start, window):
        found = edges_torch(B, S, cu_seqlens, seq_start, window, "cpu")
        return None if found is None else found.tolist()

    assert rows(1, 9, cu_seqlens, None, None) == [[[0, 0, 0, 3, 4, 4, 4, 4, 4]], [[3, 3, 3, 4, 9, 9, 9, 9, 9]]]
    assert rows(1, 9, cu_seqlens, None, 2) == [[[0, 0, 1, 3, 4, 4, 5, 6, 7]], [[2, 3, 3, 4, 6, 7, 8, 9, 9]]]
    assert rows(2, 4, None, seq_start, None) == [[[0, 0, 0, 0], [2, 2, 2, 2]], [[4, 4, 4, 4], [0, 0, 4, 4]]]
    assert rows(2, 4, None, None, None) is None


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    print(json.dumps(differences("cpu")))
