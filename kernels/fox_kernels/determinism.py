"""Whether gradients must be the same bit for bit in every run. They are, unless this is switched off.

Only the Hopper backward has a choice: it adds the parts of dq in the order of the keys, or as they come, which is
faster and differs in the last bits from run to run. The switch is the process's (autograd runs backwards in threads of
its own): it is read when a forward runs, and that forward's backward follows it. torch.compile compiles anew when it
changes. While torch.use_deterministic_algorithms(True) is in force, it has no effect.
"""

import contextlib
from collections.abc import Iterator

import torch

_deterministic = True


def set_deterministic(value: bool) -> None:
    """Say whether gradients of forwards from here on are bit-for-bit repeatable (the default) or as fast as can be."""
    global _deterministic
    _deterministic = bool(value)


@contextlib.contextmanager
def deterministic(value: bool = True) -> Iterator[None]:
    """`set_deterministic` for the forwards inside a with block; their backwards may run after it."""
    before = _deterministic
    set_deterministic(value)
    try:
        yield
    finally:
        set_deterministic(before)


def is_deterministic() -> bool:
    """Return whether the gradients of a forward that runs now will be bit-for-bit repeatable."""
    return _deterministic or torch.are_deterministic_algorithms_enabled()
