"""Forgetting Attention side by side with its peers, in one process on one GPU: time and error.

examples:
  python kernels/bench.py --official PATH --out benchmarks/kernels.json     everything: minutes, most of them compiling
  python kernels/bench.py --only '^table 2,8192' --only ours                what both regular expressions match

stages, in this order: table (the shapes everyone is compared on, dense and with a horizon, gates of short memory),
decode, errors, extras (gates open and mixed, head dims 80, 96 and 256, packed documents).

how: a contender compiles at its first call, which is not timed. Times are medians of CUDA events around the call,
launches included, calls queued one after another with the L2 flushed between; eight rounds over all contenders of a
shape, 2 to 30 calls each in turn, in a new order every round, so that clocks and power meet all alike.
Forward FLOPs are 4 B H T T D / 2, the backward counts 2.5 times that. Pairs beyond a horizon count too, so that it
shows as a higher rate; in packed documents only pairs of one document count. Errors are relative RMS against
`fox_kernels.reference` in float64 on the same inputs. SDPA's kernels know no gates.

exit codes: 0 done, 1 some measurement of ours is missing (the JSON says why), 2 bad arguments or no CUDA device.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from bench_problems import OURS, OUTPUTS, Decode, Task, select, tasks


def row_line(row: dict) -> str:
    """Return one measurement of the table or the extras as a line."""
    return (
        f"{row['problem']:36} {row['contender']:26} {row['forward_tflops']:6.0f} {row['backward_tflops']:6.0f} "
        f"{row['total_ms']:9.3f} ms"
    )


def decode_line(row: dict) -> str:
    return (
        f"decode {row['problem']:24} {row['ms']:8.4f} ms {row['gb_s']:6.0f} GB/s, {row['of_copy']:.0%} of a copy, "
        f"as a graph {row['graph_of_copy']:.0%}; live {row['live']:.0%}"
    )


def error_line(row: dict) -> str:
    return f"error {row['problem']:26} {row['contender']:14} " + "  ".join(f"{n} {row[n]:.2e}" for n in OUTPUTS)


LISTS = {"table": "rows", "extras": "rows", "decode": "decode", "errors": "errors"}
LINES = {"rows": row_line, "decode": decode_line, "errors": error_line}


class Results:
    """The measurements so far, written to a file after each problem, so that a run cut off keeps what it has."""

    def __init__(self, path: Path | None, data: dict):
        self.path, self.data = path, data

    def add(self, task: Task, rows: list[dict]) -> None:
        kind = LISTS[task.stage]
        for row in rows:
            full = {"stage": task.stage, "problem": task.problem.name, **task.problem._asdict(), **row}
            self.data[kind].append(full)
            print(LINES[kind](full), flush=True)
        self.save()

    def skip(self, problem: str, contender: str, why: str) -> None:
        """Note that a contender was not measured: it can't run the problem, or it crashed."""
        self.data["skipped"].append([problem, contender, why])
        print(f"skipped {problem} | {contender}: {why}", flush=True)

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.data, indent=1) + "\n")
            part.replace(self.path)


def run(arguments: argparse.Namespace, plan: list[Task]) -> Results:
    """Measure a plan in its order."""
    import torch
    from bench_contenders import setups
    from bench_measure import Clock, copy_rate, decode, errors, machine, measure

    torch.manual_seed(0)
    clock = Clock()
    copy_gb_s = copy_rate(clock)
    command = " ".join(["python kernels/bench.py", *arguments.given])
    data = {"schema": 2, "command": command, "machine": machine(), "copy_gb_s": copy_gb_s}
    data |= {"rows": [], "decode": [], "errors": [], "skipped": [], "complete": False}
    results = Results(Path(arguments.out) if arguments.out else None, data)
    print(json.dumps(results.data["machine"]), flush=True)
    print(f"a copy {copy_gb_s:.0f} GB/s", flush=True)

    def one(task: Task) -> tuple[list[dict], list[tuple[str, str]]]:
        if isinstance(task.problem, Decode):
            return decode(task.problem, clock, copy_gb_s)
        table = setups(arguments.official, task.contenders)
        return errors(table, task.problem) if task.stage == "errors" else measure(table, task.problem, clock)

    for task in plan:
        rows, skipped = one(task)
        results.add(task, rows)
        for name, why in skipped:
            results.skip(task.problem.name, name, why)
        torch.cuda.empty_cache()
    results.data["complete"] = not any(name in OURS for _, name, _ in results.data["skipped"])
    results.save()
    return results


def parse(argv: list[str]) -> argparse.Namespace:
    head, _, tail = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="kernels/bench.py", description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--official", metavar="PATH", help="the official kernel's forgetting_attention.py; left out without"
    )
    parser.add_argument("--out", metavar="JSON", help="write the results here, after each problem")
    parser.add_argument(
        "--only", action="append", default=[], metavar="REGEX", help="measure what matches; all, if repeated"
    )
    arguments = parser.parse_args(argv)
    arguments.given = argv
    if arguments.official and not Path(arguments.official).is_file():
        parser.error(f"--official {arguments.official}: no such file")  # now, not after minutes
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        plan = select(tasks(bool(arguments.official), importlib.util.find_spec("fla") is not None), arguments.only)
        import torch

        if not torch.cuda.is_available():
            raise ValueError("no CUDA device: nothing to measure")
        results = run(arguments, plan)
    except (OSError, ValueError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0 if results.data["complete"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
