"""Trains one arm and judges it by the protocol of docs/results.md, into a folder that retrofit_results.py collects.

    python benchmarks/retrofit_arm.py RUN --recipe smollm2-stretch.yaml --dev dev.jsonl.xz --haystack haystack.jsonl.xz
        [--tasks DIR] [--only needle-easy,eval] [--trials N] [a.b=value ...]
    python benchmarks/retrofit_arm.py RUNS/base --model BASE --dev ... --haystack ...

The last words change the recipe, as `retrofox train` takes them; `output` is the folder. With --model nothing is
trained. Needles run beside losses and tasks, in two processes on one GPU. What is finished is not run again,
so an interrupted arm goes on where it ended; each part's output is in FOLDER/PART.log.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RETROFOX = (sys.executable, "-m", "retrofox")


def parts(options: argparse.Namespace) -> list[dict[str, list[str]]]:
    """Two chains of commands, name -> arguments; every one writes FOLDER/NAME."""
    longest = str(options.longest)
    needles = ["--data", str(options.haystack), "--lengths", options.lengths, "--depths", "5"]
    needles += ["--trials", str(options.trials)]
    dev, plain = ["--data", str(options.dev)], ["--no-controls"]
    first = {f"needle-{mode}": ["needle", *needles, "--mode", mode, "--seed", "7"] for mode in ("easy", "standard")}
    second = {
        name: ["eval", *dev, "--length", length, "--min-tokens", length, "--max-documents", str(documents), *plain]
        for name, length, documents in (("eval", str(options.length), 16), ("eval-128k", longest, 6))
    }
    if options.tasks:
        names = ",".join(sorted(f"local_{path.stem}" for path in options.tasks.glob("*.yaml")))
        where = ["--data", str(options.haystack), "--length", "512", *plain]
        second["tasks"] = ["eval", *where, "--include-path", str(options.tasks), "--tasks", names]
    return [first, second]


def run(folder: Path, name: str, command: list[str]) -> None:
    """Runs one command with its output in a file; says how long it took.

    Raises:
        SystemExit: it failed, with the end of what it said.
    """
    started = time.perf_counter()
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.call([*RETROFOX, *command], stdout=file, stderr=subprocess.STDOUT)
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        sys.exit("\n".join([f"{name} ended with exit code {code}; {log} ends with:", *said[-5:]]))
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def chain(folder: Path, model: str, commands: dict[str, list[str]], only: set[str]) -> None:
    """Judges a model by commands one after the other, but for those that are done or not asked for."""
    for name, command in commands.items():
        done = list((folder / name).glob("*.json"))
        if not done and (not only or name in only):
            run(folder, name, [command[0], model, *command[1:], "--out", str(folder / name)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the arm's own: its name is the arm's")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--recipe", type=Path, help="what to train")
    chosen.add_argument("--model", help="judge this one: nothing is trained")
    parser.add_argument("--dev", type=Path, required=True, help="documents for losses")
    parser.add_argument("--haystack", type=Path, required=True, help="essays to hide needles in")
    parser.add_argument("--tasks", type=Path, help="folder of lm-eval's task files, each named local_FILE within")
    parser.add_argument("--lengths", default="1Ki,4Ki,8Ki,16Ki,32Ki", help="of the needles' contexts")
    parser.add_argument("--trials", type=int, default=20, help="prompts at each of five depths, by length")
    parser.add_argument("--length", type=int, default=32768, help="of the documents for the first loss")
    parser.add_argument("--longest", type=int, default=131072, help="and for the second")
    parser.add_argument("--only", default="", help="parts to judge by, with commas between, or train: all if not given")
    parser.add_argument("changes", nargs="*", help="a.b=value")
    options = parser.parse_intermixed_args()
    chains, only = parts(options), {part for part in options.only.split(",") if part}
    known = ["train", *(name for commands in chains for name in commands)]
    if unknown := only - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.model or str(options.folder / "model")
    if options.recipe and not (options.folder / "result.json").exists():
        run(options.folder, "train", ["train", str(options.recipe), f"output={options.folder}", *options.changes])
    with ThreadPoolExecutor() as pool:
        for judged in [pool.submit(chain, options.folder, model, commands, only) for commands in chains]:
            judged.result()


if __name__ == "__main__":
    main()
