"""RULER (arXiv 2404.06654) by lm-eval without a network: prompts made once, with essays of your own.

    python benchmarks/ruler.py make TASKS --tokenizer BASE --essays essays.jsonl.xz [--samples 25] [--lengths 4096,...]
    python benchmarks/ruler.py run MODEL TASKS ARM/ruler [--lengths 4096,8192]

`make` writes prompts by lm-eval's own generators, and a task file for each task and length: lm_eval --include-path
TASKS --tasks fox_ruler_4096 takes them, too. Of RULER's 13 tasks the two on questions (SQuAD, HotpotQA) are left out,
essays stand in place of Paul Graham's, and sentences end at a full stop and a space instead of where NLTK's model has
them. `run` scores them as lm-eval does: greedy, without a chat template, the share of the wanted strings that stand in
the answer. It writes ARM/ruler/LENGTH.json with each sample's score and ARM/ruler.json, which has all lengths so far.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from provenance import provenance

from retrofox.evaluation.lm_eval import find_tasks, run_tasks
from retrofox.loading.loaded_model import open_model
from retrofox.support.files import write_json

NEEDLES = [f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")]
NEEDLES += ["niah_multiquery", "niah_multivalue"]
GENERATED = {"vt": 30, "cwe": 120, "fwe": 50}
"""Tokens that an answer may have, RULER's; needles have --needle-tokens."""
ROOM = 256
"""Tokens beside a prompt's length for the answer's beginning, which lm-eval does not count, and the answer."""
MODULE = '''"""Reads and scores the prompts of the task files beside it."""

import json
import lzma
from pathlib import Path

import datasets
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all


def load(file, **_):
    with lzma.open(Path(__file__).with_name(file), "rt", encoding="utf-8") as lines:
        return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def score(doc, results):
    return {"score": string_match_all(postprocess_pred(results), [doc["outputs"]])}
'''
TASK = """task: {name}
custom_dataset: !function fox_ruler.load
dataset_kwargs: {{file: {file}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{outputs}}}}"
gen_prefix: "{{{{gen_prefix}}}}"
target_delimiter: "{delimiter}"
process_results: !function fox_ruler.score
metric_list: [{{metric: score, aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{do_sample: false, temperature: 0.0, max_gen_toks: {tokens}, until: []}}
"""


@contextmanager
def generators(words: Sequence[str], samples: int) -> Iterator[dict[str, Callable[..., Any]]]:
    """lm-eval's generators by task; inside they make so many samples, of these words, without a network."""
    with mock.patch("nltk.data.find"):  # else NLTK's model is downloaded
        niah, prepare, vt, cwe, fwe = (
            import_module(f"lm_eval.tasks.ruler.{name}")
            for name in ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils")
        )

    def fewer(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: make(
            *given, **{**named, "num_samples": min(samples, named.get("num_samples", 500))}
        )

    def haystack(type_haystack: str) -> Any:
        return words if type_haystack == "essay" else prepare.get_haystack(type_haystack)

    with (
        mock.patch.object(prepare, "sent_tokenize", re.compile(r"(?<=[.!?]) ").split),
        mock.patch.object(niah, "generate_samples", fewer(niah.generate_samples)),
        mock.patch.object(niah, "get_haystack", haystack),
        mock.patch.object(vt, "sys_vartrack_w_noise_random", fewer(vt.sys_vartrack_w_noise_random)),
        mock.patch.object(cwe, "sys_word_pair_random", fewer(cwe.sys_word_pair_random)),
        mock.patch.object(fwe, "sys_kwext", fewer(fwe.sys_kwext)),
    ):
        others = {"vt": vt.get_vt_dataset, "cwe": cwe.get_cw_dataset, "fwe": fwe.fwe_download}
        yield {name: getattr(niah, name) for name in NEEDLES} | others


def make(options: argparse.Namespace) -> None:
    """Writes fox_ruler.py, LENGTH.TASK.yaml and LENGTH.TASK.jsonl.xz, and of each length a group fox_ruler_LENGTH."""
    folder: Path = options.tasks
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fox_ruler.py").write_text(MODULE, encoding="utf-8")
    with lzma.open(options.essays, "rt", encoding="utf-8") as lines:
        words = " ".join(json.loads(line)["text"] for line in lines).split()
    with generators(words, options.samples) as made:
        for length in options.lengths:
            names = []
            for task, generate in made.items():
                random.seed(length)
                np.random.seed(length)  # noqa: NPY002
                rows = generate(max_seq_lengths=[length], tokenizer=options.tokenizer)["test"]
                names.append(f"fox_ruler_{length}_{task}")
                file = f"{length}.{task}.jsonl.xz"
                with lzma.open(folder / file, "wt", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(row) + "\n" for row in rows)
                tokens = GENERATED.get(task, options.needle_tokens)
                described = TASK.format(
                    name=names[-1], file=file, tokens=tokens, delimiter=r"\n\n" if task == "cwe" else " "
                )
                (folder / f"{length}.{task}.yaml").write_text(described, encoding="utf-8")
            group = yaml.safe_dump({"group": f"fox_ruler_{length}", "task": names})
            (folder / f"{length}.yaml").write_text(group, encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    """Scores a model; ARM/ruler/LENGTH.json after each length, then ARM/ruler.json of all that there are."""
    opened = open_model(options.model, dtype=options.dtype, device=options.device)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    for length in options.lengths:
        started = time.time()
        tasks = find_tasks([f"fox_ruler_{length}"], str(options.tasks), length=length)
        scores = run_tasks(opened, tasks, max_length=length + ROOM, limit=options.limit)
        each = {
            task.removeprefix(f"fox_ruler_{length}_"): list(found["score,none"].values())
            for task, found in scores.documents.items()
        }
        told = {"length": length, "seconds": round(time.time() - started), "scores": each}
        write_json(folder / f"{length}.json", {**told, "environment": provenance()})
        summary = summarised(
            sorted((json.loads(file.read_text()) for file in folder.glob("*.json")), key=lambda x: x["length"])
        )
        write_json(folder.with_suffix(".json"), summary)
        print(summary["by_length"], flush=True)


def summarised(found: list[dict[str, Any]]) -> dict[str, Any]:
    """By length: the mean of tasks, its standard error over samples, and each task's mean."""
    by_length = []
    for one in found:
        scores = {task: np.array(values) for task, values in one["scores"].items()}
        errors = [values.var(ddof=1) / len(values) for values in scores.values() if len(values) > 1]
        by_length.append(
            {
                "length": one["length"],
                "samples": min(map(len, scores.values())),
                "mean": float(np.mean([values.mean() for values in scores.values()])),
                "standard_error": math.sqrt(sum(errors)) / len(scores),
                "tasks": {task: float(values.mean()) for task, values in scores.items()},
                "seconds": one["seconds"],
            }
        )
    return {"by_length": by_length, "environment": found[-1]["environment"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making, running = commands.add_parser("make"), commands.add_parser("run")
    making.add_argument("tasks", type=Path, help="folder for prompts and task files")
    making.add_argument("--tokenizer", required=True, help="that lengths are counted by")
    making.add_argument("--essays", type=Path, required=True, help="JSON lines with `text`, xz-compressed")
    making.add_argument("--samples", type=int, default=25, help="of each task and length; RULER has 500")
    making.add_argument("--needle-tokens", type=int, default=64, help="of a needle's answer at most; RULER has 128")
    making.set_defaults(do=make)
    running.add_argument("model")
    running.add_argument("tasks", type=Path)
    running.add_argument("out", type=Path, help="ARM/ruler")
    running.add_argument("--limit", type=int, help="samples of each task; all if not given")
    running.add_argument("--device")
    running.add_argument("--dtype")
    running.set_defaults(do=run)
    for command in (making, running):
        command.add_argument(
            "--lengths", default="4096,8192,16384,32768", type=lambda x: [int(n) for n in x.split(",")]
        )
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
