"""Which requests of a step are read by retrofox's operator instead of the engine's attention, and how.

Long pieces of text are read by `forgetting_attention` over the heads' own channels: the new keys where a text begins
in this step, else rows copied out of the text's pages. Single tokens and short pieces attend to the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from fox_kernels import api, arguments, forgetting_attention
from fox_kernels.options import Backend, Documents, Options

PLAIN_ISA = ("vec", "vec16")
"""Kinds of the CPU backend that keep values as rows; others pack them."""
LONG = 32
"""New tokens of a request from which the operator reads them; fewer attend one by one, each to all of the past."""


@dataclass(frozen=True)
class Prefill:
    """One call of the operator: a request that has a past, or requests that begin, one after the other.

    Args:
        request: the first of them.
        edges: where the new tokens of each begin, and where the last one's end.
        past: tokens of the request in the cache before this step.
        cu_seqlens: (requests + 1,) int32, `edges` from 0 on, on the device; None for one request.
        launches: by options and number of rows, the kernel launch that such layers share; see `run_prefill`.
    """

    request: int
    edges: tuple[int, ...]
    past: int
    cu_seqlens: torch.Tensor | None = None
    launches: dict[tuple, Any] = field(default_factory=dict, compare=False)

    @property
    def new(self) -> slice:
        """The new tokens."""
        return slice(self.edges[0], self.edges[-1])


class KeyValueRows(NamedTuple):
    """Tokens of a text: key, value (S, Hkv, D), log_f (S, H) float32."""

    key: torch.Tensor
    value: torch.Tensor
    log_f: torch.Tensor


class Links(NamedTuple):
    """Requests that go on from a token which another request writes in the same step: a prefix they share.

    token: (R,) where in the batch that token is, or -1; request: (R,) whose it is; int64, on the device.
    """

    token: torch.Tensor
    request: torch.Tensor


def plan(starts: list[int], lengths: list[int], least: int) -> tuple[int, list[Prefill]]:
    """(how many of the first requests the engine keeps, prefills of all others).

    The engine puts requests with few new tokens first; all from the first one with `least` on are read by the operator.

    Args:
        starts: where each request's new tokens begin in the batch, and where the last one's end.
        lengths: tokens of each with the new ones.
    """
    spans = list(pairwise(starts))
    kept = next((number for number, (begin, end) in enumerate(spans) if end - begin >= least), len(spans))
    prefills: list[Prefill] = []
    for number, (begin, end) in enumerate(spans[kept:], kept):
        if begin == end:  # padding
            continue
        past = lengths[number] - (end - begin)
        last = prefills[-1] if prefills else None
        if last is not None and last.past == past == 0 and last.request + len(last.edges) - 1 == number:
            prefills[-1] = replace(last, edges=(*last.edges, end))
        else:
            prefills.append(Prefill(number, (begin, end), past))
    return kept, prefills


def owners(starts: list[int]) -> torch.Tensor:
    """(tokens,) int32: the request of each new token, from where each request's begin and where the last one's end."""
    counts = torch.tensor(starts).diff()
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)


def placed(prefill: Prefill, query_start: torch.Tensor) -> Prefill:
    """The prefill with `cu_seqlens` taken from the engine's query_start (R + 1,) int32 on the device."""
    if len(prefill.edges) == 2:
        return prefill
    mine = query_start[prefill.request : prefill.request + len(prefill.edges)]
    return replace(prefill, cu_seqlens=mine - prefill.edges[0])


def find_links(
    query_start: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, page: int
) -> Links:
    """Requests that continue from a token of this very step; reads no value on the host.

    Shapes: query_start (R + 1,), seq_lens (R,), block_table (R, pages) int32; slots (T,) int64, where each new token
    goes: page number * `page` + place in the page, negative for padding.
    """
    past = seq_lens - (query_start[1:] - query_start[:-1])
    last = (past - 1).clamp_min(0).long()
    slot = block_table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    same = (slot[:, None] == slots[None, :]) & (past > 0)[:, None]
    found, token = same.max(1)
    request = torch.searchsorted(query_start[1:].contiguous(), token.to(query_start.dtype), right=True)
    return Links(torch.where(found, token, -1), request.clamp_max(len(past) - 1))


def run_prefill(
    prefill: Prefill, query: torch.Tensor, rows: KeyValueRows, output: torch.Tensor, options: dict[str, Any]
) -> None:
    """Forgetting Attention of `query` (T, H, D), the last of the rows' tokens or texts from their start, into `output`.

    The first layer of a step checks the arguments, chooses the backend and finds where texts begin; the others, whose
    tensors are of the same kind, launch at once. The host takes longer for all this than a GPU for a short text.

    Args:
        output: (T, H, D), contiguous.
        options: scale, window, sink, softcap, horizon of `fox_kernels.forgetting_attention`.
    """
    tensors = [x[None] for x in (query, *rows)]
    kind = (*options.values(), len(rows.key))
    if kind not in prefill.launches:
        prefill.launches[kind] = _kernel_launch(prefill, tensors, options)
    attend = prefill.launches[kind]
    if attend is None:
        output.copy_(forgetting_attention(*tensors, cu_seqlens=prefill.cu_seqlens, **options)[0])
    else:
        attend(*tensors, out=output[None])


def _kernel_launch(prefill: Prefill, tensors: list[torch.Tensor], options: dict[str, Any]) -> Callable | None:
    """`fox_kernels.forward_backward.attend` for tensors of this kind; None where the kernels don't run."""
    query, key, value, log_f = tensors
    documents = Documents(prefill.cu_seqlens)
    given = arguments.check(query, key, value, log_f, Options(**options), documents)
    backend, reason = api.choose(query, key, value, **options)
    api.announce(backend, reason)
    if backend not in ("triton", "gluon"):
        return None
    from fox_kernels.common.edges import edges  # both need Triton
    from fox_kernels.forward_backward import attend

    per_head = backend == "gluon"
    if not per_head or given.horizon is None:  # else they are each layer's own
        window = given.window if per_head else None
        found = edges(1, key.shape[1], *documents[:2], window, query.device)
        documents = documents._replace(edges=found)
    return partial(attend, options=given, documents=documents, way=Backend(backend, False, False))


def run_prefills(
    prefills: list[Prefill],
    query: torch.Tensor,
    new: KeyValueRows,
    past: Callable[[int, int, int], KeyValueRows],
    output: torch.Tensor,
    options: dict[str, Any],
    reach: int | None,
) -> None:
    """`run_prefill` of each into `output`; both it and the query are (T, H, D).

    Args:
        new: the new tokens of the batch.
        past: rows of a request from one of its tokens to another, out of its pages, its sinks before them.
        reach: tokens that a query sees at most; pages before what the first new token sees are another text's by now.
    """
    for prefill in prefills:
        mine, rows = prefill.new, KeyValueRows(*(x[prefill.new] for x in new))
        if prefill.past:
            first = 0 if reach is None else max(0, prefill.past - reach + 1)
            rows = past(prefill.request, first, prefill.past + mine.stop - mine.start)
        run_prefill(prefill, query[mine], rows, output[mine], options)


class Step(NamedTuple):
    """The attribute `fox` of a batch's metadata, beside the backend's own.

    links: None where no request goes on from another's new token; prefills: calls of `forgetting_attention`; tokens:
    how many new tokens come before those of the prefills; owner: (tokens,) int32 on the device, the request of each,
    None where every request has one.
    """

    links: Links | None
    prefills: list[Prefill]
    tokens: int
    owner: torch.Tensor | None


class StepBuilder:
    """Mixin of a backend's metadata builder, which runs once a step for all layers of a kind."""

    paged: ClassVar[bool]
    every: ClassVar[bool]
    isa: str  # on a CPU
    kv_cache_spec: Any
    vllm_config: Any
    device: torch.device
    reorder_batch_threshold: int | None

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any):
        super().__init__(kv_cache_spec, *args, **kwargs)  # type: ignore[call-arg]
        if self.least is not None and self.least > 1:
            self.reorder_batch_threshold = self.least - 1  # shorter ones come first

    @property
    def least(self) -> int | None:
        """New tokens of a request from which `forgetting_attention` reads them; None: the backend reads all."""
        if self.paged:
            return LONG
        return 1 if self.every or self.isa not in PLAIN_ISA else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The backend's metadata of the batch, with a `Step`."""
        common, least = common_attn_metadata, self.least
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        prefills: list[Prefill] = []
        kept, owner = common.num_reqs, None
        if least is not None and common.max_query_len >= least:
            lengths = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
            kept, prefills = plan(starts, lengths[: common.num_reqs].tolist(), least)
        tokens = starts[kept]
        if self.paged and any(end - begin > 1 for begin, end in pairwise(starts[: kept + 1])):
            owner = owners(starts[: kept + 1]).to(self.device, non_blocking=True)
        fast = fast_build or self.paged or bool(prefills)  # plans for the backend's kernels are not needed then
        made = super().build(common_prefix_len, common, fast)  # type: ignore[misc]
        prefills = [placed(prefill, common.query_start_loc) for prefill in prefills]
        made.fox = Step(self._links(common), prefills, tokens, owner)
        return made

    def _links(self, common: Any) -> Links | None:
        """Links, where a request may have found its prefix in pages that this very step fills.

        Where each has one new token, our own kernel looks for it, as a CUDA graph's must.
        """
        looks = self.paged and common.max_query_len == 1
        if looks or common.num_reqs == 1 or not self.vllm_config.cache_config.enable_prefix_caching:
            return None
        return find_links(
            common.query_start_loc[: common.num_reqs + 1],
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor[: common.num_reqs],
            common.slot_mapping,
            self.kv_cache_spec.block_size,
        )
