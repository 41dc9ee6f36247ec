"""Compile everything that will be measured, in parallel processes that share Triton's and inductor's caches.

Compiling takes minutes one after the other and its results are on disk afterwards, so the process that measures loads
them. A contender that hangs or kills its process here is left out there.
"""

import contextlib
import multiprocessing
import time
from multiprocessing.connection import wait

from bench_problems import Decode, Task

NOT_COMPILED = ("FlashAttention-2, no gate", "cuDNN, no gate")  # nothing of theirs outlives a process
SLOW = ("fla", "FlexAttention")  # compiled anew for every batch size and number of heads


def groups(plan: list[Task]) -> dict[str, list[Task]]:
    """Return name -> tasks that share compiled kernels, the slowest to compile first: one process each."""
    found: dict[str, list[Task]] = {}
    for task in plan:
        for name in task.contenders:
            if name in NOT_COMPILED:
                continue
            p = task.problem
            kind = "decode" if isinstance(p, Decode) else "packed" if p.document else "dense"
            shape = f", B {p.B}, heads {p.H}/{p.Hkv}" if name in SLOW and not isinstance(p, Decode) else ""
            group = found.setdefault(f"{name}, D {p.D}, {kind}{shape}", [])
            group.append(task._replace(contenders=(name,)))
    return dict(sorted(found.items(), key=lambda item: (not slow(item[0]), item[0])))


def slow(group: str) -> bool:
    return group.split(",")[0] in SLOW


def next_group(waiting: list[str], running: list[str], jobs: int) -> int:
    """Return which waiting group starts: slow ones first, in half of the processes, so that the rest gets on."""
    if sum(map(slow, running)) < max(1, jobs // 2):
        return 0
    return next((i for i, name in enumerate(waiting) if not slow(name)), 0)


def compile_group(tasks: list[Task], official: str | None, pipe) -> None:
    """Run each task once, in a process of its own; send the contenders' failures that are no crash."""
    import torch
    from bench_contenders import compiling_only, decoding, setups, tensors
    from bench_measure import failures, reason, set_up

    found = []
    alike = {t.problem if isinstance(t.problem, Decode) else t.problem._replace(gates="short"): t for t in tasks}
    for task in alike.values():
        p, name = task.problem, task.contenders[0]
        try:
            if isinstance(p, Decode):
                decoding(p)[0]()
            else:
                x = tensors(p)
                # only fla tunes: when it is measured, alone on the GPU
                with compiling_only() if name == "fla" else contextlib.nullcontext():
                    set_up(name, setups(official, {name})[name], x)
                del x
            torch.cuda.synchronize()
        except failures() as error:
            found.append(reason(error))
        torch.cuda.empty_cache()
    pipe.send(found)
    pipe.close()


def warm_up(plan: list[Task], official: str | None, jobs: int, seconds: float) -> dict[str, str]:
    """Compile a plan with `jobs` processes, each allowed `seconds`; return group -> why it did not finish."""
    context = multiprocessing.get_context("forkserver")  # forks of one process that has imported torch, without CUDA
    context.set_forkserver_preload(["torch", "triton", "bench_contenders"])
    waiting, running, broken = list(groups(plan).items()), {}, {}
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            name, tasks = waiting.pop(next_group([n for n, _ in waiting], [n for n, *_ in running.values()], jobs))
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=compile_group, args=(tasks, official, sender), daemon=True)
            process.start()
            sender.close()
            running[process.sentinel] = (name, process, receiver, time.monotonic())
        wait(list(running), timeout=0.5)
        for sentinel, (name, process, receiver, since) in list(running.items()):
            late = time.monotonic() - since > seconds
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[sentinel]
            took = f"{time.monotonic() - since:.0f} s"
            if process.exitcode == 0:
                messages = receiver.recv() if receiver.poll() else []
                print(f"compiled {name} in {took}{''.join(f'; {m}' for m in dict.fromkeys(messages))}", flush=True)
            else:
                broken[name] = f"did not compile within {seconds:.0f} s" if late else f"ended with {process.exitcode}"
                print(f"warm-up of {name}: {broken[name]} after {took}", flush=True)
    print(f"warm-up took {time.monotonic() - started:.0f} s", flush=True)
    return broken


def without_broken(plan: list[Task], broken: dict[str, str]) -> tuple[list[Task], list[tuple[str, str, str]]]:
    """Return a plan less what would hang or crash the process that measures, and (problem, contender, why) of that."""
    lost = {}
    for name, tasks in groups(plan).items():
        if name in broken:
            lost.update({(t.problem, t.contenders[0]): broken[name] for t in tasks})
    kept = [t._replace(contenders=tuple(n for n in t.contenders if (t.problem, n) not in lost)) for t in plan]
    skipped = [(p.name, n, why) for (p, n), why in lost.items()]
    return [t for t in kept if t.contenders], skipped
