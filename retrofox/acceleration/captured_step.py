"""One decoding step over a cache whose length lives on the device, captured as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from retrofox.acceleration.fused_decoder_layer import ALONE, fused_layers
from retrofox.acceleration.growing_cache import CACHE, GrowingLayer
from retrofox.acceleration.static_cache import LEAST_CAPACITY, SHIFT_EVERY, DeviceLengths, FixedLayer, SharedLength

logger = logging.get_logger(__name__)
_streams: dict[torch.device, Any] = {}


def reads_for(tokens: int) -> int:
    """Tokens that a step reads of a cache with up to this many: a power of two."""
    return max(LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


class Decoding:
    """A model's decoding step over a cache of fixed buffers; inside `with`, the cache's layers are FixedLayers.

    Attributes:
        end: tokens of the text so far; the cache gets back all but the last of them.
        running: the cache of a step.
        how: how the steps ran.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        total: int,
    ):
        self.model, self.cache, self.running, self.end = model, cache, cache, ids.shape[1]
        self.fed, self.capacity = ids.shape[1] - 1, total  # tokens in the cache; the most there can be
        self.no_mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=ids.device)
        self.seq_start = None if mask is None or bool(mask.all()) else (~mask.bool()).cumprod(1).sum(1).to(torch.int32)
        next_position = torch.full_like(ids[:, -1:], self.fed) if positions is None else positions[:, -1:] + 1
        self.positions = next_position.expand(ids.shape[0], 1).clone()
        self.tokens = ids[:, -1:].clone()
        self.graph: Any = None
        self.captures = ids.is_cuda
        self.warm = False
        self.how = "a captured step" if self.captures else "the step of a captured graph, uncaptured on a CPU"

    def __enter__(self) -> Decoding:
        attentions = [layer.self_attn for layer in self.model.get_decoder().layers]
        self.by_window: dict[int | None, SharedLength] = {}
        self.sources, self.windows = list(self.cache.layers), {}
        assert self.cache.get_seq_length() == self.fed, "the first token's loop has filled the cache"
        fixed = []
        self.lengths = DeviceLengths(len(self.sources), self.fed, self.tokens.device)
        for source, attention in zip(self.sources, attentions, strict=True):
            window = None if isinstance(source, GrowingLayer) else source.sliding_window
            held = source.keys.shape[2]
            if window not in self.by_window:
                self.by_window[window] = SharedLength(self.lengths, held, self.fed - held, self.seq_start)
            length, capacity = self.by_window[window], min(self.capacity, reads_for(self.fed + 1))
            if window is not None:
                capacity = self.windows[window] = min(self.capacity, window + 2 + max(SHIFT_EVERY, window // 4))
            layer = FixedLayer(source, length, capacity, attention.head_dim)
            fixed.append(layer)
        self.cache.layers[:] = fixed
        self._see()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.tokens.is_cuda:  # its stream: a wait for the whole device would break into another thread's capture
            torch.cuda.current_stream(self.tokens.device).synchronize()
        self.graph = None
        self.cache.layers[:] = [layer.returned(self.end - 1) for layer in self.running.layers]

    def _see(self) -> None:
        """Sets how much of the buffers a step reads."""
        for window, length in self.by_window.items():
            capacities = [layer.capacity for layer in self.cache.layers if layer.length is length]
            length.reads = min(self.windows[window] if window else reads_for(length.tokens + 1), *capacities)

    def _make_room(self) -> None:
        """Before a step: makes room for one more token in the buffers, and in the part of them that is read."""
        for window, length in self.by_window.items():
            if length.tokens < length.reads:
                continue
            layers = [layer for layer in self.cache.layers if layer.length is length]
            if window is None:
                self.graph, self.warm = None, False
                for layer in layers:
                    layer.grow(min(self.capacity, reads_for(length.tokens + 1)))
                self._see()
            else:
                left = length.tokens - (window + 1)  # one more than it shows: a step may be taken back
                for layer in layers:
                    layer.shift(left)
                length.shift(left)

    def step(self, sampler: Any) -> None:
        """Decodes one token, which a `cuda_graph_decoding.Sampler` chooses."""
        self._make_room()
        if self.graph is None and self.warm and self.captures:
            self._capture(sampler)
        if self.graph is not None:
            self.graph.replay()
        else:
            with _beside(self.tokens.device) if self.captures else contextlib.nullcontext():
                self._run(sampler)
            self.warm = True
        if not sampler.captures:
            sampler.from_host(self.logits)
        self.fed += 1
        for length in self.by_window.values():
            length.tokens += 1

    def _run(self, sampler: Any) -> None:
        with fused_layers(self.model):
            output = self.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                attention_mask=self.no_mask,
                use_cache=True,
                return_dict=True,
                **{CACHE: self.running},
            )
        self.logits = output.logits[:, -1].float()
        self.positions.add_(1)
        self.lengths.advance()
        if sampler.captures:
            sampler.on_device(self.logits)

    def _capture(self, sampler: Any) -> None:
        """Records a step; where that fails, steps go on uncaptured, and a warning says why."""
        collects = gc.isenabled()
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        with _beside(self.tokens.device):
            torch.cuda.synchronize(self.tokens.device)
            gc.disable()  # a graph or an event freed in between would end the capture
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._run(sampler)
                except Exception as error:  # whatever in a model's forward can't be recorded
                    failure = error
                graph.capture_end()
            except Exception as error:
                failure = failure or error
            finally:
                if collects:
                    gc.enable()
        if failure is None:
            self.graph = graph
            return
        self.captures = False
        first_line = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        self.how = f"uncaptured steps: {first_line}"
        logger.warning_once("a decoding step of this model can't be captured and runs uncaptured: %s", first_line)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Runs the block on a side stream: a capture needs one, and each kernel must have run there once before.

    One thread at a time: launches of another would become part of the capture.
    """
    with ALONE:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)
