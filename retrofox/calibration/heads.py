"""Attention of every head of a converted model, watched while the model runs: distances, copies, maps.

The attention function is listened to and its weights are made again, a block of queries at a time, so that no T x T
matrix exists. A base model is watched in its converted form in mode "original", which gives the base's attention.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrofox.anatomy import attention_mode, inner_model, is_converted
from retrofox.calibration.student import add_decay, hidden_keys, scores
from retrofox.fox_spec import FoxSpec
from retrofox.model import attention as fox
from retrofox.model.forgetting_eager import prune_limit
from retrofox.model.scores import scale_by_position
from retrofox.surgery import apply, make_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64
"""Consecutive queries whose attention exists at one time: (H, 64, keys) float32."""
QUERIES = 1024
"""Queries measured per text and layer, in blocks evenly spread over the text."""
BEYOND = (64, 512, 4096)
"""Distances in tokens beyond which attention mass is counted."""


@dataclass
class Attention:
    """Inputs of one layer's attention for one text: queries (H, T, D), keys (Hkv, T, D), c (H, T) float64.

    c is the running sum of log f, 0 everywhere without gates; `sink` first keys are exempt from decay.
    """

    query: torch.Tensor
    key: torch.Tensor
    c: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sink: int

    @property
    def length(self) -> int:
        return self.query.shape[1]

    def weights(self, start: int, stop: int) -> torch.Tensor:
        """(H, stop - start, stop) float32: attention of the queries start .. stop - 1 over the keys 0 .. stop - 1."""
        logits = scores(self.query[:, start:stop], self.key, self, start)  # type: ignore[arg-type]
        logits = add_decay(logits, self.c[:, :stop], self.sink, start)
        hidden = hidden_keys(start, stop, self.window, logits.device)
        return logits.masked_fill_(hidden, -math.inf).softmax(-1)

    def decay(self, start: int, stop: int) -> torch.Tensor:
        """(H, stop - start, stop) float32: the forget-gate matrix F_ij = exp(c_i - c_j), 0 for keys out of sight."""
        matrix = (self.c[:, start:stop, None] - self.c[:, None, :stop]).float().clamp_(max=0).exp_()
        matrix[..., : self.sink] = 1.0
        return matrix.masked_fill_(hidden_keys(start, stop, self.window, matrix.device), 0.0)


Visit = Callable[[int, Attention], None]


def watchable(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it is converted, else its converted form, which shares its weights.

    Raises:
        ValueError: a family that can't be converted.
    """
    return model if is_converted(model) else apply(model, make_plan(model.config, FoxSpec(gate="none")))


@torch.no_grad()
def watch(model: PreTrainedModel, token_ids: torch.Tensor, visit: Visit, original: bool = False) -> None:
    """Runs one text (1, T) through a converted model and calls visit(layer, attention) in every layer.

    Args:
        original: run it in mode "original", as the base model.
    """

    # It has the original function's name: the mixin refuses to run with any other attention function.
    def fox_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        visit(module.layer_idx, _received(module, query, key, options))
        return fox.fox_attention(module, query, key, value, mask, **options)

    mode = attention_mode(model, "original") if original else contextlib.nullcontext()
    # The interface's own way to override a function for a while; every family looks it up at each call.
    ALL_ATTENTION_FUNCTIONS["fox"] = fox_attention
    try:
        with mode:
            inner_model(model)(input_ids=token_ids, use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS["fox"]


def _received(module: Any, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> Attention:
    gates, window = options["gates"], options.get("sliding_window")
    if module.log_n is not None and module.mode != "original":
        query = scale_by_position(query, module.log_n, gates.position_ids, key.shape[2])
    scaling = options.get("scaling")
    return Attention(
        query=query[0].float(),
        key=key[0].float(),
        c=gates.log_f[0].double().cumsum(0).T,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=options.get("softcap"),
        sink=module.sink_tokens if window is None and module.mode != "original" else 0,
    )


class HeadMass:
    """Where the attention of every head goes, summed over queries: beyond some distances, to the first tokens.

    Attributes:
        prune_eps: with it, also the share of (query, key) pairs that pruning at this eps may skip.
    """

    def __init__(self, first_tokens: int = 1, beyond: Sequence[int] = BEYOND, prune_eps: float | None = None):
        self.first_tokens, self.beyond, self.prune_eps = max(1, first_tokens), tuple(beyond), prune_eps
        self.sums: dict[int, dict[Any, torch.Tensor]] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        found = self.sums.setdefault(layer, {})
        last = max(0, attention.length - BLOCK)
        number = min(max(1, QUERIES // BLOCK), math.ceil(attention.length / BLOCK))
        limit = self._limit(attention)
        for start in sorted({round(last * n / max(1, number - 1)) for n in range(number)}):
            stop = min(start + BLOCK, attention.length)
            self._block(found, attention, start, stop)
            if limit is not None:
                self._pruned(found, attention, limit, start, stop)

    def _block(self, found: dict[Any, torch.Tensor], attention: Attention, start: int, stop: int) -> None:
        weights = attention.weights(start, stop)
        query = torch.arange(start, stop, device=weights.device)
        distance = query[:, None] - torch.arange(stop, device=weights.device)
        first = self.first_tokens
        seen = (query >= first).float()  # a query among the first tokens has nowhere else to look
        _add(found, "first", weights[..., :first].sum(-1) @ seen, seen.sum())
        for tokens in self.beyond:
            far = (distance > tokens) & (torch.arange(stop, device=weights.device) >= first)
            able = far.any(-1).float()  # queries that have such a key
            _add(found, tokens, (weights * far).sum((1, 2)), able.sum())

    def _limit(self, attention: Attention) -> torch.Tensor | None:
        if self.prune_eps is None:
            return None
        q, k = attention.query.transpose(0, 1)[None], attention.key.transpose(0, 1)[None]
        log_eps = math.log(self.prune_eps)
        return prune_limit(q, k, attention.c[None], attention.scaling, attention.softcap, log_eps)[0]

    def _pruned(
        self, found: dict[Any, torch.Tensor], attention: Attention, limit: torch.Tensor, start: int, stop: int
    ) -> None:
        seen = ~hidden_keys(start, stop, attention.window, attention.c.device)
        skipped = (attention.c[:, None, :stop] > limit[:, start:stop, None]) & seen
        skipped[..., : attention.sink] = False
        _add(found, "pruned", skipped.sum((1, 2)).float(), seen.sum().float())

    def heads(self) -> list[dict[str, Any]]:
        """Per layer and head: "first_token_mass", "mass_beyond" by distance, "prune_skips" with a prune_eps.

        A mass is a mean over the queries that have a key so far back, the first tokens left out of all but their own;
        None where no query has one.
        """
        rows = []
        for layer, found in sorted(self.sums.items()):
            shares = {name: (sums[:-1] / sums[-1]).tolist() if sums[-1] else None for name, sums in found.items()}
            for head in range(len(next(iter(found.values()))) - 1):
                value = {name: None if share is None else share[head] for name, share in shares.items()}
                row: dict[str, Any] = {"layer": layer, "head": head, "first_token_mass": value["first"]}
                row["mass_beyond"] = {str(tokens): value[tokens] for tokens in self.beyond}
                if self.prune_eps is not None:
                    row["prune_skips"] = value["pruned"]
                rows.append(row)
        return rows


def _add(found: dict[Any, torch.Tensor], name: Any, sums: torch.Tensor, count: torch.Tensor) -> None:
    """Adds (H,) sums and their count to the (H + 1,) float64 under a name."""
    new = torch.cat((sums, count[None])).double().cpu()
    found[name] = found[name] + new if name in found else new


class Copies:
    """Copy score of every head on a sequence of `size` random tokens that stands twice in a row.

    The mean over tokens t of the second copy of the attention to the token after t's first occurrence: 1 for a perfect
    induction head, about 1 / T for one that looks everywhere alike.

    Source: Olsson et al., "In-context Learning and Induction Heads" (2022), prefix matching score.
    """

    def __init__(self, size: int, start: int):
        self.size, self.start = size, start
        self.sums: dict[int, torch.Tensor] = {}
        self.texts: dict[int, int] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        total = torch.zeros(attention.query.shape[0], dtype=torch.float64)
        first, last = self.start + self.size, self.start + 2 * self.size - 1  # the last has no token after it to find
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            rows = torch.arange(stop - start, device=attention.query.device)
            sought = rows + start - self.size + 1
            total += attention.weights(start, stop)[:, rows, sought].double().sum(-1).cpu()
        self.sums[layer] = self.sums.get(layer, 0.0) + total / (self.size - 1)
        self.texts[layer] = self.texts.get(layer, 0) + 1

    def scores(self) -> list[list[float]]:
        """Copy scores by layer and head, means over the texts."""
        return [(self.sums[layer] / self.texts[layer]).tolist() for layer in sorted(self.sums)]


def repeated_tokens(vocabulary: int, size: int, bos: int | None, seed: int) -> torch.Tensor:
    """(1, T) int64: `size` random tokens twice in a row, after a `bos` token where there is one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (size,), generator=generator)
    start = [] if bos is None else [torch.tensor([bos])]
    return torch.cat([*start, tokens, tokens])[None]


PIXELS = 512


class Maps:
    """Attention and forget-gate matrix of chosen heads, averaged over squares to at most 512 x 512 pixels."""

    def __init__(self, chosen: Sequence[tuple[int, int]]):
        self.chosen = list(chosen)
        self.found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def __call__(self, layer: int, attention: Attention) -> None:
        heads = [head for number, head in self.chosen if number == layer]
        if not heads:
            return
        step = math.ceil(attention.length / PIXELS)
        size = math.ceil(attention.length / step)
        images = {head: {name: torch.zeros(size, size) for name in ("attention", "decay")} for head in heads}
        for row, start in enumerate(range(0, attention.length, step)):
            stop = min(start + step, attention.length)
            for name, matrix in (
                ("attention", attention.weights(start, stop)),
                ("decay", attention.decay(start, stop)),
            ):
                for head in heads:
                    mean = matrix[head].mean(0).cpu()
                    filled = torch.zeros(math.ceil(stop / step) * step)
                    filled[:stop] = mean
                    images[head][name][row, : len(filled) // step] = filled.view(-1, step).mean(-1)
        self.found |= {(layer, head): image for head, image in images.items()}


def together(*visits: Visit) -> Visit:
    """One visit that makes several."""

    def visit(layer: int, attention: Attention) -> None:
        for each in visits:
            each(layer, attention)

    return visit


def copy_scores(
    model: PreTrainedModel, size: int, texts: int = 2, original: bool = False, seed: int = 0
) -> list[list[float]]:
    """Copy scores of a converted model by layer and head, over `texts` sequences of `size` tokens that stand twice."""
    bos = getattr(model.config, "bos_token_id", None)
    copies = Copies(size, 0 if bos is None else 1)
    for number in range(texts):
        ids = repeated_tokens(model.config.vocab_size, size, bos, seed + number)
        watch(model, ids.to(next(model.parameters()).device), copies, original)
    return copies.scores()


def texts_of(windows: Sequence[Any], device: torch.device) -> Iterator[torch.Tensor]:
    """(1, T) int64 on the device, for every window."""
    for window in windows:
        yield torch.from_numpy(window.token_ids)[None].to(device)
