"""vLLM's attention with lanes: any of three backends, told what to put into keys, queries and values and when.

The model gives keys whose lanes hold log f. Where vLLM calls a backend to attend, log f becomes c, going on from the
cache; queries, keys and values get their lanes, and keys and values are written. The backend's own kernels do the rest,
but for long pieces of text: on a GPU those are read by `forgetting_attention` (`prompts.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport

from retrofox.serving import prompts
from retrofox.serving.lanes import Lanes, plan_lanes, running_sum
from retrofox.serving.prompts import Links, Reading

try:
    from retrofox.serving import lane_kernels
except ImportError:  # without Triton there is no GPU to use it on
    lane_kernels: Any = None

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache is known to be (blocks, kv heads, tokens, key and value), or on a CPU keys before values."""
PLAIN_ISA = ("vec", "vec16")
"""Kinds of the CPU backend that keep values as rows; others pack them."""


def with_lanes(native: Attention, exempt_tokens: int, prune: float | None) -> Attention:
    """A vLLM attention like `native`, under its name, of heads that have room for lanes.

    Raises:
        ValueError: no backend that is known here takes heads of that width.
    """
    config = get_current_vllm_config()
    chosen = native.attn_backend
    if chosen.get_name() not in BACKENDS or chosen.forward_includes_kv_cache_update:
        raise ValueError(
            f"the attention backend {chosen.get_name()} keeps its cache in a way that the gates don't know: add "
            "--attention-backend FLASH_ATTN or TRITON_ATTN"
        )
    dtype = native.kv_cache_torch_dtype
    lanes = plan_lanes(native.num_heads // native.num_kv_heads, native.head_size, dtype, chosen.supports_head_size)
    softcap = getattr(native.impl, "logits_soft_cap", None) or None
    context: Any = config.compilation_config.static_forward_context
    del context[native.layer_name]
    made = Attention(
        native.num_heads,
        lanes.width + native.head_size,
        native.impl.scale,  # type: ignore[attr-defined]
        num_kv_heads=native.num_kv_heads,
        cache_config=config.cache_config,
        logits_soft_cap=softcap,
        per_layer_sliding_window=native.sliding_window,
        prefix=native.layer_name,
        attn_backend=_backend(chosen, softcap is not None),
    )
    impl: Any = made.impl
    impl.lanes = lanes
    impl.options = {
        "scale": impl.scale,
        "window": native.sliding_window,
        "sink": exempt_tokens,
        "softcap": softcap,
        "prune": prune,
    }
    return made


@functools.cache
def _backend(native: Any, softcap: bool) -> Any:
    """The backend with an implementation that knows lanes; no CUDA graph holds what `forgetting_attention` reads."""
    impl, builder = native.get_impl_cls(), native.get_builder_cls()
    fox = type(f"Fox{impl.__name__}", (FoxImpl, impl), {"__module__": __name__})
    most = AttentionCGSupport.NEVER if softcap else AttentionCGSupport.UNIFORM_BATCH
    changes: dict[str, Any] = {
        "_cudagraph_support": min(most, builder._cudagraph_support, key=lambda support: support.value),
        "supports_update_block_table": False,  # `Step` knows the table too
        "softcap": softcap,
        "__module__": __name__,
    }
    made = type(f"Fox{builder.__name__}", (StepBuilder, builder), changes)
    body = {
        "get_impl_cls": staticmethod(lambda: fox),
        "get_builder_cls": staticmethod(lambda: made),
        "forward_includes_kv_cache_update": True,
        "__module__": __name__,
    }
    return type(f"Fox{native.__name__}{'Softcap' if softcap else ''}", (native,), body)


class Step(NamedTuple):
    """What a batch's metadata has besides the backend's own, as its attribute `fox`.

    links: None where no request goes on from another's new token; readings: calls of `forgetting_attention`; rest:
    metadata of the requests that the backend attends to where there are readings, None where it has none left.
    """

    links: Links | None
    readings: list[Reading]
    rest: Any


class StepBuilder:
    """Mixin of a backend's metadata builder, which runs once a step for all layers of a kind."""

    softcap: ClassVar[bool]
    kv_cache_spec: Any
    vllm_config: Any
    device: torch.device
    reorder_batch_threshold: int | None
    softmax_segm_output: torch.Tensor

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any):
        super().__init__(kv_cache_spec, *args, **kwargs)  # type: ignore[call-arg]
        if self.least is not None and self.least > 1:
            self.reorder_batch_threshold = self.least - 1  # shorter ones come first
        scratch = getattr(self, "softmax_segm_output", None)  # TRITON_ATTN: as wide as the cache's heads
        if scratch is not None:
            width = 1 << (kv_cache_spec.head_size - 1).bit_length()
            self.softmax_segm_output = scratch.new_empty((*scratch.shape[:-1], width))

    @property
    def pays(self) -> bool:
        """Whether `forgetting_attention` reads long pieces faster than the backend: on a GPU, in bfloat16."""
        return self.device.type == "cuda" and self.kv_cache_spec.dtype == torch.bfloat16

    @property
    def least(self) -> int | None:
        """New tokens of a request from which `forgetting_attention` reads them; None: the backend reads all."""
        if self.softcap or getattr(self, "isa", PLAIN_ISA[0]) not in PLAIN_ISA:
            return 1
        return prompts.LONG if self.pays else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The backend's metadata of the batch, with a `Step`."""
        common, least, native = common_attn_metadata, self.least, super().build  # type: ignore[misc]
        readings: list[Reading] = []
        kept = common.num_reqs
        if least is not None and common.max_query_len >= least:
            lengths = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
            starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
            kept, readings = prompts.plan(starts, lengths[: common.num_reqs].tolist(), least)
        made = native(common_prefix_len, common, fast_build or bool(readings))
        rest = native(common_prefix_len, _first_requests(common, kept), fast_build) if readings and kept else None
        made.fox = Step(
            self._links(common), [prompts.placed(reading, common.query_start_loc) for reading in readings], rest
        )
        return made

    def _links(self, common: Any) -> Links | None:
        """Links, where a request may have found its prefix in pages that this very step fills.

        With one new token each, too: a prompt of whole pages and a token, which another's new token fills the last of.
        Requests that only decode have no link: their last token is an earlier step's. (A full CUDA graph holds no
        links: docs/limits.md.)
        """
        prefilling = getattr(common, "is_prefilling", None)  # on the host
        decodes = common.max_query_len == 1 and (prefilling is None or not bool(prefilling.any()))
        if decodes or common.num_reqs == 1 or not self.vllm_config.cache_config.enable_prefix_caching:
            return None
        return prompts.find_links(
            common.query_start_loc[: common.num_reqs + 1],
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor[: common.num_reqs],
            common.slot_mapping,
            self.kv_cache_spec.block_size,
        )


def _first_requests(common: Any, count: int) -> Any:
    """A batch's description cut to its first requests, from the one that vLLM's builders take."""
    starts = common.query_start_loc_cpu[: count + 1]
    tokens = int(starts[-1])
    cut = {
        name: None if getattr(common, name) is None else getattr(common, name)[:count]
        for name in ("seq_lens", "seq_lens_cpu_upper_bound", "is_prefilling", "block_table_tensor")
    }
    return dataclasses.replace(
        common,
        query_start_loc=common.query_start_loc[: count + 1],
        query_start_loc_cpu=starts,
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        slot_mapping=common.slot_mapping[:tokens],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **cut,
    )


class FoxImpl:
    """Mixin of a backend's implementation; shapes T tokens, Hkv kv heads, G query heads of each, `width` lanes.

    Where logits are soft-capped (Gemma 2) the decay stands outside the cap and no product of vectors can carry it:
    there every request, decoding ones too, is read by `forgetting_attention`.
    """

    lanes: Lanes
    options: dict[str, Any]  # of `forgetting_attention`
    scale: float

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Writes lanes, keys and values, then attends: by the backend's kernels, `forgetting_attention`, or both."""
        batch, native, width = attn_metadata, super().forward, self.lanes.width  # type: ignore[misc]
        if batch is None:
            return output.zero_()
        query, key, value, log_f = self._written(layer, query, key, value, kv_cache, batch)
        _, readings, rest = batch.fox
        if not readings:
            return native(layer, query, key, value, kv_cache, batch, output, *args, **kwargs)
        if rest is not None:
            native(layer, query, key, value, kv_cache, rest, output, *args, **kwargs)
        for reading in readings:
            new = reading.new
            if reading.past:
                rows = self._gathered(layer, kv_cache, batch, reading)
            else:  # the operator repeats calls cheaply where addresses are multiples of 16 bytes
                rows = prompts.Rows(key[new, :, width:], value[new, :, width:], log_f[new].clone())
            output[new, :, width:] = prompts.read(query[new, :, width:], rows, reading.cu_seqlens, self.options)
        return output

    def _written(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value with their lanes, log f (T, H) float32; keys and values are in the cache too."""
        lanes, width, links = self.lanes, self.lanes.width, batch.fox.links
        write = super().do_kv_cache_update  # type: ignore[misc]
        if self._fuses(layer, query):
            log_f = lane_kernels.write_lanes(lanes, query, key, value, kv_cache, batch, self.scale, links)
            write(layer, key, value, kv_cache, batch.slot_mapping)
            return query, key, value, log_f
        log_f, flag = lanes.outgoing(key[..., :width])
        before = lanes.state(self._values_before(layer, kv_cache, batch))
        c = running_sum(log_f, batch.query_start_loc, batch.seq_lens, before, links)
        own = lanes.query(c, self.scale, query.dtype).flatten(1, 2)
        query = torch.cat([own, query[..., width:]], -1)
        key = torch.cat([lanes.key(c, flag, self.scale, key.dtype), key[..., width:]], -1)
        value = torch.cat([lanes.value(c, value.dtype), value[..., width:]], -1)
        if self._by_rows(layer):
            _write_rows(kv_cache, batch.slot_mapping, key, value)
        else:
            write(layer, key, value, kv_cache, batch.slot_mapping)
        return query, key, value, log_f.flatten(1).float()

    def _gathered(self, layer: Any, kv_cache: torch.Tensor, batch: Any, reading: Reading) -> prompts.Rows:
        """What a request's first new token and those after it see of its text, out of the cache."""
        first = prompts.first_seen(reading.past, self.options["window"])
        where = batch.block_table[reading.request], first, reading.past + reading.new.stop - reading.new.start
        if lane_kernels is not None and kv_cache.is_cuda and kv_cache.dtype == torch.bfloat16:
            return lane_kernels.gather(self.lanes, kv_cache, *where)
        return prompts.gather(self.lanes, *self._caches(layer, kv_cache), *where)

    def _fuses(self, layer: Any, states: torch.Tensor) -> bool:
        """Whether lanes are made in place by kernels: on a GPU, in bfloat16."""
        return (
            lane_kernels is not None
            and states.is_cuda
            and states.dtype == torch.bfloat16
            and states.stride(-1) == 1
            and not self._by_rows(layer)
        )

    def _by_rows(self, layer: Any) -> bool:
        """Whether this layer keeps its cache by itself: softcap, or a CPU backend that packs values."""
        return self.options["softcap"] is not None or getattr(layer, "isa", PLAIN_ISA[0]) not in PLAIN_ISA

    def _caches(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each (blocks, Hkv, tokens, width + D), of a cache."""
        if hasattr(layer, "isa") and not self._by_rows(layer):
            tokens = kv_cache.shape[2]
            keys, values = kv_cache.flatten(2).chunk(2, -1)  # a page's keys channel by channel, its values as rows
            return keys.unflatten(2, (-1, tokens)).transpose(2, 3), values.unflatten(2, (tokens, -1))
        keys, values = kv_cache.chunk(2, -1)
        return keys, values

    def _values_before(self, layer: Any, kv_cache: torch.Tensor, batch: Any) -> torch.Tensor:
        """The cached values (R, Hkv, width + D) of each request's last token in the cache; any where there is none."""
        block = kv_cache.shape[2]
        new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        last = (batch.seq_lens[: len(new)] - new - 1).clamp_min(0).long()
        page = batch.block_table.gather(1, (last // block)[:, None]).long()[:, 0]
        return self._caches(layer, kv_cache)[1][page, :, last % block]


def _write_rows(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes (T, Hkv, width + D) keys and values beside each other into (blocks, Hkv, tokens, 2 (width + D))."""
    slots = slot_mapping.long()
    real = slots >= 0  # padding has slot -1
    slots = slots[real]
    rows = torch.cat([key, value], -1)[: len(real)][real]
    kv_cache[slots // kv_cache.shape[2], :, slots % kv_cache.shape[2]] = rows
