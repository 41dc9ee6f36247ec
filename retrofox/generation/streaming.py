"""Writing tokens as they are generated: what arrives when, and which characters are whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer


class Meter(BaseStreamer):
    """Notes in `times`, seconds, when each token comes, and hands the first row's to a writer."""

    def __init__(self, ends: Sequence[int] = (), writer: Writer | None = None):
        self.ends, self.writer = set(ends), writer
        self.times: list[float] = []
        self.count = 0
        self._seen_prompt = self._ended = False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self.times.append(time.perf_counter())
        token = int(value.reshape(-1)[0])
        if not self._ended:
            self.count += 1
            if self.writer is not None:
                self.writer.put(token)
        self._ended = self._ended or token in self.ends

    def end(self) -> None:
        pass


class Writer:
    """Writes one row's text as its tokens come, holding back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: Any, output: TextIO, texts: int = 1):
        self.tokenizer, self.output = tokenizer, output
        self.ids: list[int] = []
        self.written = ""
        self.head = "[1] " if texts > 1 else ""  # written with the first piece: without one nothing is

    def put(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("�") and text.startswith(self.written):
            self._write(text[len(self.written) :])
            self.written = text

    def finish(self, texts: Sequence[str]) -> None:
        """The rest of the first text, then the others whole."""
        self._write(texts[0][len(self.written) :])
        self._write("\n")
        for number, text in enumerate(texts[1:], 2):
            self._write(f"[{number}] {text}\n")

    def close(self) -> None:
        self.finish([self.tokenizer.decode(self.ids, skip_special_tokens=True)])

    def _write(self, text: str) -> None:
        self.output.write(self.head + text)
        self.output.flush()
        self.head = ""
