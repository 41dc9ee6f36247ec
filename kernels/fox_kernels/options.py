"""NamedTuples that the package passes on beside tensors: options, documents, the tensors saved by a forward."""

from typing import Any, NamedTuple

from torch import Tensor

LOG_F_MIN = -1e4  # exp underflows long before; keeps f = 0 (log f = -inf) and its cumulative sum finite


class Options(NamedTuple):
    """Options of `forgetting_attention`, as given or as `arguments.check` returns them; horizon is in nats."""

    scale: float
    window: int | None = None
    sink: int = 0
    softcap: float | None = None
    horizon: float | None = None


class Documents(NamedTuple):
    """Where documents begin: cu_seqlens (N + 1,) packed ones, seq_start (B,) after left padding.

    edges comes from `common.edges.edges` or, for the Hopper kernels with a horizon, from
    `common.horizon.edges_within`; None where it is not known yet. first_seen (B, H, T) comes from
    `common.horizon.first_seen`, None without a horizon.
    """

    cu_seqlens: Tensor | None = None
    seq_start: Tensor | None = None
    edges: Tensor | None = None
    first_seen: Tensor | None = None


SCHEMA = (
    "Tensor? cu_seqlens, Tensor? seq_start, float scale, SymInt? window, SymInt sink, float? softcap, float? horizon"
)
"""Documents' first two fields and all of Options, as torch's operators take them."""

ONE_DOCUMENT = Documents()  # from position 0 on, in every sequence


def given(*, scale: Any = None, cu_seqlens: Any = None, seq_start: Any = None, **options) -> tuple[Options, Documents]:
    """Return the options of `forgetting_attention`, unchecked; raises TypeError for one that it doesn't take."""
    return Options(scale, **options), Documents(cu_seqlens, seq_start)


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward, o (B, T, H, D) among them.

    lse2 (B, H, T) float32 is the base-2 log-sum-exp, c_hi + c_lo (B, H, S) float32 the gates' sums times log2(e).
    residual, like o, is the rounding error of o, None where it isn't needed.
    """

    o: Tensor
    lse2: Tensor
    c_hi: Tensor
    c_lo: Tensor
    residual: Tensor | None = None


class Backend(NamedTuple):
    """How a pass runs: by the "triton" or the "gluon" kernels, for a backward or not, gradients repeatable or not."""

    backend: str
    for_backward: bool
    deterministic: bool
