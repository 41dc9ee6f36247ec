"""Tables of a report that are folded away, or stand beside figures: slopes, gates, live shares."""

from __future__ import annotations

from typing import Any

from retrofox.reporting.tables import table
from retrofox.support.plots import tokens_label


def slopes_table(loss: dict[str, Any]) -> str:
    """Slope of L(i) of every line, with its interval and the word that the interval allows."""
    rows = []
    for line in loss["lines"]:
        cells: list[str] = [line["label"]]
        for name in ("slope_per_doubling", "late_slope_per_1k"):
            slope = line[name]
            if slope["slope"] is None:
                cells.append("-")
            elif slope["interval"] is None:
                cells.append(f"{slope['slope']:+.4f}")
            else:
                low, high = slope["interval"]
                cells.append(f"{slope['trend']}: {slope['slope']:+.4f} ({low:+.4f} to {high:+.4f})")
        rows.append(cells)
    return table(["", "nats per octave", "nats per 1000 tokens, second half"], rows)


def gates_table(gates: dict[str, Any]) -> str:
    """Per layer: rotary pairs kept, kinds of heads."""
    rows = []
    for layer in gates["layers"]:
        own = [head for head in gates["heads"] if head["layer"] == layer["layer"]]
        cells: list[object] = [layer["layer"], f"{layer['rotary_pairs_kept']}/{layer['rotary_pairs']}"]
        cells += [sum(head["kind"] == kind for head in own) for kind in ("local", "medium", "global")]
        rows.append([*cells, sum(head["dead"] for head in own)])
    header = ["layer", "rotary kept", "local", "between", "global", "dead"]
    return f"<details><summary>Layer by layer</summary>{table(header, rows)}</details>"


def live_share_table(live: dict[str, Any]) -> str:
    """Per length: shares of attention and cache alive, bytes of cache per token, decoding, open heads."""
    rows = [
        [
            tokens_label(row["length"]),
            *(f"{100 * row[name]:.0f} %" for name in ("ops", "cache")),
            f"{row['cache_bytes_per_token']:,.0f} of {row['base_bytes_per_token']:,.0f}",
            f"{row['decode_ms']:.3g} of {row['base_decode_ms']:.3g}",
            len(row["open_heads"]),
        ]
        for row in live["lengths"]
    ]
    header = ["tokens", "attention alive", "cache alive", "cache bytes per token", "decode ms, predicted", "open heads"]
    return table(header, rows)
