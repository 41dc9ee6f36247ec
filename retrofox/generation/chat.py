"""chat: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from retrofox.generation.generate import complete, end_tokens, new_cache, render
from retrofox.generation.sampling import check_sampling
from retrofox.generation.streaming import Meter, Writer
from retrofox.loading.loaded_model import LoadedModel, open_model


class ChatSession:
    """A conversation whose cache is kept over turns: each turn computes only the tokens that are new.

    The chat template renders the whole conversation at every turn; the cache is cut back to the tokens that the new
    rendering shares with it (a template may strip what the model wrote) and continues from there.

    Attributes:
        messages: the conversation, {"role", "content"} each.
        reused_tokens: tokens of the last turn's prompt that came from the cache.
    """

    def __init__(self, opened: LoadedModel, system: str | None = None):
        self.opened, self.system = opened, system
        self.reset()
        # Raises where there is no template, or one that refuses a system message.
        render(opened.tokenizer, [*self.messages, {"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        """Forgets the conversation but for the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.drop_cache()

    def drop_cache(self) -> None:
        self.cache = new_cache(self.opened.model)
        self.cached_ids: list[int] = []
        self.reused_tokens = 0

    def reply(self, text: str, max_new_tokens: int, streamer: BaseStreamer | None = None, **sampling: Any) -> str:
        """The model's answer to one more message of the user; sampling as in `complete`."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = render(self.opened.tokenizer, messages)
        self._cut_back(ids)
        unread = 0 if streamer is None else len(ids) - self.reused_tokens
        options = {"streamer": streamer, "cache": self.cache, "unread": unread, **sampling}
        try:
            [new] = complete(self.opened, [ids], max_new_tokens, **options)
        except BaseException:  # Ctrl-C, out of memory: the cache holds part of a call
            self.drop_cache()
            raise
        self.cached_ids = [*ids, *new][: self.cache.get_seq_length()]
        answer = self.opened.tokenizer.decode(new, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _cut_back(self, ids: list[int]) -> None:
        """Crops the cache to the prefix it shares with `ids`, one token being left to compute."""
        shared = 0
        limit = min(len(self.cached_ids), len(ids) - 1)
        while shared < limit and ids[shared] == self.cached_ids[shared]:
            shared += 1
        if shared < len(self.cached_ids):
            try:
                self.cache.crop(shared - len(self.cached_ids))
            except (RuntimeError, ValueError):  # it has dropped tokens that would be needed again
                self.drop_cache()
                shared = 0
        self.reused_tokens = shared


def chat(
    model: str | os.PathLike | PreTrainedModel,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    read: Callable[[str], str] = input,
    output: TextIO | None = None,
) -> list[dict[str, str]]:
    """Talks with a model turn by turn until /exit, end of input or Ctrl-C; returns the conversation.

    /reset starts over; Ctrl-C while the model writes stops that answer. `read` asks for a line, as `input` does. top_p
    is 0.95 where none is given and tokens are drawn.

    Raises:
        ValueError: the tokenizer has no chat template, or bad options.
    """
    if top_p is None:
        top_p = 1.0 if temperature == 0 else 0.95
    check_sampling([system or ""], max_new_tokens, temperature, top_p, seed)
    opened = open_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
    session, place = ChatSession(opened, system), output or sys.stdout
    print("/reset starts over, /exit or Ctrl-D ends", file=sys.stderr)
    turn = 0
    while (text := _ask(read)) is not None:
        if text == "/reset":
            session.reset()
        if text in ("", "/reset"):
            continue
        writer = Writer(opened.tokenizer, place)
        meter = Meter(end_tokens(opened), writer)
        started = time.perf_counter()
        try:
            own = None if seed is None else seed + turn
            session.reply(text, max_new_tokens, meter, temperature=temperature, top_p=top_p, seed=own)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            continue
        writer.close()
        seconds = time.perf_counter() - started
        rate = meter.count / seconds
        reused = f"{session.reused_tokens} prompt tokens from the cache"
        print(f"[{meter.count} tokens, {rate:.1f} tokens/s, {reused}]", file=sys.stderr)
        turn += 1
    return session.messages


def _ask(read: Callable[[str], str]) -> str | None:
    try:
        text = read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text in ("/exit", "/quit") else text
