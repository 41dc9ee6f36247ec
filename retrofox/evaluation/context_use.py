"""How much context a model uses: the trend of L(i), and the loss with the last k tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from retrofox.data.windows import Window
from retrofox.evaluation.bootstrap import Bootstrap
from retrofox.evaluation.readings import Reading, read
from retrofox.support.plots import tokens_label

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STRETCHES = 8
"""Stretches of every window whose tokens are read again with less context, evenly spaced over its second half."""
SHORTEST = 16
AUTOMATIC = 8
"""Contexts that "auto" chooses: half of the length, a quarter, ..."""


def short_contexts(asked: str | Sequence[int | str], length: int) -> list[int]:
    """The contexts in tokens to read with, ascending: "auto", or the numbers given.

    Raises:
        ValueError: a context that is no number, shorter than 16 tokens or longer than half of `length`.
    """
    values = [asked] if isinstance(asked, str) else list(asked)
    if values == ["auto"]:
        chosen = [length >> n for n in range(1, AUTOMATIC + 1) if length >> n >= SHORTEST]
    else:
        try:
            chosen = [int(value) for value in values]
        except ValueError:
            raise ValueError(f"short_context must be auto or numbers of tokens, got {values}") from None
    wrong = [k for k in chosen if not SHORTEST <= k <= length // 2]
    if wrong or (values and not chosen):
        raise ValueError(
            f"short_context must lie between {SHORTEST} tokens and half the length, {length // 2}; got "
            f"{', '.join(map(str, wrong or values))}"
        )
    return sorted(set(chosen))


class ShortContexts:
    """The same tokens of every window, to be read with the last k tokens before them for every k.

    The tokens lie in stretches of m = (shortest k) / 8, at least one, in the second half of a window and no nearer to
    its start than the longest k. A stretch costs one forward pass of k + m tokens, so its tokens see k to k + m.

    Raises:
        ValueError: no window is long enough.
    """

    def __init__(self, contexts: Sequence[int], windows: Sequence[Window]):
        self.contexts = list(contexts)
        self.size = max(1, min(contexts) // 8)
        self.windows = windows
        self.stretches = [self._starts(len(window.token_ids)) for window in windows]
        if not any(self.stretches):
            raise ValueError(
                f"no document has the {max(contexts) + self.size} tokens that short_context {max(contexts)} needs: the "
                f"longest has {max(len(w.token_ids) for w in windows)}"
            )

    def _starts(self, length: int) -> list[int]:
        first, last = max(max(self.contexts), length // 2), length - self.size
        return sorted(set(np.linspace(first, last, STRETCHES).astype(int).tolist())) if first <= last else []

    @property
    def tokens(self) -> int:
        """Tokens that all the passes of one model read."""
        return sum(reading.needed for k in self.contexts for reading in self._readings(k))

    def _readings(self, context: int) -> list[Reading]:
        ranges = [
            (window, start) for window, starts in zip(self.windows, self.stretches, strict=True) for start in starts
        ]
        inside = np.arange(context, context + self.size)
        return [Reading(w.token_ids[s - context : s + self.size], inside, w.name) for w, s in ranges]

    def measure(
        self,
        model: PreTrainedModel,
        losses: Sequence[np.ndarray],
        batch: int = 1,
        advance: Callable[[int], Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Per context k: {"tokens": k, "loss", "excess"}, each of the latter {"mean", "interval"}.

        "excess" is the loss given the last k tokens less that given all, paired by token, its interval bootstrapped
        over documents. Shorter contexts run in larger batches, of as many tokens.

        Args:
            losses: L(i) of every window with all its context, as `window_losses` returns them.
        """
        documents = sorted({window.document for window in self.windows})
        row = {document: n for n, document in enumerate(documents)}
        full = [
            float(loss[start - 1 : start - 1 + self.size].sum())
            for loss, starts in zip(losses, self.stretches, strict=True)
            for start in starts
        ]
        owners = [row[w.document] for w, starts in zip(self.windows, self.stretches, strict=True) for _ in starts]
        draws, table = Bootstrap(len(documents)), []
        for context in self.contexts:
            together = max(1, batch * max(self.contexts) // context)
            sums, whole, counts = (np.zeros(len(documents)) for _ in range(3))
            for owner, all_of_it, (loss, _) in zip(
                owners, full, read(model, self._readings(context), together, advance), strict=True
            ):
                sums[owner] += float(loss.sum(dtype=np.float64))
                whole[owner] += all_of_it
                counts[owner] += self.size
            loss, excess = draws.ratio(sums, counts), draws.ratio(sums - whole, counts)
            table.append({"tokens": context, "loss": loss, "excess": excess})
        return table


def trends(result: dict[str, Any]) -> list[str]:
    """Per line whether L(i) falls, rises or stays flat, which only an interval can tell, and how much context it uses.

    "flat" means that the interval covers 0, not that the slope is 0.
    """
    sentences = []
    start, end = max(8, result["longest"] // 64), result["longest"]
    if all(line["slope_per_doubling"]["interval"] is None for line in result["lines"]):
        alone = any(line["slope_per_doubling"]["slope"] is not None for line in result["lines"])
        reach = "only one document reaches, which gives no interval" if alone else "no document reaches"
        sentences.append(f"beyond position {start} {reach}, so no trend of the loss is named")
    for line in result["lines"]:
        octave, late = line["slope_per_doubling"], line["late_slope_per_1k"]
        if octave["interval"] is None:
            continue
        text = f"{line['label']}: the loss is {_named(octave)} per octave over positions {start} to {end}"
        if late["interval"] is not None:
            text += f", {_named(late)} per 1000 tokens over the second half"
        sentences.append(text)
    return sentences + [
        use_of_context(line["label"], line["short_context"]) for line in result["lines"] if line.get("short_context")
    ]


def _named(slope: dict[str, Any]) -> str:
    low, high = slope["interval"]
    return f"{slope['trend']} ({slope['slope']:+.4f} nats, {low:+.4f} to {high:+.4f})"


def use_of_context(label: str, table: Sequence[dict[str, Any]]) -> str:
    """Where a model stops using more context, as far as the intervals tell."""
    known = [row for row in table if row["excess"]["interval"] is not None]
    if not known:
        return f"{label}: how much context it uses has no interval, since only one document is long enough"
    harmed = [row for row in known if row["excess"]["interval"][1] < 0]
    used = [row for row in known if row["excess"]["interval"][0] > 0]
    if harmed:
        row = min(harmed, key=lambda r: r["loss"]["mean"])
        return (
            f"{label} is harmed by long context: with the last {tokens_label(row['tokens'])} tokens only, its loss is "
            f"lower by {-row['excess']['mean']:.4f} nats ({_interval(row['excess'], -1)})"
        )
    if not used:
        return f"{label} gains nothing clear from more than the last {tokens_label(known[0]['tokens'])} tokens"
    row = used[-1]
    gain = f"beyond the last {tokens_label(row['tokens'])} tokens lies {row['excess']['mean']:.4f} nats "
    gain += f"({_interval(row['excess'])})"
    longer = [other["tokens"] for other in known if other["tokens"] > row["tokens"]]
    end = f"and nothing clear beyond {tokens_label(longer[0])}" if longer else "the longest context asked for"
    return f"{label} uses its context: {gain}, {end}"


def _interval(value: dict[str, Any], sign: int = 1) -> str:
    low, high = sorted(sign * end for end in value["interval"])
    return f"{low:.4f} to {high:.4f}"


def perplexities(mean_loss: np.ndarray) -> np.ndarray:
    """P(l) = exp((1 / l) sum_{i=1..l} L(i)) for l = 1 .. T - 1, of the mean losses L(i) (T - 1,) at every position.

    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), section 4.2: it falls for as long as L(i) is below the
    mean of what came before, so a falling P(l) is no sign that more context helps; L(i) tells.
    """
    return np.exp(np.cumsum(mean_loss, dtype=np.float64) / np.arange(1, len(mean_loss) + 1))
