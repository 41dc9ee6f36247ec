"""vLLM's own bookkeeping of blocks over layers with a reach: `make test-vllm` runs these."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn
BLOCK, REACH, SINKS = 4, 10, 6
COMMON = {"block_size": BLOCK, "num_kv_heads": 3, "head_size": 72, "dtype": torch.bfloat16}


@pytest.fixture
def manager() -> Any:
    """Of one layer with a reach of 10 tokens and 6 sinks, over 40 blocks of 4 tokens."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

    from retrofox.serving.vllm_blocks import ReachSpec

    pool = BlockPool(num_gpu_blocks=40, enable_caching=True, hash_block_size=BLOCK)
    spec = ReachSpec(**COMMON, sliding_window=REACH, sinks=SINKS)
    sizes = {"enable_caching": True, "kv_cache_group_id": 0, "scheduler_block_size": BLOCK}
    return get_manager_for_kv_cache_spec(spec, 8, 1000, block_pool=pool, **sizes)


def read(manager: Any, name: str, length: int, hits: Any = (), step: int = 8) -> Any:
    """A request that reads `length` tokens in steps, as the scheduler does, behind `hits`; a hash is a place."""
    request = SimpleNamespace(request_id=name, shared_prefix_boundary=None, lora_request=None)
    request.block_hashes = [b"%d" % place for place in range(length // BLOCK)]
    done = len(hits) * BLOCK
    needed = manager.get_num_blocks_to_allocate(name, done + 1, list(hits), done, done, done + 1)
    free = manager.block_pool.get_num_free_blocks()
    manager.add_local_computed_blocks(name, list(hits), done, 0)
    for start in range(done, length, step):
        manager.remove_skipped_blocks(name, start)
        manager.allocate_new_blocks(name, min(start + step, length), length)
        if start == done:
            taken = free - manager.block_pool.get_num_free_blocks()
            assert taken >= needed
        manager.cache_blocks(request, min(start + step, length), replay_boundaries=())
        held = [block for block in manager.req_to_blocks[name] if not block.is_null]
        assert len(held) <= manager.kv_cache_spec.max_admission_blocks_per_request(step, 1000)
    manager.remove_skipped_blocks(name, length)
    return request


def held(manager: Any, name: str) -> list[int]:
    return [place for place, block in enumerate(manager.req_to_blocks[name]) if not block.is_null]


def found(manager: Any, request: Any) -> Any:
    from retrofox.serving.vllm_blocks import ReachManager

    options = {"drop_eagle_block": False, "alignment_tokens": BLOCK}
    (blocks,), length = ReachManager.find_longest_cache_hit(
        request.block_hashes, 60, [0], manager.block_pool, manager.kv_cache_spec, **options
    )
    assert length == len(blocks) * BLOCK
    return blocks


def test_blocks_between_those_of_sinks_and_those_within_reach_are_free(manager):
    read(manager, "first", 60)
    assert held(manager, "first") == [0, 1, *range((60 - REACH + 1) // BLOCK, 15)]
    assert manager.block_pool.get_num_free_blocks() == 39 - 5


def test_the_worker_keeps_the_sinks_blocks_in_its_table(manager):
    """Any other number is how many tokens back its table is kept: `worker/gpu/model_runner.py` of 0.33."""
    assert manager.kv_cache_spec.num_retained_tokens == 0


def test_a_prefix_is_found_with_its_sinks_and_without_them_not(manager):
    request = read(manager, "first", 60)
    manager.free("first")
    assert manager.block_pool.get_num_free_blocks() == 39
    hits = found(manager, request)
    assert [place for place, block in enumerate(hits) if not block.is_null] == [0, 1, 12, 13, 14]
    read(manager, "second", 68, hits)
    assert manager.req_to_blocks["second"][:2] == hits[:2]
    assert all(block.ref_cnt == 1 for block in hits[:2])
    manager.free("second")
    manager.block_pool._maybe_evict_cached_block(hits[0])
    assert found(manager, request) == []


def test_a_sparse_cache_keeps_the_sinks(manager):
    mask = type(manager).reachable_block_mask(
        start_block=1, end_block=12, alignment_tokens=32, kv_cache_spec=manager.kv_cache_spec, use_eagle=False
    )
    assert mask == [place in (1, 5, 6, 7) for place in range(1, 12)]


@pytest.mark.parametrize("changes", [{}, {"hybrid": False}, {"kv_transfer_config": "any"}, {"length": 25}])
def test_a_layer_gives_blocks_back_where_vllm_can_take_them(monkeypatch, changes):
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from retrofox.serving.vllm_blocks import ReachingAttention, ReachSpec

    full = FullAttentionSpec(**COMMON)
    monkeypatch.setattr(Attention, "get_kv_cache_spec", lambda *_: full)
    layer: Any = SimpleNamespace(sliding_window=None, impl=SimpleNamespace(reach=25, options={"sink": 1}))
    layer = type("Layer", (ReachingAttention,), {"__init__": lambda self: self.__dict__.update(vars(layer))})()
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=changes.get("length", 100)),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not changes.get("hybrid", True)),
        kv_transfer_config=changes.get("kv_transfer_config"),
    )
    wanted = full if changes else ReachSpec(**COMMON, sliding_window=25, sinks=1)
    assert layer.get_kv_cache_spec(config) == wanted


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_the_bounds_of_its_heads(monkeypatch, pico_fox, ranks):
    from retrofox.anatomy import attentions
    from retrofox.serving import vllm_models

    model = pico_fox(gate_heads="kv", max_half_life=8.0, open_heads=((0, 0),))
    attention = next(attentions(model))[1]
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    local = {kv_heads: kv_heads // ranks, heads: heads // ranks}
    bounds: list[float] = []
    monkeypatch.setattr(vllm_models, "get_tensor_model_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(vllm_models, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        bounds += vllm_models.Added(attention.forget_gate, local, heads // kv_heads).bounds.tolist()
    wanted = [0.0] * (heads // kv_heads) + [math.log(2) / 8] * (heads - heads // kv_heads)
    assert bounds == pytest.approx(wanted)
