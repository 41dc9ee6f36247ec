"""The names of baselines. Importing it imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

FORMS = "pi:4, ntk:4, yarn:4 (factor), drope"
SCALED = {"pi": ("linear", "position interpolation"), "ntk": ("dynamic", "dynamic NTK"), "yarn": ("yarn", "YaRN")}
"""Kind -> (transformers' rope_type, name in tables)."""


@dataclass(frozen=True)
class Baseline:
    """One baseline, as parsed: `text` is its canonical spelling, `label` its suffix to the base's name."""

    kind: str
    factor: float | None = None

    @property
    def text(self) -> str:
        return self.kind if self.factor is None else f"{self.kind}:{self.factor:.12g}"

    @property
    def label(self) -> str:
        return f"{SCALED[self.kind][1]} x{self.factor:g}" if self.kind in SCALED else "no RoPE"


def parse(text: str) -> Baseline:
    """Reads "yarn:4" or "drope"; raises ValueError that lists the forms."""
    kind, _, rest = text.strip().partition(":")
    if kind in SCALED and re.fullmatch(r"[0-9]+(\.[0-9]+)?", rest) and 1 < float(rest) < 1e6:
        return Baseline(kind, float(rest))
    if text.strip() == "drope":
        return Baseline("drope")
    near = difflib.get_close_matches(kind, (*SCALED, "drope"), n=1)
    hint = f" (did you mean {near[0]}?)" if near and near[0] != kind else ""
    raise ValueError(f"baseline {text!r} is none{hint}; forms: {FORMS}, factors above 1")


def parse_all(baselines: Sequence[str | Baseline]) -> list[Baseline]:
    """Every baseline parsed, each once; raises ValueError for one that is misspelt."""
    parsed = [parse(baseline) if isinstance(baseline, str) else baseline for baseline in baselines]
    return list(dict.fromkeys(parsed))
