"""Decoding on a CPU without the host in the way: from a token to its logits through the weights alone.

A step of transformers' loop takes a millisecond or two beside its layers: a mask, angles, the arguments of some hundred
modules, the inputs of the next step. A model that is written like a Llama throughout, and that nothing has touched,
needs its embedding, its layers' weights (`brief`), a norm and its head.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

from .brief import Pass, attend_all, attend_one, halved, leave, norm, scaling
from .cache import GrowingLayer
from .fused import untouched
from .lean import alike, written_like

HOW = "steps of few operations, on a CPU"
DECODERS = ("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model")
"""Inner models that embed, turn, run their layers and norm; others that read the same byte for byte count as these."""
BLOCK = 64  # rows of angles made together: a step's own would take some twenty operations


def steps_serve(
    model: Any,
    layers: Pass | None,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: Any,
) -> bool:
    """Whether `Steps` continues ids (B, T) as `generate` was asked to.

    That is, in float32, for whole rows, of which a cache that grows may hold the beginning, and a plain model.
    """
    if layers is None or type(cache) is not DynamicCache or model.dtype != torch.float32:
        return False
    if not len(layers.weights) == len(model.get_decoder().layers) == model.config.num_hidden_layers:
        return False
    if cache.get_seq_length() >= ids.shape[1] or (positions is not None and positions.shape[1] != ids.shape[1]):
        return False
    if any(type(layer) not in (DynamicLayer, GrowingLayer) for layer in cache.layers):
        return False
    return (mask is None or bool(mask.all())) and not torch.is_autocast_enabled("cpu") and _plain(model)


def _plain(model: Any) -> bool:
    """Whether a causal model does nothing beside its layers that `Steps` doesn't do."""
    decoder = model.get_decoder()
    embedding, last, head = (
        getattr(decoder, "embed_tokens", None),
        getattr(decoder, "norm", None),
        getattr(model, "lm_head", None),
    )
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or last is None:
        return False
    return (
        all(untouched(x) for x in (model, decoder, embedding, head, decoder.rotary_emb))
        and embedding.max_norm is None
        and written_like(last, modeling_llama.LlamaRMSNorm)
        and alike(_native(model), modeling_llama.LlamaForCausalLM.forward)
        and any(alike(_native(decoder), forward) for forward in _decoders())
    )


def _native(model: Any) -> Any:
    """A model's forward, but for what a converted decoder's does before it calls its family's."""
    own = [x for x in type(model).__mro__ if "forward" in vars(x)]
    return own[1 if own[0].__name__ == "FoxModelMixin" else 0].forward  # type: ignore[attr-defined]


def _decoders() -> Iterator[Any]:
    """The forwards of DECODERS, each imported when it is asked for."""
    for path in DECODERS:
        family, name = path.split(".")
        yield getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name).forward


class Steps:
    """A plain model's generation over a cache that grows; as `captured.Decoding`, inside `with`.

    The first step reads the text, `part` tokens at a time, but for what the cache holds of it. The last layer keeps
    keys and values of all its tokens and goes on with the last one.

    Attributes:
        end: tokens of the text so far; the cache keeps all but the last of them, or what it held where reading stopped.
        how: how the steps ran.
    """

    how = HOW

    def __init__(
        self, model: Any, cache: Any, ids: torch.Tensor, positions: torch.Tensor | None, layers: Pass, part: int | None
    ):
        decoder = model.get_decoder()
        self.cache, self.layers, self.rotary = cache, layers, decoder.rotary_emb
        self.embedding, self.head = decoder.embed_tokens.weight, model.lm_head
        self.last = scaling(decoder.norm)
        self.end, self.fed = ids.shape[1], cache.get_seq_length()
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        elif bool((positions == positions[:1]).all()):
            positions = positions[:1]
        size = part or ids.shape[1]
        self.unread = list(zip(ids[:, self.fed :].split(size, 1), positions[:, self.fed :].split(size, 1), strict=True))
        self.next = positions[:, -1:] + 1
        self.turned: list[dict[Any, Any]] = []

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: Any) -> None:
        kept = self.fed if self.unread else self.end - 1  # stopped while reading: layers hold different numbers
        for layer in self.cache.layers:
            ahead = layer.get_seq_length() - kept
            if ahead > 0 and kept:
                layer.crop(-ahead)
            elif ahead > 0:
                layer.reset()

    def step(self, choice: Any) -> None:
        """One token further; at first, through the text to its first token."""
        if self.unread:
            for tokens, positions in self.unread:
                x = self._read(tokens, positions)
            self.unread = []
        else:
            x = self._one(choice.tokens[:, 0])
        logits = F.linear(norm(self.last, x), self.head.weight, self.head.bias).float()
        if choice.captures:
            choice.on_device(logits)
        else:
            choice.from_host(logits)

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens (B, T) at positions (B or 1, T) -> what leaves the last layer for the last of them, (B, hidden)."""
        batch, length = tokens.shape
        x = F.embedding(tokens, self.embedding)
        cos_sin = self.rotary(x, positions)
        x = x.flatten(0, 1)
        for w in self.layers.weights:
            room = self.layers.room(w, x.shape[0], x)
            h = norm(w.first, x, room.normed)
            turned = self.layers.angles(w.fade, cos_sin, positions, prompt=True)
            attended = attend_all(w, h, batch, turned, self.cache, room)
            if w is self.layers.weights[-1]:
                attended, x = (rows.view(batch, length, -1)[:, -1] for rows in (attended, x))
                room = self.layers.room(w, batch, x)
            x = leave(w, attended, x, room)
        return x

    def _one(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (B,) -> what leaves the last layer, (B, hidden); the cache grows by them."""
        x = F.embedding(tokens, self.embedding)
        if not self.turned:
            self.turned = self._angles(x)
        turned = self.turned.pop()
        for w, cache in zip(self.layers.weights, self.cache.layers, strict=True):
            cache.make_room()
            room = self.layers.room(w, x.shape[0], x)
            cos_sin = None if w.fade is None else turned.get(w.fade._shared_by)
            attended = attend_one(w, norm(w.first, x, room.normed), cos_sin, cache, room)
            x = leave(w, attended, x, room)
        return x

    def _angles(self, like: torch.Tensor) -> list[dict[Any, Any]]:
        """For some tokens to come, the last first: (cos, sin) (B or 1, 1, D) of each kind of layers that turns."""
        count = max(1, BLOCK // self.next.shape[0])
        positions = self.next + torch.arange(count)
        self.next = self.next + count
        result: list[dict[Any, Any]] = [{} for _ in range(count)]
        cos_sin = self.rotary(like, positions)
        fades = [w.fade for w in self.layers.weights if w.fade is not None and not w.fade.skippable]
        for fade in {fade._shared_by: fade for fade in fades}.values():
            cos, sin = halved(*fade(*cos_sin, positions))
            for made, *own in zip(result, cos[:, :, None].unbind(1), sin[:, :, None].unbind(1), strict=True):
                made[fade._shared_by] = own
        return result[::-1]
