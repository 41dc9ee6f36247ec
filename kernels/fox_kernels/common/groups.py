"""Groups of kernels' arguments: NamedTuples, which Triton takes and specialises on field by field.

What a problem lacks is None. Alone stay descriptors for copies by TMA, which a launch finds only there, and lengths:
`do_not_specialize` does not reach into groups, and a kernel would be compiled for every kind of length.
"""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Strides of a tensor (B, T, H, D), whose last is 1."""

    batch: int
    token: int
    head: int


class InputStrides(NamedTuple):
    """Strides of the tensors that a kernel reads in place."""

    q: Strides
    k: Strides
    v: Strides | None = None
    o: Strides | None = None
    do: Strides | None = None


class Gates(NamedTuple):
    """c * log2(e) as the sum of two floats: tensors (B, H, S) for a launch, blocks or scalars within a kernel."""

    hi: Any
    lo: Any


class Bounds(NamedTuple):
    """Limits of the keys that queries see, and of the queries that see a key; None where there are none.

    start, end (B, S) int32: of documents and padding, as `common.edges` returns them. first_seen (B, H, T) and
    unseen_from (B, H, S) int32: of a horizon and a window, as `common.horizon` does.
    """

    start: Any = None
    end: Any = None
    first_seen: Any = None
    unseen_from: Any = None


class Scale(NamedTuple):
    """Factors of scores: the scale as given, for gradients, and times log2(e); softcap times log2(e); 2 / softcap."""

    natural: float | None
    base2: float
    softcap2: float | None
    inverse_cap: float | None


class Output(NamedTuple):
    """Outputs of a forward that its backward reads: o, its rounding error (or None), lse2."""

    o: Any
    residual: Any
    lse: Any


class Facts(NamedTuple):
    """Results of `triton.dq` that `triton.dkdv` reads: values by query, by tile of queries, and row sums of ds."""

    rows: Any  # (B, H, 4, T rounded up, so that rows are aligned)
    records: Any  # (B, H, tiles, 2 * queries of a tile + 16)
    row_sums: Any  # (B, H, T)


class Problem(NamedTuple):
    """The constants that a kernel is compiled for, beside its tile."""

    group: int  # query heads to a kv head
    d0: int  # the head dim in two blocks of columns, the second may be 0
    d1: int
    exact_tanh: bool  # `common.blocks.exact_tanh`
    precision: str  # of products, as tl.dot names it
