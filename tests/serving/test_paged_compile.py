"""The kernels over pages compiled without a GPU, for each kind that they are meant for: they fit and spill nothing."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiling import SHARED_MEMORY, check, compiled_launch, noted

from retrofox.serving import paged_attention, paged_rows
from retrofox.serving.prefill import Links

KV_HEADS, PAGE, REQUESTS = 2, 16, 3
OPTIONS = {"scale": 0.125, "window": None, "sink": 0, "softcap": None, "horizon": None}


def batch(most: int):
    tokens, requests = torch.zeros(REQUESTS, dtype=torch.int64), torch.zeros(REQUESTS, dtype=torch.int32)
    table = torch.zeros(REQUESTS, 400, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32), seq_lens=requests, block_table=table,
        slot_mapping=tokens, max_query_len=most,
    )  # fmt: skip


def attend(dim=64, programs=paged_attention.PROGRAMS, reach=None, **options):
    paged = paged_rows.Paged(3, dim)
    query = torch.zeros(REQUESTS, 3 * KV_HEADS, dim, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "PROGRAMS", programs)
        paged_attention.attend(
            paged, query, cache(paged), batch(1), torch.empty_like(query), OPTIONS | options, reach=reach
        )


def cache(paged: paged_rows.Paged) -> torch.Tensor:
    width = 2 * (paged.dim + paged.extra)
    return torch.zeros(9, PAGE, KV_HEADS, width, dtype=torch.bfloat16).transpose(1, 2)


def write(most: int, linked: bool = False):
    paged = paged_rows.Paged(3, 64)
    new = torch.zeros(REQUESTS, KV_HEADS, 64, dtype=torch.bfloat16)
    links = Links(*torch.zeros(2, REQUESTS, dtype=torch.int64)) if linked else None
    paged_rows.write(paged, new, new, torch.zeros(REQUESTS, 3 * KV_HEADS), cache(paged), batch(most), links)


def gather():
    paged = paged_rows.Paged(3, 64)
    paged_rows.gather(paged, cache(paged), batch(1).block_table[0], 37, 150)


CALLS = {
    "write a token": partial(write, 1),
    "write": partial(write, 1200),
    "write, at most a chunk": partial(write, 33),
    "write behind another's": partial(write, 1200, linked=True),
    "attend, 64": attend,
    "attend, 64, one part": partial(attend, programs=1, sink=1),
    "attend, 80, a window": partial(attend, 80, window=4096),
    "attend, 64, a horizon": partial(attend, sink=1, horizon=8.0),
    "attend, 128, a horizon and a reach": partial(attend, 128, sink=1, horizon=8.0, reach=5909),
    "attend, 128, softcap": partial(attend, 128, softcap=30.0, sink=4),
    "gather": gather,
}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("name", CALLS)
def test_fits_and_spills_nothing(name, arch):
    with noted(paged_attention, paged_rows) as found:
        CALLS[name]()
    for kernel, named, warps, stages in found:
        check(compiled_launch(kernel, named, arch, warps, stages), arch)
