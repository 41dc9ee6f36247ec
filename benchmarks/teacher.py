"""Distillation from logits on disk beside distillation from a teacher in memory: bytes, speed, loss.

    python benchmarks/teacher.py --model DIRECTORY --out benchmarks/teacher.json

The same distill stage (gates and attention) several times from the same conversion, data and seed, with the teacher in
memory and with the logits of each --train-k: the logged KL step by step, and all ends judged alike, by the full KL to
the teacher and the cross-entropy on held-out windows. For each --top-k: bytes per token, mass left over, speed of
writing and reading. Speeds are tokens per second of the process's
own CPU time on a CPU, which other processes hardly change, and of the clock on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance

import retrofox
from retrofox.config import Recipe, Source, validate
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.support.report import environment
from retrofox.training.data import PreparedTokens, StageData, prepare_tokens
from retrofox.training.groups import parameter_groups, set_trainable
from retrofox.training.objectives import hidden_states, original_form
from retrofox.training.offline.codec import pack, top_k_and_rest
from retrofox.training.offline.objective import lumped_kl
from retrofox.training.offline.run import Original
from retrofox.training.offline.shards import TeacherLogits
from retrofox.training.offline.write import write_teacher
from retrofox.training.stage_objective import stage_objective

ROOT = Path(__file__).parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Alone:
    """The state of a single process, as `StageData` and `prepare_tokens` ask for it."""

    process_index, num_processes, is_main_process = 0, 1, True

    def main_process_first(self) -> Any:
        return torch.no_grad()


def seconds() -> float:
    """CPU seconds of this process; on a GPU the clock, with everything done that was asked of it."""
    if DEVICE.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def recipe_of(options: argparse.Namespace, folder: Path, name: str, tokens: int, **stage: Any) -> Recipe:
    """One distill stage of `tokens` tokens, whose OUTPUT is folder/name."""
    values = {"objective": "distill", "tokens": tokens, "sequence_length": options.length, "schedule": "constant"}
    values |= {"batch_tokens": options.batch_tokens, "learning_rate": 3e-4, "micro_batch": options.micro_batch}
    values |= {"rates": {"rest": 0.0}}
    return validate(
        {
            "model": str(folder / "converted"),
            "output": str(folder / name),
            "data": {"train": [str(options.data)], "cache": str(folder / "cache")},
            "stages": [{**values, **stage}],
            "precision": options.precision,
            "dataloader_workers": 0,
        }
    )


def prepared(recipe: Recipe) -> PreparedTokens:
    """The recipe's tokens."""
    return prepare_tokens(recipe, recipe_tokenizer(recipe), Alone())


def packing(batch: dict[str, Any]) -> dict[str, Any]:
    """Where a batch's documents begin."""
    return {key: batch[key] for key in ("position_ids", "cu_seqlens") if key in batch}


def size_and_speed(options: argparse.Namespace, folder: Path, top_k: int) -> dict[str, Any]:
    """Bytes, mass left over and speeds of writing and reading, for one k, on --size-tokens tokens."""
    recipe = recipe_of(options, folder, "none", options.size_tokens, teacher_logits=str(folder / f"size-{top_k}"))
    (report,) = write_teacher(recipe, top_k=top_k).values()
    logits, tokens = TeacherLogits(folder / f"size-{top_k}"), report["tokens"]
    model = Original.of(recipe).load(recipe, DEVICE)
    batches = iter(StageData(prepared(recipe), recipe, recipe.stages[0], Alone(), last_row=10**6).batches(0))
    spent, packing_spent = [], []
    for _ in range(options.passes + 1):
        started = seconds()
        batch = next(batches)
        ids, codes, _ = model.distributions({"input_ids": batch["input_ids"], **packing(batch)}, top_k, 1.0)
        half_way = seconds()
        packed = [pack(*window) for window in zip(ids, codes, strict=True)]
        spent.append((seconds() - started) / (len(packed) * options.length))
        packing_spent.append((seconds() - half_way) / (len(packed) * options.length))
    started = seconds()
    for window in logits.windows.tolist():
        logits.window(window)
    return {
        "top_k": top_k,
        "tokens": tokens,
        "bytes_per_token": round(report["bytes_per_token"], 1),
        "rest": round(report["rest"], 4),
        "written_per_second": round(1 / min(spent[1:])),
        "packed_per_second": round(1 / min(packing_spent[1:])),
        "read_per_second": round(tokens / (seconds() - started)),
    }


def curve(options: argparse.Namespace, folder: Path, model: Any, original: Any, **values: Any) -> dict[str, Any]:
    """Trains a model by the stage's objective, groups and data order: KL of every step, tokens per second (median)."""
    recipe = recipe_of(options, folder, "none", options.tokens, **values)
    stage = recipe.stages[0]
    set_trainable(model, stage)
    objective = stage_objective(model, stage, DEVICE, None if stage.teacher_logits else original)
    optimizer = torch.optim.AdamW(parameter_groups(model, stage), betas=(0.9, 0.95))
    rows = options.tokens // options.length
    batches = iter(StageData(prepared(recipe), recipe, stage, Alone(), last_row=rows).batches(0))
    kl, spent = [], []
    for _ in range(options.tokens // options.batch_tokens):
        started = seconds()
        micro = [next(batches) for _ in range(options.batch_tokens // (options.length * options.micro_batch))]
        targets, found = sum(batch["num_targets"] for batch in micro), 0.0
        for batch in micro:
            moved = {key: value.to(DEVICE) for key, value in batch.items() if isinstance(value, torch.Tensor)}
            loss, metrics = objective(model, moved)
            (loss / targets).backward()
            found += float(metrics[0]) / targets
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        kl.append(round(found, 5))
        spent.append(seconds() - started)
        print(f"  step {len(kl)}: KL {kl[-1]}", flush=True)
    return {"kl": kl, "tokens_per_second": round(options.batch_tokens / sorted(spent)[len(spent) // 2], 1)}


@torch.no_grad()
def judged(options: argparse.Namespace, folder: Path, model: Any, teacher: Any) -> dict[str, Any]:
    """Full KL to the teacher, its part that each k sees, and cross-entropy: nats a token on the held-out windows."""
    recipe = recipe_of(options, folder, "none", options.eval_tokens, teacher="copy")
    recipe.data.train = [Source(path=str(options.held_out))]
    data = StageData(prepared(recipe), recipe, recipe.stages[0], Alone())
    names = ["kl", *(f"kl at k = {top_k}" for top_k in options.top_k), "cross_entropy"]
    sums, count = torch.zeros(len(names), dtype=torch.float64), 0
    for batch in itertools.islice(data.batches(0), options.eval_tokens // (options.length * options.micro_batch)):
        moved = {key: value.to(DEVICE) for key, value in batch.items() if isinstance(value, torch.Tensor)}
        with original_form(teacher):
            taught = hidden_states(teacher, moved).flatten(0, 1)
        hidden, targets = hidden_states(model, moved).flatten(0, 1), moved["targets"].flatten()
        for part in torch.where(targets >= 0)[0].split(256):
            log_p, logits = teacher.lm_head(taught[part]).float().log_softmax(-1), model.lm_head(hidden[part]).float()
            kl = [F.kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="sum")]
            kl += [lumped_kl(logits, *top_k_and_rest(log_p, top_k)).sum() for top_k in options.top_k]
            sums += torch.stack((*kl, F.cross_entropy(logits, targets[part], reduction="sum"))).double().cpu()
            count += len(part)
    return {name: round(value / count, 5) for name, value in zip(names, sums.tolist(), strict=True)}


def opened(directory: Path) -> Any:
    """The converted model in float32, on the device."""
    model: Any = retrofox.load(str(directory), dtype=torch.float32)
    return model.to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the unconverted model: directory or Hub id")
    parser.add_argument("--data", type=Path, default=ROOT / "examples/data/train")
    parser.add_argument("--held-out", type=Path, default=ROOT / "examples/data/heldout")
    parser.add_argument("--top-k", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--train-k", type=int, nargs="*", default=[0, 64], help="k of each run; 0: teacher in memory")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=10_240, help="of each training run")
    parser.add_argument("--size-tokens", type=int, default=2048, help="written for each of --top-k")
    parser.add_argument("--eval-tokens", type=int, default=2048, help="held-out")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--folder", type=Path, help="keeps runs and logits here, and goes on with them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        gpu = environment()["gpu"]
        found: dict[str, Any] = {**provenance(), "gpu": gpu}
        found["settings"] = {key: getattr(options, key) for key in ("length", "batch_tokens", "tokens", "precision")}

        def save() -> None:
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")

        if not (folder / "converted").exists():
            retrofox.convert(options.model, folder / "converted", verify=False)
        converted = folder / "converted"
        if options.train_k:
            teacher: Any = opened(converted)
            found["start"] = judged(options, folder, teacher, teacher)
            found["runs"] = {}
        for top_k in options.train_k:
            stage, name = {"teacher": "copy"}, "in memory"
            if top_k:
                stage, name = {"teacher_logits": str(folder / f"logits-{top_k}")}, f"k = {top_k}"
                write_teacher(recipe_of(options, folder, "none", options.tokens, **stage), top_k=top_k)
            model: Any = opened(converted)
            run = curve(options, folder, model, teacher, **stage)
            run["held_out"] = judged(options, folder, model, teacher)
            found["runs"][name] = run
            print(name, run, flush=True)
            save()
        if options.top_k:
            found["size"] = [size_and_speed(options, folder, top_k) for top_k in options.top_k]
            print(*found["size"], sep="\n", flush=True)
            save()


if __name__ == "__main__":
    main()
