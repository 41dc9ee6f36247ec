"""The guard against divergence, and the way back from it."""

from __future__ import annotations

import math
from pathlib import Path

from retrofox.training import checkpoint


class Guard:
    """Stops a run whose loss turned NaN or jumped: loss > factor * running mean + 1 nat.

    State: the running mean of logged losses (decay 0.9), saved with every checkpoint.

    Args:
        root: where the stage's checkpoints lie, for the way back.
    """

    def __init__(self, factor: float, root: Path):
        self.factor, self.root = factor, root
        self.mean: float | None = None

    def check(self, loss: float, grad_norm: float | None, step: int) -> None:
        """Takes the loss into the running mean; raises ValueError where it is no number, or has jumped."""
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            found = f"loss {loss}, gradient norm {grad_norm}: not finite"
        elif self.factor and self.mean is not None and loss > self.factor * self.mean + 1.0:
            found = f"loss {loss:.3f} jumped from a running mean of {self.mean:.3f}"
        else:
            self.mean = loss if self.mean is None else 0.9 * self.mean + 0.1 * loss
            return
        good, _ = checkpoint.newest_good(self.root)
        stands = f"{good} stands (delete it if it is spoilt, too)" if good else "There is no checkpoint yet"
        raise ValueError(
            f"step {step}: {found}. {stands}: run again after lowering learning_rate (gate rates first), raising "
            "warmup_tokens or lowering clip; a spike that you trust to pass: raise spike_factor"
        )
