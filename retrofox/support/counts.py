"""Token counts as people write them: 65536, 6.5e6, "64K", "512Ki", "20M", "1.5B"; bytes as they read them.

Importing it imports no torch.
"""

from __future__ import annotations

import re

SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
"""Suffix in lower case -> its factor; either case is read."""
PATTERN = r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*((?:[kKmMgG][iI]|[kKmMbBtT])?)\s*"
"""The form of a count, as a regular expression (also of the recipes' JSON schema)."""
ALLOWED = (
    "a number of tokens, whole, such as 65536, 20M or 512Ki (suffixes K, M, B, T: powers of 1000; Ki, Mi, Gi: of 1024)"
)


def parse_count(value: object) -> object:
    """A whole number from 65536, 6.5e6, "64K", "512Ki", "20M", "1.5B"; anything else is returned untouched."""
    match = re.fullmatch(PATTERN, value) if isinstance(value, str) else None
    number = value if match is None else float(match[1]) * SUFFIXES.get(match[2].lower(), 1)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten: "16.1 GB", "1.23 GB", "35.2 MB", "7 kB", "12 bytes"."""
    if nbytes >= 1e8:
        return f"{nbytes / 1e9:.{1 if nbytes >= 1e10 else 2}f} GB"
    if nbytes >= 1e5:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e3:.0f} kB" if nbytes >= 1e3 else f"{nbytes:.0f} bytes"


def require_at_least(least: int, **values: int | None) -> None:
    """Raises ValueError that names the first value below `least`, or of 2^31 and more; None stands for no limit."""
    for name, value in values.items():
        if value is not None and not least <= value < 2**31:
            raise ValueError(f"{name} must be at least {least} and below 2^31, got {value}")
