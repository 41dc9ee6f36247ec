"""Cache eviction without training (see `eviction.py`) beside a horizon: needles and loss at each share of the cache.

    python benchmarks/cache_methods.py BASE BASE+yarn:8 YARN-TRAINED HORIZON --haystack essays.jsonl \\
        --lengths 8192,32768 --ratios 1,.5,.3,.2,.1 [--prompts 100] [--texts 16] [--seconds 500] --out X.json

MODEL+yarn:8 is that model with YaRN, untrained. Prompts are those of `retrofox needle`. A plain model prefills the text
without the question, keeps `ratio` of each kv head's keys, and reads question and answer with those alone, as kvpress
does; with --aware the question is prefilled, too, so that SnapKV sees it. The loss is of the last 512 tokens of a
stretch, read after the rest was prefilled and evicted; `difference` is paired with the same model's dense loss. A
converted model is one row: its ratio is the share of the cache that its gates leave at its horizon after that many
tokens. --fp8 rounds the cache to float8_e4m3: half the bytes at the same ratio. Prints a table, writes JSON and a
figure (X.png, X.svg) of the longest length; --add puts rows of earlier files into the figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eviction import METHODS, Evicting, round_to_fp8
from provenance import out_file, provenance

from retrofox.data.windows import Window
from retrofox.evaluation.live_share import measure_live_share
from retrofox.evaluation.needle_prompts import EncodedTask, Haystack, Prompt, make_prompts, read_haystack
from retrofox.evaluation.statistics import mean_over_documents, wilson_interval
from retrofox.evaluation.token_scores import Scored, score_tokens
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.rope_scaling import set_rope
from retrofox.support.plots import COLOURS, STYLE, save_figure, tokens_label

TAIL = 512
"""Tokens at a stretch's end whose loss is measured."""
CALIBRATION, HEADS_FROM = 16, 4096
"""Prompts, and tokens of each at most, that say which heads retrieve."""
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
Hits = dict[tuple[str, float], list[Any]]


def stretches(hay: Haystack, length: int, count: int) -> list[np.ndarray]:
    """`count` stretches of `length` tokens, evenly spaced."""
    return [hay.stretch(length, number / count).astype(np.int64) for number in range(count)]


def cells(methods: Sequence[str], ratios: Sequence[float]) -> Iterator[tuple[str, float]]:
    yield "dense", 1.0
    yield from ((method, ratio) for method in methods for ratio in ratios if ratio < 1)


class Plain:
    """A plain model under eviction."""

    def __init__(self, opened: LoadedModel, arguments: argparse.Namespace, hay: Haystack):
        kinds = set(getattr(opened.model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"{opened.name} has layers of {', '.join(sorted(kinds))}: only full attention is measured")
        self.opened, self.arguments, self.hay = opened, arguments, hay
        self.evicting = Evicting(opened.model)
        self.heads: torch.Tensor | None = None

    def split(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are prefilled before anything is evicted."""
        question = 1 if self.arguments.aware else len(EncodedTask(self.hay, prompt.task).question)
        return prompt.length - question

    def retrieval_heads(self) -> torch.Tensor:
        """(layers, Hkv): attention from the tokens that predict an answer to the needle's own answer."""
        length = min(HEADS_FROM, *self.arguments.lengths)
        prompts = make_prompts(self.hay, ["easy"], [length], [0.2, 0.4, 0.6, 0.8], CALIBRATION // 4, seed=1000)
        found = []
        for prompt in prompts:
            cut, answer = self.split(prompt), prompt.answer
            whole = prompt.scored.token_ids.tolist()
            at = next((n for n in range(cut) if whole[n : n + len(answer)] == answer), None)
            if at is not None:
                ids = torch.tensor(whole, device=self.opened.device)
                cache = self.evicting.prefill(ids[:cut], scored=False)
                rows = slice(prompt.length - cut - 1, len(whole) - cut - 1)
                found.append(self.evicting.attention_to(ids[cut:], cache, rows, slice(at, at + len(answer))))
        if not found:
            raise ValueError("no needle's answer is found in its prompt by its tokens: retrieval heads can't be told")
        return torch.stack(found).mean(0)

    def run(self, ids: np.ndarray, cut: int) -> Iterator[tuple[tuple[str, float], torch.Tensor, float]]:
        """By method and ratio: logits after each token from `cut` on, and the share of keys kept."""
        whole = torch.from_numpy(ids.astype(np.int64)).to(self.opened.device)
        cache = self.evicting.prefill(whole[:cut])
        if self.arguments.fp8:
            round_to_fp8(cache)
        for method, ratio in cells(self.arguments.methods, self.arguments.ratios):
            keep = None if method == "dense" else self.evicting.kept(method, ratio, self.heads)
            share = 1.0 if keep is None else float(torch.stack(keep).float().mean())
            yield (method, ratio), self.evicting.tail(whole[cut:], cache, keep), share

    def measure(self, prompts: list[Prompt], texts: list[np.ndarray], until: float) -> tuple[Hits, Hits, Hits]:
        """By method and ratio: whether each needle was found, the loss of each text, shares of keys kept."""
        found, losses, shares = Hits(), Hits(), Hits()
        with self.evicting.installed():
            if self.heads is None and "duo" in self.arguments.methods:
                self.heads = self.retrieval_heads()
            for text in texts:
                tail = min(TAIL, len(text) // 4)
                for cell, logits, share in self.run(text, len(text) - tail):
                    target = torch.from_numpy(text[-tail + 1 :]).to(logits.device)
                    loss = torch.nn.functional.cross_entropy(logits[:-1], target)
                    losses.setdefault(cell, []).append(float(loss))
                    shares.setdefault(cell, []).append(share)
            for prompt in prompts:
                if time.monotonic() > until:
                    break
                cut = self.split(prompt)
                for cell, logits, _ in self.run(prompt.scored.token_ids[:-1], cut):
                    said = logits.argmax(-1)[prompt.length - cut - 1 :].tolist()
                    found.setdefault(cell, []).append(said == prompt.answer)
        return found, losses, shares


class Forgetting:
    """A converted model, as it is."""

    def __init__(self, opened: LoadedModel):
        self.opened = opened

    def measure(self, prompts: list[Prompt], texts: list[np.ndarray], until: float) -> tuple[Hits, Hits, Hits]:
        live, _ = measure_live_share(
            self.opened, [Window(text) for text in texts[:4]], lengths=[len(texts[0])], progress=False
        )
        tails = [Scored(text, np.arange(len(text) - min(TAIL, len(text) // 4) + 1, len(text))) for text in texts]
        losses = [float(loss.mean()) for loss, _ in score_tokens(self.opened.model, tails)]
        found: list[bool] = []
        for start in range(0, len(prompts), 8):
            if time.monotonic() > until:
                break
            some = prompts[start : start + 8]
            scores = score_tokens(self.opened.model, [prompt.scored for prompt in some])
            found += [best.tolist() == prompt.answer for prompt, (_, best) in zip(some, scores, strict=True)]
        name = "horizon" if (self.opened.fox or {}).get("horizon") else f"gates at {live['horizon']:g} nats"
        cell = (name, round(live["lengths"][0]["cache"], 4))
        return {cell: found}, {cell: losses}, {cell: [live["lengths"][0]["cache"]]}


def rows_of(name: str, length: int, found: Hits, losses: Hits, shares: Hits) -> list[dict[str, Any]]:
    """One row of the result for each method and ratio."""
    rows = []
    dense = losses.get(("dense", 1.0))
    for (method, ratio), own in losses.items():
        hits = found.get((method, ratio), [])
        row: dict[str, Any] = {"model": name, "length": length, "method": method, "ratio": ratio}
        row |= {"kept": float(np.mean(shares[method, ratio])), "prompts": len(hits), "texts": len(own)}
        if hits:
            row |= {"found": float(np.mean(hits)), "interval": wilson_interval(float(np.mean(hits)), len(hits))}
            row["found_each"] = "".join("01"[hit] for hit in hits)
        row |= {"loss": float(np.mean(own)), "loss_each": own}
        if dense is not None and method != "dense":
            change = np.array(own) - np.array(dense)
            row["difference"] = mean_over_documents(change, np.ones(len(own)))
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'model':28} {'length':>7} {'method':>10} {'ratio':>6} {'kept':>6} {'needles found':>20} {'loss':>7} change"
    )
    for row in rows:
        hits = "-"
        if row["prompts"]:
            hits = "{:4.0f} % ({:.0f} to {:.0f})".format(100 * row["found"], *(100 * x for x in row["interval"]))
        change = f"{row['difference']['mean']:+.3f}" if "difference" in row else ""
        print(f"{row['model'][-28:]:28} {tokens_label(row['length']):>7} {row['method']:>10} {row['ratio']:6.3g} "
              f"{row['kept']:6.3f} {hits:>20} {row['loss']:7.3f} {change}")  # fmt: skip


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Needles found and loss over the share of the cache kept, at the longest length; a line for model and method."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    models = list(dict.fromkeys(row["model"] for row in rows))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(11.0, 4.8), layout="constrained")
        FigureCanvasAgg(drawn)
        panels = drawn.subplots(1, 2)
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows if row["method"] != "dense")):
            for model in models:
                own = [r for r in rows if r["model"] == model and r["method"] == method]
                if not own:
                    continue
                own += [r for r in rows if r["model"] == model and r["method"] == "dense"]
                look = {"color": COLOURS[number % len(COLOURS)], "label": f"{method}, {model}"}
                look |= {"marker": "os^Dv"[models.index(model) % 5], "ls": "-" if len(own) > 1 else ""}
                look |= {"ms": 5 if len(own) > 1 else 11}
                own.sort(key=lambda row: row["kept"])
                panels[0].plot([r["kept"] for r in own if r["prompts"]],
                               [100 * r["found"] for r in own if r["prompts"]], **look)  # fmt: skip
                panels[1].plot([r["kept"] for r in own], [r["loss"] for r in own], **look)
        for panel, title in zip(panels, ("Needles found (%)", "Loss (nats per token)"), strict=True):
            panel.set_title(f"{title} at {tokens_label(longest)}")
            panel.set_xlabel("share of the cache kept")
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return drawn


def opened_models(words: Sequence[str], options: dict[str, Any]) -> Iterator[LoadedModel]:
    for word in words:
        path, _, factor = word.partition("+yarn:")
        opened = open_model(path, **options)
        if factor:
            set_rope(opened.model, {"rope_type": "yarn", "factor": float(factor)})
            opened = replace(opened, name=f"{opened.name} + YaRN x{factor}")
        yield opened


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--haystack", nargs="+", required=True, help="texts: needles are hidden in them, loss is read")
    parser.add_argument("--lengths", default="8192,32768", type=lambda x: [int(n) for n in x.split(",")])
    parser.add_argument("--ratios", default="1,.5,.3,.2,.1", type=lambda x: [float(n) for n in x.split(",")])
    parser.add_argument("--methods", default=",".join(METHODS), type=lambda x: x.split(","))
    parser.add_argument("--mode", default="easy", choices=("easy", "standard"))
    parser.add_argument("--prompts", type=int, default=100, help="needles at each length, at 5 depths")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--aware", action="store_true", help="prefill the question, too")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further prompt after so many")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="JSON of earlier runs, for the figure")
    parser.add_argument("--out", type=out_file, required=True)
    arguments = parser.parse_args(words)
    if unknown := set(arguments.methods) - set(METHODS):
        parser.error(f"methods are {', '.join(METHODS)}; got {', '.join(sorted(unknown))}")
    if not all(0 < ratio <= 1 for ratio in arguments.ratios):
        parser.error(f"ratios lie above 0 and are at most 1; got {arguments.ratios}")
    started = time.monotonic()
    settings = {key: getattr(arguments, key) for key in ("lengths", "ratios", "mode", "prompts", "aware", "fp8")}
    report: dict[str, Any] = {**provenance(), **settings, "rows": []}
    parts = len(arguments.models) * len(arguments.lengths)
    for opened in opened_models(arguments.models, {"device": arguments.device, "dtype": arguments.dtype}):
        report["gpu"] = torch.cuda.get_device_name() if opened.device.type == "cuda" else None
        hay = read_haystack(opened.tokenizer, arguments.haystack, max(arguments.lengths), "text")
        measured = Plain(opened, arguments, hay) if opened.fox is None else Forgetting(opened)
        for length in arguments.lengths:
            begun = time.monotonic()
            until = begun + (started + arguments.seconds - begun) / parts
            parts -= 1
            trials = -(-arguments.prompts // len(DEPTHS))
            prompts = make_prompts(hay, [arguments.mode], [length], DEPTHS, trials, seed=0)
            order = [n + depth * trials for n in range(trials) for depth in range(len(DEPTHS))]  # all depths early on
            texts = stretches(hay, length, arguments.texts)
            found, losses, shares = measured.measure([prompts[n] for n in order], texts, until)
            rows = rows_of(opened.name, length, found, losses, shares)
            report["rows"] += rows
            show(rows)
            print(f"{opened.name} at {length}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    earlier = [row for file in arguments.add for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    save_figure(figure([*earlier, *report["rows"]]), arguments.out.with_suffix(""))
    return report


if __name__ == "__main__":
    main()
