"""When a step looks for prefixes that another request writes in it, without vLLM: its modules stand empty."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrofox.serving.lanes import running_sum

PAGE = 4
MODULES = (
    "", ".config", ".model_executor", ".model_executor.layers", ".model_executor.layers.attention", ".platforms",
    ".utils", ".utils.torch_utils", ".v1", ".v1.attention", ".v1.attention.backend",
)  # fmt: skip
MODULE = "retrofox.serving.vllm_attention"


@pytest.fixture
def builder(monkeypatch) -> Any:
    for name in MODULES:
        module: Any = types.ModuleType(f"vllm{name}")
        module.get_current_vllm_config = module.Attention = module.AttentionCGSupport = module.current_platform = None
        module._encode_layer_name = str
        monkeypatch.setitem(sys.modules, f"vllm{name}", module)
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))
    monkeypatch.delitem(sys.modules, MODULE)
    made = object.__new__(importlib.import_module(MODULE).StepBuilder)
    made.kv_cache_spec, made.paged = SimpleNamespace(block_size=PAGE), False
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    return made


def step(prefilling: list[bool] | None, second: int = 9) -> SimpleNamespace:
    """The first request decodes the 8th token of its text; the second's prompt is these 8 and one more."""
    table = torch.tensor([[3, 5, 0], [3, 5, 7]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([8, second], dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=2,
        max_query_len=1,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=table,
        slot_mapping=torch.tensor([5 * PAGE + 3, 7 * PAGE]),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling),
    )


def test_a_prompt_that_ends_one_token_behind_a_page_that_is_just_filled_goes_on_from_it(builder):
    batch = step([False, True])
    links = builder._links(batch)
    assert links.token.tolist() == [-1, 0]
    assert links.request[1] == 0
    log_f = -torch.rand(2, 1, 3, generator=torch.Generator().manual_seed(0)).double()
    before = torch.tensor([-7.0, 0.0]).double()[:, None, None].expand(2, 1, 3)  # the second's is not written yet
    c = running_sum(log_f, batch.query_start_loc, batch.seq_lens, before, links)
    torch.testing.assert_close(c, torch.stack([log_f[0] - 7, log_f[0] - 7 + log_f[1]]))


@pytest.mark.parametrize("prefilling", [[False, False], None])
def test_a_step_that_only_decodes_looks_for_nothing(builder, prefilling):
    assert builder._links(step(prefilling)) is None


def test_with_one_new_token_each_our_own_kernel_looks_by_itself(builder):
    builder.paged = True
    assert builder._links(step([False, True])) is None


def test_a_prompt_that_goes_on_within_a_page_looks_for_nothing(builder):
    assert builder._links(step([False, True], second=8)) is None
    unknown = step([False, True], second=8)
    unknown.seq_lens_cpu_upper_bound = None  # then it may be whole pages
    assert builder._links(unknown) is not None


def test_a_prompt_that_goes_on_from_one_that_goes_on_from_another_counts_all_of_them():
    """Five requests of two new tokens, each behind the one before: the gates of all add up."""
    log_f = -torch.rand(10, 1, 3, generator=torch.Generator().manual_seed(0)).double()
    starts, lengths = torch.arange(0, 11, 2, dtype=torch.int32), torch.arange(10, 20, 2, dtype=torch.int32)
    before = torch.full((5, 1, 3), -3.0).double()  # of the first: the others' is not written yet
    links = (torch.tensor([-1, 1, 3, 5, 7]), torch.tensor([0, 0, 1, 2, 3]))
    c = running_sum(log_f, starts, lengths, before, links)
    torch.testing.assert_close(c, log_f.cumsum(0) - 3.0)
