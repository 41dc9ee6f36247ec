"""The environment that measured numbers depend on, tables, and progress bars."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from retrofox.support.files import nearest_existing, why_unwritable, write_json_result
from retrofox.version import __version__

PACKAGES = ("torch", "transformers", "triton", "peft", "tokenizers", "numpy")


def check_folder(out: str | os.PathLike | None, what: str = "results") -> None:
    """Raises ValueError where `what` can't go, before it is made: `out` is a file, lies below one, is read-only."""
    if out is None:
        return
    there = nearest_existing(Path(out))
    reason = why_unwritable(there) if there.is_dir() else "it is a file"
    if reason is not None:
        raise ValueError(f"{what} can't go to {out}: {there} can't be written to ({reason}); name another directory")


def environment() -> dict[str, Any]:
    """Command, time, package versions, processor, memory and GPU, on which measured numbers depend."""
    versions: dict[str, str | None] = {"retrofox": __version__}  # also where it runs from a source tree
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # with its build, +cpu or +cu130, which the package's metadata may leave out
    program = os.path.basename(sys.argv[0])
    command = ["python", "-m", "retrofox"] if program == "__main__.py" else [program]
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {"name": properties.name, "memory_bytes": properties.total_memory, "count": torch.cuda.device_count()}
    return {
        "command": shlex.join([*command, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
    }


def write_results(
    result: dict[str, Any], path: str | os.PathLike, console: Console, draw: Callable[[], dict[str, str]] | None = None
) -> None:
    """Writes a result as JSON, then what `draw` draws, then its "files" into the JSON; says which were written."""
    for figures in filter(None, (dict, draw)):  # the numbers first: there may be no room for the figures
        result["files"] = {**figures(), "json": os.fspath(path)}
        write_json_result(path, result)
    console.print(f"wrote {', '.join(result['files'].values())}", highlight=False, soft_wrap=True)


def output_console() -> Console:
    """A console on stdout, wide enough for the tables when stdout is a file or a pipe; names with [brackets] stay."""
    plain: dict[str, Any] = {"markup": False, "emoji": False}
    console = Console(**plain)
    return console if console.is_terminal else Console(width=150, **plain)


def print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, left: str = ""
) -> None:
    """A table; long words of a cell are folded, never cut.

    Args:
        rows: cells, or () for a line across.
        left: names of columns that are aligned to the left, with spaces between; all others to the right.
    """
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left.split() else "right", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console.print(table)


def progress_bar(unit: str, enabled: bool) -> Progress:
    """A bar on stderr with count, time spent and time left; where stderr is a file or a pipe, a line a minute."""
    console = Console(stderr=True)
    if enabled and not (console.is_terminal or console.is_jupyter):
        return _LineAMinute(unit)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not enabled,
        transient=True,
    )


@contextmanager
def after_layers(model: Any, advance: Callable[[float], Any]) -> Iterator[None]:
    """Inside, `advance(T / layers)` follows each decoder layer's pass over (B, T) tokens: in all T for a model's pass.

    A model whose layers are elsewhere than LLaMA's counts as one layer.
    """
    inner = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    layers = list(getattr(inner, "layers", [inner]))

    def count(layer: Any, given: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        advance(hidden.shape[1] / len(layers))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(count))
        yield


@contextmanager
def reading_bar(model: Any, label: str, tokens: int, enabled: bool = True) -> Iterator[None]:
    """A `progress_bar` of the tokens that a model reads inside, which each decoder layer advances.

    It ends with the last of them: the hooks on layers would slow down decoding.
    """
    with ExitStack() as until_read:
        if enabled:
            bar = until_read.enter_context(progress_bar("tokens", enabled))
            task = bar.add_task(label, total=tokens)

            def advance(read: float) -> None:
                bar.advance(task, read)
                if bar.tasks[0].completed > tokens - 0.5:
                    until_read.close()

            until_read.enter_context(after_layers(model, advance))
        yield


class _LineAMinute(Progress):
    """Counts as a bar does, and draws none."""

    def __init__(self, unit: str):
        super().__init__(disable=True)
        self.unit, self.told = unit, self.get_time()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        task = self._tasks[task_id]
        since = max(self.told, task.start_time or 0.0)
        if self.get_time() - since < 60 or not (task.total and task.completed and task.elapsed):
            return
        self.told = self.get_time()
        left = task.elapsed * max(0.0, task.total / task.completed - 1)
        count = f"{task.completed:,.0f} of {task.total:,.0f} {self.unit}"
        line = f"{task.description}: {count}, {duration(task.elapsed)} so far, about {duration(left)} left"
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as people say them: 2 h 5 min, 3 min 20 s, 12 s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _cpu_name() -> str:
    told = Path("/proc/cpuinfo")
    name = re.search(r"^model name.*?:(.*)", told.read_text(encoding="utf-8") if told.exists() else "", re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()
