"""A pool of processes that each hold one encoder.

Workers are plain subprocesses (`serve`) that speak pickles over their pipes: nothing is forked after torch or CUDA
started, and a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from retrofox.data.encode import Encoded, Encoder
from retrofox.data.read import Batch
from retrofox.support.processes import fresh_python


class Pool:
    """Encodes batches in order on `workers` processes; with one worker, or little to do, in this process."""

    def __init__(self, encoder: Encoder, workers: int):
        self.encoder, self.workers = encoder, workers
        self.processes: list[subprocess.Popen[bytes]] = []
        self.threads: ThreadPoolExecutor | None = None
        self.idle: deque[subprocess.Popen[bytes]] = deque()

    def __enter__(self) -> Pool:
        if self.workers > 1:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            command = fresh_python("from retrofox.data.pool import serve; serve()")
            for _ in range(self.workers):
                # A session of its own: Ctrl-C reaches the parent alone, and closing the pipe ends the worker.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
                )
                self.processes.append(process)
                self.idle.append(process)
            self.threads = ThreadPoolExecutor(self.workers)
            first = pickle.dumps(self.encoder)
            for process in self.processes:
                assert process.stdin
                process.stdin.write(first)
                process.stdin.flush()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if error[0] is not None:
                process.kill()
            elif process.stdin:
                process.stdin.close()
        if self.threads is not None:
            self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def map(self, batches: Iterable[Batch]) -> Iterator[Encoded]:
        """Encodes batches; results come in the order of the batches, at most two per worker ahead."""
        if self.threads is None:
            yield from map(self.encoder, batches)
            return
        waiting: deque[Future[Encoded]] = deque()
        for batch in batches:
            waiting.append(self.threads.submit(self._ask, batch))
            if len(waiting) > 2 * self.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, batch: Batch) -> Encoded:
        process = self.idle.popleft()  # as many threads as processes: never empty
        assert process.stdin
        assert process.stdout
        try:
            pickle.dump(batch, process.stdin, protocol=5)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            raise ValueError(
                f"a tokenising process ended with exit code {process.wait()} (out of memory?): set data.workers lower"
            ) from None
        self.idle.append(process)
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve() -> None:
    """The loop of a worker: an encoder, then batches until the pipe closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up in the replies
    encoder: Encoder = pickle.load(sys.stdin.buffer)
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = encoder(batch)
        except (ValueError, OSError) as error:
            answer = type(error)(*error.args) if isinstance(error, OSError) else ValueError(str(error))
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:  # the parent was killed
            os._exit(1)
