"""The control of recall: reads the same tokens again after the words that they repeat were cut from the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrofox.evaluation.readings import Reading
from retrofox.evaluation.repeats import Repeats

PASSES = 4
"""Forward passes per text: a token's source is cut in one of them and whole in another."""
MOST_CUT = 1 / 16
"""Share of a text that one pass may cut: the rest must stay the same text for all the other tokens."""
MOST_EARLIER = 8
"""A token whose n-gram stands there more often before is left out: a turn of phrase that takes no memory."""
GUARD = 32
"""Tokens just before a measured token that no cut made for another token may touch."""


@dataclass(frozen=True)
class Control:
    """Two readings of the same sampled tokens of one text, each spread over PASSES cut versions of it.

    Attributes:
        positions: (P,) int64, the sampled tokens, by their positions in the whole text.
        readings: one per pass: the text with that pass's spans cut out.
        cut: (P,) pairs (pass, index into that reading's positions) where the token's source is cut.
        other: (P,) pairs where the source is whole and other spans are cut.
    """

    positions: np.ndarray
    readings: list[Reading]
    cut: np.ndarray
    other: np.ndarray


class _Pass:
    """Spans that are cut from one version of a text, and tokens that must stay in it."""

    def __init__(self, length: int):
        self.cut, self.kept = np.zeros(length, bool), np.zeros(length, bool)

    def fits(self, spans: np.ndarray, guard: np.ndarray) -> bool:
        if (self.cut | spans).sum() > MOST_CUT * len(self.cut):
            return False
        return not (self.kept & spans).any() and not (self.cut & guard).any()

    def take(self, spans: np.ndarray, guard: np.ndarray) -> None:
        self.cut |= spans
        self.kept |= guard


def plan_control(
    token_ids: np.ndarray,
    repeats: Repeats,
    octaves: list[np.ndarray],
    targets: int,
    draw: np.random.Generator,
    name: str = "",
) -> Control:
    """Samples tokens of a text and lays out the versions of the text that they are read in.

    For a sampled token every earlier occurrence of its n-gram is deleted from the text, the copy of the token itself
    included; the tokens after a cut move up. One forward pass serves many tokens: it cuts the spans of a quarter of
    them, as long as they leave each other's last GUARD tokens alone and no more than MOST_CUT of the text goes. What
    the cuts do to a text as such shows in the same tokens read in a pass that cuts other spans and leaves theirs whole;
    a token without such a pass is not used.

    Args:
        octaves: positions that may be sampled, octave by octave of their distance.
        targets: most tokens sampled per octave.
    """
    length = len(token_ids)
    passes = [_Pass(length) for _ in range(PASSES)]
    placed: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    for position in _in_turn(octaves, repeats, targets, draw):
        spans = _mask(length, repeats.earlier(position))
        whole = _mask(length, [(min(int(repeats.start[position]), position - GUARD), position)])
        for number in sorted(range(PASSES), key=lambda p: int(passes[p].cut.sum())):
            if passes[number].fits(spans, whole & ~spans):
                passes[number].take(spans, whole & ~spans)
                placed.append((position, number, spans, whole))
                break
    kept = []
    for position, number, spans, whole in sorted(placed, key=lambda found: found[0]):
        others = [p for p in range(PASSES) if p != number and not (passes[p].cut & (spans | whole)).any()]
        if others:
            kept.append((position, number, others[int(draw.integers(len(others)))]))
    return _laid_out(token_ids, passes, kept, name)


def _in_turn(octaves: list[np.ndarray], repeats: Repeats, targets: int, draw: np.random.Generator) -> list[int]:
    """Up to `targets` positions of every octave in random order, one octave after the other in turn.

    Left out: n-grams that overlap their own source, and turns of phrase.
    """
    able = (repeats.previous < repeats.start) & (repeats.times <= MOST_EARLIER)
    drawn = [draw.permutation(positions[able[positions]])[:targets].tolist() for positions in octaves]
    return [chosen[turn] for turn in range(targets) for chosen in drawn if turn < len(chosen)]


def _mask(length: int, spans: list[tuple[int, int]]) -> np.ndarray:
    mask = np.zeros(length, bool)
    for first, last in spans:
        mask[max(0, first) : last + 1] = True
    return mask


def _laid_out(token_ids: np.ndarray, passes: list[_Pass], kept: list[tuple[int, int, int]], name: str) -> Control:
    readings, place = [], {}
    for number, version in enumerate(passes):
        here = sorted({position for position, *used in kept if number in used})
        place |= {(number, position): index for index, position in enumerate(here)}
        moved = np.cumsum(~version.cut) - 1  # where a token that stays stands after the cuts
        readings.append(Reading(token_ids[~version.cut], moved[np.array(here, np.int64)], name))
    pairs = np.array([[(p, place[p, position]) for p in used] for position, *used in kept], np.int64).reshape(-1, 2, 2)
    return Control(np.array([position for position, *_ in kept], np.int64), readings, pairs[:, 0], pairs[:, 1])
