"""Blocks of vLLM's cache that a layer with a reach gives back: all before what its queries see, but those of its sinks.

To vLLM such a layer is one with a sliding window, whose first blocks stay. Its attention is not windowed: the horizon
masks what lies beyond the reach, and `paged_attention` doesn't read it. Importing this module registers the classes,
which unpickling a spec does in the engine's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec


class ReachingAttention(Attention):
    """vLLM's attention, whose `impl.reach` bounds what the cache has to keep of a text."""

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        """A `ReachSpec` where blocks can be given back, else vLLM's own: all of a text is kept."""
        spec = super().get_kv_cache_spec(vllm_config)
        reach: int | None = self.impl.reach  # type: ignore[attr-defined]
        kept = reach in (None, self.sliding_window) or reach >= vllm_config.model_config.max_model_len
        kept |= vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        kept |= vllm_config.kv_transfer_config is not None  # connectors move a window's blocks without its sinks
        if kept:
            return spec
        assert isinstance(spec, AttentionSpec)
        names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
        sinks: int = self.impl.options["sink"]  # type: ignore[attr-defined]
        return ReachSpec(**{name: getattr(spec, name) for name in names}, sliding_window=reach, sinks=sinks)


class ReachManager(SlidingWindowManager):
    """Frees a request's blocks between those of its sinks and those within reach; no prefix is found without both."""

    kv_cache_spec: ReachSpec

    def _sinks_beyond(self, computed_tokens: int) -> int:
        """Blocks of sinks that a plain window would free."""
        return min(self.kv_cache_spec.sink_blocks, self.get_num_skipped_tokens(computed_tokens) // self.block_size)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int,
        *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        given = (request_id, num_tokens, new_computed_blocks, total_computed_tokens)
        kept = new_computed_blocks[: self._sinks_beyond(total_computed_tokens)]
        return super().get_num_blocks_to_allocate(*given, *args, **kwargs) + self._get_num_evictable_blocks(kept)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *num_computed_tokens: int
    ) -> None:
        super().add_local_computed_blocks(request_id, new_computed_blocks, *num_computed_tokens)
        kept = new_computed_blocks[: self._sinks_beyond(sum(num_computed_tokens))]
        self.block_pool.touch(kept)
        self.req_to_blocks[request_id][: len(kept)] = kept

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        super()._remove_blocks_in_range(request_id, max(first_block, self.kv_cache_spec.sink_blocks), last_block)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *args: Any, **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:  # fmt: skip
        given = (block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec)
        found, length = super().find_longest_cache_hit(*given, *args, **kwargs)
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        for place in range(min(kv_cache_spec.sink_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(hashes[place], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in found), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[place] = block
        return found, length

    @classmethod
    def reachable_block_mask(cls, start_block: int, end_block: int, *args: Any, **kwargs: Any) -> list[bool] | None:
        mask = super().reachable_block_mask(start_block, end_block, *args, **kwargs)
        spec = kwargs["kv_cache_spec"]
        return mask and [wanted or start_block + n < spec.sink_blocks for n, wanted in enumerate(mask)]


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, which it does into an empty registry only


@register_kv_cache_spec(ReachManager)
@dataclass(frozen=True, kw_only=True)
class ReachSpec(SlidingWindowSpec):
    """A layer whose queries see `sliding_window` tokens at most, and its first `sinks`."""

    sinks: int

    @property
    def sink_blocks(self) -> int:
        """Blocks in which the sinks lie."""
        return cdiv(self.sinks, self.block_size)

    @property
    def num_retained_tokens(self) -> int:
        """0, or vLLM's worker, from 0.33 on, empties the block table before the window, the sinks' blocks with it."""
        return 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks that a request holds at a time."""
        most = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + self.sink_blocks
        return min(most, cdiv(max_model_len, self.block_size))
