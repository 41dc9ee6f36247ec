"""vLLM's attention with lanes: any of three backends, told what to put into keys, queries and values and when.

The model gives keys whose lanes hold log f. vLLM calls a backend twice per layer, both times where the batch's requests
are known: to write keys and values into the paged cache, and to attend. Here the first call turns log f into c, going
on from the cache, the second puts c into the queries; the backend's own kernels do the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from fox_kernels import forgetting_attention
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport

from retrofox.serving.lanes import Lanes, plan_lanes, running_sum

try:
    from retrofox.serving.lane_kernels import query_lanes, write_lanes
except ImportError:  # without Triton there is no GPU to use it on
    query_lanes: Any = None
    write_lanes: Any = None

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache is known to be (blocks, kv heads, tokens, key and value), or on a CPU keys before values."""
PLAIN_ISA = ("vec", "vec16")
"""Kinds of the CPU backend that keep values as rows; others pack them."""


def with_lanes(native: Attention, exempt_tokens: int) -> Attention:
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
    impl.lanes, impl.head_dim, impl.softcap = lanes, native.head_size, softcap
    impl.window, impl.sink = native.sliding_window, exempt_tokens
    impl.c = None
    return made


@functools.cache
def _backend(native: Any, softcap: bool) -> Any:
    """The backend with an implementation that knows lanes; one that can't be captured where it attends by itself."""
    impl, builder = native.get_impl_cls(), native.get_builder_cls()
    fox = type(f"Fox{impl.__name__}", (FoxImpl, impl), {"__module__": __name__})
    changes: dict[str, Any] = {"__module__": __name__}
    if softcap:
        changes["_cudagraph_support"] = AttentionCGSupport.NEVER
    made = type(f"Fox{builder.__name__}", (WideScratch, builder), changes)
    body = {
        "get_impl_cls": staticmethod(lambda: fox),
        "get_builder_cls": staticmethod(lambda: made),
        "__module__": __name__,
    }
    return type(f"Fox{native.__name__}{'Softcap' if softcap else ''}", (native,), body)


class WideScratch:
    """Mixin of a backend's metadata builder: scratch memory for heads as wide as the cache's, not as the config's."""

    softmax_segm_output: torch.Tensor

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any):
        super().__init__(kv_cache_spec, *args, **kwargs)  # type: ignore[call-arg]
        scratch = getattr(self, "softmax_segm_output", None)  # TRITON_ATTN
        if scratch is not None:
            width = 1 << (kv_cache_spec.head_size - 1).bit_length()
            self.softmax_segm_output = scratch.new_empty((*scratch.shape[:-1], width))


class FoxImpl:
    """Mixin of a backend's implementation; shapes T tokens, Hkv kv heads, G query heads of each, `width` lanes.

    Where logits are soft-capped (Gemma 2) the decay stands outside the cap and no product of vectors can carry it:
    there `gathered` reads keys, values and c out of the cache, request by request, and calls `forgetting_attention`.
    """

    lanes: Lanes
    head_dim: int
    softcap: float | None
    window: int | None
    sink: int
    scale: float
    c: torch.Tensor | None  # (T, Hkv, G) float64, between the two calls of one layer

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Turns log f in the keys' lanes into c, keeps it, and writes keys and values with it into the cache."""
        batch = _metadata(layer)
        if batch is None or not kv_cache.numel():
            return
        lanes, width = self.lanes, self.lanes.width
        if self._fuses(layer, key):
            table = batch.block_table, self.scale
            self.c = write_lanes(lanes, key, value, kv_cache, batch.query_start_loc, batch.seq_lens, *table)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
            return
        log_f, flag = lanes.outgoing(key[..., :width])
        before = lanes.state(self._values_before(layer, kv_cache, batch))
        c = self.c = running_sum(log_f, batch.query_start_loc, batch.seq_lens, before)
        key = torch.cat([lanes.key(c, flag, self.scale, key.dtype), key[..., width:]], -1)
        value = torch.cat([lanes.value(c, value.dtype), value[..., width:]], -1)
        if self._by_rows(layer):
            _write_rows(kv_cache, slot_mapping, key, value)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

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
        """Attends: by the backend's kernels with c in the queries' lanes, or by `gathered`."""
        c, self.c = self.c, None
        if attn_metadata is None:
            return output.zero_()
        if c is None:
            raise RuntimeError("vLLM attends to keys that it has not written: the gates' running sum is missing")
        if self._by_rows(layer):
            return self.gathered(query, kv_cache, attn_metadata, output)
        if self._fuses(layer, query):
            query_lanes(self.lanes, query, c, self.scale)
        else:
            own = self.lanes.query(c, self.scale, query.dtype)
            query = torch.cat([own.flatten(1, 2), query[..., self.lanes.width :]], -1)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]

    def gathered(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: Any, output: torch.Tensor) -> torch.Tensor:
        """Forgetting Attention of each request over rows copied out of its pages; waits for the host."""
        width = self.lanes.width
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        block = kv_cache.shape[2]
        for request, length in enumerate(lengths):
            begin, end = starts[request], starts[request + 1]
            if begin == end:
                continue
            # Pages before the window are another request's by now.
            first = 0 if self.window is None else max(0, length - (end - begin) - self.window + 1)
            pages = batch.block_table[request, first // block : -(-length // block)].long()
            rows = kv_cache[pages].transpose(1, 2).flatten(0, 1)[first % block :][: length - first]
            k, v = rows.chunk(2, -1)
            c = self.lanes.state(v).flatten(1)
            log_f = torch.diff(c, dim=0, prepend=c[:1]).clamp_max(0.0).float()
            found = forgetting_attention(
                query[begin:end, :, width:][None].contiguous(),
                k[..., width:][None].contiguous(),
                v[..., width:][None].contiguous(),
                log_f[None],
                scale=self.scale,
                window=self.window,
                sink=self.sink,
                softcap=self.softcap,
            )
            output[begin:end, :, width:] = found[0]
        return output

    def _fuses(self, layer: Any, states: torch.Tensor) -> bool:
        """Whether lanes are made in place by kernels: on a GPU, in bfloat16, and where the backend attends."""
        return (
            write_lanes is not None
            and states.is_cuda
            and states.dtype == torch.bfloat16
            and states.stride(-1) == 1
            and not self._by_rows(layer)
        )

    def _by_rows(self, layer: Any) -> bool:
        """Whether this layer keeps and reads its cache by itself: softcap, or a CPU backend that packs values."""
        return self.softcap is not None or getattr(layer, "isa", PLAIN_ISA[0]) not in PLAIN_ISA

    def _values_before(self, layer: Any, kv_cache: torch.Tensor, batch: Any) -> torch.Tensor:
        """The cached values (R, Hkv, width + D) of each request's last token in the cache; any where there is none."""
        block = kv_cache.shape[2]
        new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        last = (batch.seq_lens[: len(new)] - new - 1).clamp_min(0).long()
        page = batch.block_table.gather(1, (last // block)[:, None]).long()[:, 0]
        if hasattr(layer, "isa") and not self._by_rows(layer):
            rows = kv_cache.reshape(*kv_cache.shape[:2], 2 * block, -1)
            return rows[page, :, block + last % block]
        return kv_cache[page, :, last % block].chunk(2, -1)[1]


def _write_rows(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes (T, Hkv, width + D) keys and values beside each other into (blocks, Hkv, tokens, 2 (width + D))."""
    slots = slot_mapping.long()
    real = slots >= 0  # padding has slot -1
    slots = slots[real]
    rows = torch.cat([key, value], -1)[: len(real)][real]
    kv_cache[slots // kv_cache.shape[2], :, slots % kv_cache.shape[2]] = rows


def _metadata(layer: Any) -> Any:
    """What vLLM knows of this layer's batch in the running forward; None in a profiling run."""
    found = get_forward_context().attn_metadata
    return found.get(layer.layer_name) if isinstance(found, dict) else found
