"""vLLM engines as `retrofox.serving.vllm_run` makes them, on a CPU in the way of a GPU: our kernels, interpreted.

Blocks of the cache that no request holds, and the null block, are NaN while a layer attends.
"""

import math
import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from retrofox.serving import paged_attention, paged_rows, plugin, prefill, vllm_attention, vllm_run

plugin.current_platform = vllm_attention.current_platform = SimpleNamespace(is_cuda=lambda: True)
prefill.LONG = 16
paged_attention.PROGRAMS = 8  # parts of the keys are programs that the interpreter runs one by one
paged_rows.Paged.extra = 16  # type: ignore[assignment]  # vLLM plans its own kernels too: none on a CPU take 72

MANAGERS: list[Any] = []
BEGIN, FORWARD = SingleTypeKVCacheManager.__init__, paged_attention.PagedImpl.forward


def begin(manager: Any, *args: Any, **kwargs: Any) -> None:
    BEGIN(manager, *args, **kwargs)
    MANAGERS.append(manager)


def forward(impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *args: Any, **kwargs: Any) -> Any:
    pool = MANAGERS[-1].block_pool if MANAGERS else None  # the running engine's
    texts = [text for manager in MANAGERS if manager.block_pool is pool for text in manager.req_to_blocks.values()]
    held = {block.block_id for text in texts for block in text if not block.is_null}
    free = [number for number in range(len(kv_cache) if held else 0) if number not in held]
    before = kv_cache[free].clone()
    kv_cache[free] = math.nan
    made = FORWARD(impl, layer, query, key, value, kv_cache, *args, **kwargs)
    kv_cache[free] = before
    return made


SingleTypeKVCacheManager.__init__ = begin  # type: ignore[method-assign]
paged_attention.PagedImpl.forward = forward  # type: ignore[method-assign]

if __name__ == "__main__":
    vllm_run.run_program()
