"""What the benchmark measures, in the order in which it matters: problems, contenders, stages."""

import re
from typing import NamedTuple

DENSE = ("ours", "plain Triton", "official", "fla", "FlashAttention-2, no gate", "cuDNN, no gate")
HORIZON = "ours, horizon 16"
SPARSE = (HORIZON, "official, pruned")
OURS = ("ours", HORIZON, "plain Triton")
CONTENDERS = (*DENSE, *SPARSE)
OUTPUTS = ("o", "dq", "dk", "dv", "dlog_f")
GATES = ("open", "mixed", "short")


class Problem(NamedTuple):
    """B x T tokens, H query heads on Hkv kv heads of D channels, with a kind of gates, packed in documents or not."""

    B: int
    T: int
    H: int
    Hkv: int
    D: int
    gates: str = "short"
    document: int = 0

    @property
    def name(self) -> str:
        packed = f", documents of {self.document}" if self.document else ""
        return f"{self.B},{self.T},{self.H},{self.Hkv},{self.D} {self.gates}{packed}"

    @property
    def forward_flops(self) -> float:
        """4 B H D times the pairs of a causal triangle, T T / 2; of packed documents, one triangle each."""
        return 2.0 * self.B * self.H * self.T * (self.document or self.T) * self.D


class Decode(NamedTuple):
    """One new token for each of `batch` sequences, 32 heads on 8 of 128 channels, against a cache of `T` keys."""

    batch: int
    T: int
    gates: str = "open"
    H: int = 32
    Hkv: int = 8
    D: int = 128

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.T} {self.gates}{'' if self.gates == 'open' else ', horizon 16'}"


class Task(NamedTuple):
    """One problem of a stage and who is measured on it, side by side."""

    stage: str
    problem: Problem | Decode
    contenders: tuple[str, ...]

    def label(self, contender: str) -> str:
        return f"{self.stage} {self.problem.name} | {contender}"


TABLE = (
    Problem(2, 8192, 16, 16, 64),
    Problem(2, 8192, 16, 16, 128),
    Problem(8, 2048, 16, 16, 64),
    Problem(1, 32768, 16, 16, 64),
    Problem(1, 32768, 16, 16, 128),
    Problem(1, 16384, 32, 8, 128),
)
DECODE = (
    *(Decode(batch, cache) for cache in (32768, 131072, 4096, 16384) for batch in (1, 16)),
    *(Decode(batch, cache, "mixed") for cache in (131072, 32768) for batch in (1, 16)),
)


def tasks(official: bool, fla: bool) -> list[Task]:
    """Return the whole plan; without the file or the package of a peer, without that peer."""
    ungated = ("FlashAttention-2, no gate", "cuDNN, no gate")
    plan = [Task("table", p, CONTENDERS) for p in TABLE]
    plan += [Task("decode", p, ("ours",)) for p in DECODE]
    compared = ("ours", "plain Triton", "official", "fla")
    plan += [Task("errors", Problem(1, 4096, 16, 16, D, gates), compared) for D in (64, 128) for gates in GATES]
    plan += [Task("extras", p._replace(gates="open"), OURS) for p in TABLE]
    plan += [Task("extras", Problem(2, 8192, 16, 16, D), ("ours", "plain Triton", "fla", *ungated)) for D in (80, 96)]
    plan += [Task("extras", Problem(2, 8192, 8, 8, 256), ("ours", "plain Triton", "fla", *ungated))]
    plan += [Task("extras", Problem(1, 16384, 16, 16, D, document=2048), (*OURS, "fla")) for D in (64, 128)]
    plan += [Task("extras", p._replace(gates="mixed"), ("ours", *SPARSE, "official")) for p in TABLE[:2]]
    missing = {n for n in CONTENDERS if (n.startswith("official") and not official) or (n == "fla" and not fla)}
    return [t._replace(contenders=tuple(n for n in t.contenders if n not in missing)) for t in plan]


def select(plan: list[Task], only: list[str]) -> list[Task]:
    """Return the part of a plan whose labels match every pattern of `only`.

    Raises ValueError for a pattern that is no regular expression and for a selection that leaves nothing.
    """
    try:
        patterns = [re.compile(text) for text in only]
    except re.error as error:
        raise ValueError(f"--only takes regular expressions, and one of {only} is none: {error}") from None
    chosen = []
    for task in plan:
        names = tuple(n for n in task.contenders if all(x.search(task.label(n)) for x in patterns))
        if names:
            chosen.append(task._replace(contenders=names))
    if not chosen:
        example = plan[0].label(plan[0].contenders[0])
        raise ValueError(f"--only {only} matches nothing; it is searched in labels like {example!r}")
    return chosen
