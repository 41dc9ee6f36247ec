"""vLLM's attention with gates: any of three backends, told what to put into keys, queries and values and when.

Two ways. On a GPU (`PagedImpl`) our own kernels compute the gates from the states that come beside the keys, keep c in
the cache beside keys and values, and attend: `paged_kernels.py` to what decodes, `forgetting_attention` to long pieces
of text (`prompts.py`). Elsewhere (`LanesImpl`) queries, keys and values get lanes, those of keys with log f in them,
and the backend's own kernels do the rest. Only where vLLM calls a backend is it known where in its text a token stands,
and log f becomes c.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionCGSupport

from retrofox.serving import prompts
from retrofox.serving.lanes import Lanes, plan_lanes, running_sum
from retrofox.serving.prompts import Links, Reading

try:
    from retrofox.serving import paged_kernels
except ImportError:  # without Triton there is no GPU to use it on
    paged_kernels: Any = None

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache is known to be (blocks, kv heads, tokens, key and value), or on a CPU keys before values."""
PLAIN_ISA = ("vec", "vec16")
"""Kinds of the CPU backend that keep values as rows; others pack them."""


def with_gates(native: Attention, gate: Any, exempt_tokens: int, horizon: float | None) -> Attention:
    """A vLLM attention like `native`, under its name, of heads that have room for c; its `impl.room` says how.

    Args:
        gate: the layer's forget gate, with a weight (H, hidden) and a bias (H,) in float32 where it reads the states.
        horizon: nats of decay at which a key is masked; lanes can't, so `refusal` lets only a GPU have one.

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
    dtype, groups = native.kv_cache_torch_dtype, native.num_heads // native.num_kv_heads
    softcap = getattr(native.impl, "logits_soft_cap", None) or None
    room: Any = plan_lanes(groups, native.head_size, dtype, chosen.supports_head_size)  # refuses other dtypes, too
    paged = paged_kernels is not None and current_platform.is_cuda()
    assert paged or horizon is None
    if paged:
        assert paged_kernels is not None
        room = paged_kernels.Paged(groups, native.head_size, dtype)
    context: Any = config.compilation_config.static_forward_context
    del context[native.layer_name]
    made = Attention(
        native.num_heads,
        native.head_size + (room.extra if paged else room.width),
        native.impl.scale,  # type: ignore[attr-defined]
        num_kv_heads=native.num_kv_heads,
        cache_config=config.cache_config,
        logits_soft_cap=softcap,
        per_layer_sliding_window=native.sliding_window,
        prefix=native.layer_name,
        attn_backend=_backend(chosen, paged, softcap is not None),
    )
    impl: Any = made.impl
    impl.room, impl.gate = room, gate if hasattr(gate, "weight") else None
    impl.options = {
        "scale": impl.scale,
        "window": native.sliding_window,
        "sink": exempt_tokens,
        "softcap": softcap,
        "horizon": horizon,
    }
    return made


def attend(
    attention: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Forgetting Attention (T, H, D) of an attention that `with_gates` made for a GPU.

    Shapes: query (T, H, D), key, value (T, Hkv, D), of other widths than the attention's own heads; gates: the states
    (T, hidden) that its gate reads, else log f (T, H) float32. They travel as vLLM's `output_scale`, a tensor for
    backends that quantize their outputs.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    name = _encode_layer_name(attention.layer_name)
    torch.ops.vllm.unified_attention_with_output(query, key, value, output, name, gates)
    return output


@functools.cache
def _backend(native: Any, paged: bool, softcap: bool) -> Any:
    """The backend with an implementation that knows c; no CUDA graph holds what `forgetting_attention` reads."""
    impl, builder = native.get_impl_cls(), native.get_builder_cls()
    way = PagedImpl if paged else LanesImpl
    fox = type(f"{way.__name__}{impl.__name__}", (way, impl), {"__module__": __name__})
    every = softcap and not paged  # `forgetting_attention` reads every request
    most = AttentionCGSupport.NEVER if every else AttentionCGSupport.UNIFORM_BATCH
    changes: dict[str, Any] = {
        "_cudagraph_support": min(most, builder._cudagraph_support, key=lambda support: support.value),
        "supports_update_block_table": False,  # `Step` knows the table too
        "paged": paged,
        "every": every,
        "__module__": __name__,
    }
    made = type(f"Fox{builder.__name__}", (StepBuilder, builder), changes)
    body = {
        "get_impl_cls": staticmethod(lambda: fox),
        "get_builder_cls": staticmethod(lambda: made),
        "forward_includes_kv_cache_update": True,
        "__module__": __name__,
    }
    return type(f"{way.__name__}{native.__name__}{'Softcap' if every else ''}", (native,), body)


class Step(NamedTuple):
    """What a batch's metadata has besides the backend's own, as its attribute `fox`.

    links: None where no request goes on from another's new token; readings: calls of `forgetting_attention`; tokens:
    how many new tokens stand before those of the readings; owner: (tokens,) int32 on the device, the request of each,
    None where every request has one.
    """

    links: Links | None
    readings: list[Reading]
    tokens: int
    owner: torch.Tensor | None


class StepBuilder:
    """Mixin of a backend's metadata builder, which runs once a step for all layers of a kind."""

    paged: ClassVar[bool]
    every: ClassVar[bool]
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
    def least(self) -> int | None:
        """New tokens of a request from which `forgetting_attention` reads them; None: the backend reads all."""
        if self.paged:
            return prompts.LONG
        return 1 if self.every or getattr(self, "isa", PLAIN_ISA[0]) not in PLAIN_ISA else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The backend's metadata of the batch, with a `Step`."""
        common, least = common_attn_metadata, self.least
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        readings: list[Reading] = []
        kept, owner = common.num_reqs, None
        if least is not None and common.max_query_len >= least:
            lengths = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
            kept, readings = prompts.plan(starts, lengths[: common.num_reqs].tolist(), least)
        tokens = starts[kept]
        if self.paged and any(end - begin > 1 for begin, end in pairwise(starts[: kept + 1])):
            owner = prompts.owners(starts[: kept + 1]).to(self.device, non_blocking=True)
        fast = fast_build or self.paged or bool(readings)  # plans for the backend's kernels are not needed then
        made = super().build(common_prefix_len, common, fast)  # type: ignore[misc]
        placed = [prompts.placed(reading, common.query_start_loc) for reading in readings]
        made.fox = Step(self._links(common), placed, tokens, owner)
        return made

    def _links(self, common: Any) -> Links | None:
        """Links, where a request may have found its prefix in pages that this very step fills.

        With one new token each, too: a prompt of whole pages and a token, which another's new token fills the last of;
        but there our own kernel looks for it, as a CUDA graph's must. Requests that only decode have no link: their
        last token is an earlier step's.
        """
        prefilling = getattr(common, "is_prefilling", None)  # on the host
        single = common.max_query_len == 1
        decodes = single and (self.paged or prefilling is None or not bool(prefilling.any()))
        if decodes or common.num_reqs == 1 or not self.vllm_config.cache_config.enable_prefix_caching:
            return None
        if not self._behind_pages(common, prefilling):
            return None
        return prompts.find_links(
            common.query_start_loc[: common.num_reqs + 1],
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor[: common.num_reqs],
            common.slot_mapping,
            self.kv_cache_spec.block_size,
        )

    def _behind_pages(self, common: Any, prefilling: torch.Tensor | None) -> bool:
        """Whether a prompt, or its rest, begins behind whole pages, as one does that found them; asks the host only."""
        requests, lengths = common.num_reqs, common.seq_lens_cpu_upper_bound
        if lengths is None:
            return True
        new = common.query_start_loc_cpu[: requests + 1].diff()
        past = lengths[:requests] - new
        begins = new > 1 if prefilling is None else (new > 1) | prefilling[:requests]
        return bool((begins & (past > 0) & (past % self.kv_cache_spec.block_size == 0)).any())


class PagedImpl:
    """Mixin of a backend's implementation that attends by our own kernels; T tokens, H heads on Hkv, D channels."""

    room: Any  # paged_kernels.Paged
    gate: Any  # the layer's, where it reads the states; else None
    options: dict[str, Any]  # of `forgetting_attention`

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Writes keys, values (T, Hkv, D) and c, then attends; query, output (T, H, D).

        output_scale: the gates of `attend`.
        """
        batch = attn_metadata
        if batch is None:
            return output.zero_()
        assert output_scale is not None
        weights = () if self.gate is None else (self.gate.weight, self.gate.bias)
        links, readings, tokens, owner = batch.fox
        room = self.room
        log_f = paged_kernels.log_f_of(output_scale, *weights) if weights else output_scale
        paged_kernels.write(room, key, value, log_f, kv_cache, batch, links)
        if tokens:
            paged_kernels.attend(room, query[:tokens], kv_cache, batch, output[:tokens], self.options, owner)
        for reading in readings:
            new = reading.new
            if reading.past:
                first = prompts.first_seen(reading.past, self.options["window"])
                length = reading.past + new.stop - new.start
                rows = paged_kernels.gather(room, kv_cache, batch.block_table[reading.request], first, length)
            else:
                rows = prompts.Rows(key[new], value[new], log_f[new])
            output[new] = prompts.read(query[new], rows, reading.cu_seqlens, self.options)
        return output


class LanesImpl:
    """Mixin of a backend's implementation with lanes; T tokens, Hkv kv heads, G query heads of each, `width` lanes.

    Where logits are soft-capped (Gemma 2) the decay stands outside the cap and no product of vectors can carry it:
    there every request, decoding ones too, is read by `forgetting_attention`.
    """

    room: Lanes
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
        """Writes lanes, keys and values, then attends: by the backend's kernels or by `forgetting_attention`."""
        batch, native, width = attn_metadata, super().forward, self.room.width  # type: ignore[misc]
        if batch is None:
            return output.zero_()
        query, key, value, log_f = self._written(layer, query, key, value, kv_cache, batch)
        readings = batch.fox.readings  # of all requests, or none
        if not readings:
            return native(layer, query, key, value, kv_cache, batch, output, *args, **kwargs)
        for reading in readings:
            new = reading.new
            if reading.past:
                first = prompts.first_seen(reading.past, self.options["window"])
                where = batch.block_table[reading.request], first, reading.past + new.stop - new.start
                rows = prompts.gather(self.room, *self._caches(layer, kv_cache), *where)
            else:
                rows = prompts.Rows(key[new, :, width:], value[new, :, width:], log_f[new])
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
        lanes, width, links = self.room, self.room.width, batch.fox.links
        write = super().do_kv_cache_update  # type: ignore[misc]
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
