"""Which cache a text is generated with, and what it takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from retrofox.acceleration.cuda_graph_decoding import forgets
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.config_values import horizon_of


def new_cache(model: Any, kind: str = "auto") -> Any:
    """An empty cache for a model, of one of the `sampling.CACHES`.

    "full" keeps all keys; "forgetting" frees those that the model's horizon hides for good; "auto" is the latter
    for a model with a horizon, but on a GPU not for multi-head latent attention.
    """
    if kind == "forgetting" and horizon_of(model.config) is None:
        raise ValueError('cache "forgetting" needs a model with a horizon (fox.horizon): take "full"')
    forgetting = kind == "forgetting" or (kind == "auto" and forgets(model))
    return ForgettingCache() if forgetting else DynamicCache(config=model.config)


def cache_bytes(cache: Any) -> int:
    """Bytes that the tensors of a cache keep allocated."""
    found: dict[int, int] = {}
    if isinstance(cache, ForgettingCache):
        cache.settle()

    def look(held: Any) -> None:
        if isinstance(held, torch.Tensor):
            found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
        elif isinstance(held, (list, tuple)):
            for each in held:
                look(each)
        elif hasattr(held, "is_initialized"):  # a layer, or one in a layer
            look([x for x in vars(held).values() if x is not cache.layers])

    look(cache.layers)
    return sum(found.values())
