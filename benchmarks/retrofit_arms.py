"""Trains several arms on one GPU, one after the other, each judged beside the training of the next.

    python benchmarks/retrofit_arms.py RUNS stretch=smollm2-stretch.yaml yarn8=smollm2-yarn8.yaml base=DIR
        --dev dev.jsonl.xz --haystack haystack.jsonl.xz [--tasks DIR] [--minutes 60] [--into FILE]
        [--changes 'data.eval=[]' ...]

An arm is NAME=RECIPE.yaml, or NAME=MODEL for one that is judged as it is; each goes into RUNS/NAME by retrofit_arm.py,
which says what its parts are. One that fails leaves the others alone; what is finished is not run again. After
--minutes no further training begins. `retrofit_results.py collect RUNS` gathers them; with --into it does so whenever
an arm has been judged, so that one small file has all that is known when a machine is taken away.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ARM = (sys.executable, str(Path(__file__).with_name("retrofit_arm.py")))
COLLECT = (sys.executable, str(Path(__file__).with_name("retrofit_results.py")), "collect")


def named(text: str) -> tuple[str, str]:
    """NAME=RECIPE or NAME=MODEL."""
    name, separator, source = text.partition("=")
    if not separator or not source or not name or Path(name).name != name:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=RECIPE.yaml or NAME=MODEL")
    return name, source


def run(folder: Path, what: str, command: list[str]) -> str:
    """Runs one command with its output in FOLDER.WHAT.log; returns what is to be said of it."""
    started = time.perf_counter()
    log = folder.with_name(f"{folder.name}.{what}.log")
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT)
    return f"{time.perf_counter() - started:.0f} s" if code == 0 else f"failed, see {log}"


def main(given: list[str] | None = None) -> int:
    """Runs all arms; the exit code is 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="one folder in it for every arm")
    parser.add_argument("arms", nargs="+", type=named, metavar="NAME=RECIPE")
    parser.add_argument("--dev", required=True, help="documents for losses")
    parser.add_argument("--haystack", required=True, help="essays to hide needles in")
    parser.add_argument("--tasks", help="folder of lm-eval's task files")
    parser.add_argument("--only", default="", help="parts to judge by, with commas between; all if not given")
    parser.add_argument("--into", type=Path, help="file that gathers what is measured so far, again and again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no training begins after these")
    parser.add_argument("--changes", nargs="*", default=[], help="to every recipe, a.b=value")
    options = parser.parse_args(given)
    if twice := {name for name, _ in options.arms if [other for other, _ in options.arms].count(name) > 1}:
        parser.error(f"two arms of one name: {', '.join(sorted(twice))}")
    options.runs.mkdir(parents=True, exist_ok=True)
    judged_by = ["--dev", options.dev, "--haystack", options.haystack]
    judged_by += ["--tasks", options.tasks] if options.tasks else []
    deadline = time.monotonic() + 60 * options.minutes
    said: dict[str, list[str]] = {}

    def gather() -> None:
        if options.into:
            told = run(options.runs / "gathered", "collect", [*COLLECT, str(options.runs), "--into", str(options.into)])
            if told.startswith("failed"):
                print(f"not gathered: {told}", flush=True)

    def judge(folder: Path, command: list[str]) -> str:
        told = run(folder, "judged", command)
        gather()
        return told

    judged: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(1) as pool:  # one at a time: two would slow the training beside them too much
        for name, source in options.arms:
            folder, model = options.runs / name, source
            trains = source.endswith((".yaml", ".yml"))
            if trains and time.monotonic() > deadline and not (folder / "result.json").exists():
                said[name] = ["not begun: the time was over"]
                continue
            if trains:
                command = [*ARM, str(folder), "--recipe", source, *judged_by, "--only", "train"]
                told = run(folder, "train", [*command, *options.changes])
                said[name] = [f"trained: {told}"]
                print(f"{name}: {said[name][0]}", flush=True)
                if told.startswith("failed"):
                    continue
                model = str(folder / "model")
            parts = ["--only", options.only] if options.only else []
            judged[name] = pool.submit(judge, folder, [*ARM, str(folder), "--model", model, *judged_by, *parts])
        for name, future in judged.items():
            said.setdefault(name, []).append(f"judged: {future.result()}")
            print(f"{name}: {said[name][-1]}", flush=True)
    for name, _ in options.arms:
        print(f"{name:24} {'; '.join(said[name])}", flush=True)
    return int(any("failed" in line for lines in said.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main())
