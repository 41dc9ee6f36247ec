"""What `retrofox panel` prints: a row for each kind of text, and the worst row as headline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from retrofox.support.plots import tokens_label


def worst_row(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The kind and positions where the model's loss exceeds the base's most: {"kind", "from", "to", "mean", ...}."""
    rows = [
        {"kind": kind, "from": span["from"], "to": span["to"], **span["difference"]}
        for kind, found in kinds.items()
        for span in found["spans"]
        if span["tokens"]
    ]
    return max(rows, key=lambda row: row["mean"])


def headline(result: Mapping[str, Any]) -> str:
    """The worst row in a sentence."""
    worst = result["worst"]
    where = f"{worst['kind']} at {tokens_label(worst['from'])}-{tokens_label(worst['to'])}"
    if worst["interval"] is None:
        return f"Worst row: {where}, {worst['mean']:+.3f} nats to the base; one row gives no interval"
    low, high = worst["interval"]
    clear = "" if low > 0 else ", no clear harm"
    return f"Worst row: {where}, {worst['mean']:+.3f} nats to the base ({low:+.3f} to {high:+.3f}){clear}"


def instruction_sentence(found: Mapping[str, Any]) -> str:
    """How alike the answers are, in a sentence."""
    low, high = (100 * end for end in found["same"]["interval"])
    return (
        f"Of {found['prompts']} greedy answers {100 * found['same']['value']:.0f} % are the base's token by token "
        f"({low:.0f} to {high:.0f}); {found['common_prefix']:.1f} of {found['answer_tokens']:.1f} tokens agree before "
        f"the first that differs; the base's answers cost {found['difference']['mean']:+.3f} nats a token more"
        f"{followed_sentence(found['followed'])}"
    )


def followed_sentence(found: Mapping[str, Any] | None) -> str:
    """How many instructions that a program can check are followed."""
    if found is None:
        return ""
    change = found["difference"]
    error = "" if change["standard_error"] is None else f" ± {100 * change['standard_error']:.1f}"
    return (
        f". Of {found['prompts']} checkable instructions the model follows {100 * found['model']:.0f} %, the base "
        f"{100 * found['base']:.0f} % ({100 * change['difference']:+.1f}{error} points, p {change['p']:.2g})"
    )


def print_panel(result: Mapping[str, Any], console: Console) -> None:
    """The headline, the table, the instructions."""
    console.print(headline(result), highlight=False, soft_wrap=True)
    spans = next(iter(result["kinds"].values()))["spans"]
    table = Table(title=f"{result['model']['label']} less {result['base']['label']}, nats per token; 95 % intervals")
    table.add_column("kind")
    table.add_column("tokens", justify="right")
    for span in spans:
        where = f"{tokens_label(span['from'])}-{tokens_label(span['to'])}"
        table.add_column(f"base {where}", justify="right")
        table.add_column(f"difference {where}", justify="right")
    table.add_column("KL", justify="right")
    for kind, found in result["kinds"].items():
        cells = [kind, f"{found['tokens']:,}"]
        for span in found["spans"]:
            cells += [number(span["base"]["mean"]), signed(span["difference"])]
        table.add_row(*cells, number(found["kl"]["mean"]))
    console.print(table)
    if result["instructions"] is not None:
        console.print(instruction_sentence(result["instructions"]), highlight=False, soft_wrap=True)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def signed(value: Mapping[str, Any]) -> str:
    """A difference with its interval; "-" where there is no token."""
    if value["mean"] is None:
        return "-"
    if value["interval"] is None:
        return f"{value['mean']:+.3f}"
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(value["mean"], *value["interval"])
