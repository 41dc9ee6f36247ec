"""Conversations to tokens by the tokenizer's chat template, with the tokens that the assistant wrote marked.

An assistant's turn begins where the template's generation prompt ends and goes on to the end of the turn's text, its
end mark (such as <|im_end|>) included. Special tokens spelled out in a message are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrofox.data.backend import backend, special_literals, valid_unicode
from retrofox.data.read import Messages
from retrofox.loading.errors import first_line

VERSION = 2
"""Part of a shard's identity: change it when the tokens or marks of conversations change."""
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Around the number of a special token that a message spells out, while the template is applied (private use)."""
_PROBE = _OPEN + _CLOSE
_SPELLED_OUT = re.compile(f"({_OPEN}[0-9]+{_CLOSE})")


class ChatEncoder:
    """Tokens of a conversation and which of them the assistant wrote.

    Raises:
        ValueError: the tokenizer has no chat template, or no Rust tokenizer that gives the same tokens.
    """

    def __init__(self, tokenizer: Any, split_special_tokens: bool = True):
        self.tokenizer, self.split_special_tokens = tokenizer, split_special_tokens
        self.fast, self.literal, self.eos = backend(tokenizer), special_literals(tokenizer), tokenizer.eos_token_id
        self.to_hide = re.compile(f"{self.literal.pattern}|{_SPELLED_OUT.pattern}")
        self.spelling = backend(tokenizer)  # reads special tokens as plain text; two, since threads share them
        if not getattr(tokenizer, "chat_template", None) or self.fast is None:
            lacks = "no chat template" if self.fast is not None else "no fast form, which chat needs"
            raise ValueError(f"the tokenizer has {lacks}: set data.tokenizer to that of an Instruct model")
        self.spelling.encode_special_tokens = True

    def __call__(self, messages: Messages, name: str) -> tuple[list[int], list[bool]]:
        """(tokens, whether the assistant wrote each); the first message is not learnt: nothing asks for it.

        Raises:
            ValueError: the template refuses these messages, or does not show where an assistant's turn is.
        """
        spelled: dict[str, str] = {}
        text, turns = self._rendered(self._hidden(messages, spelled), name)
        ids: list[int] = []
        learnt: list[bool] = []
        at = 0
        for piece in _SPELLED_OUT.split(text):
            hidden = spelled.get(piece)
            fast, said = (self.fast, piece) if hidden is None else (self.spelling, hidden)
            (encoding,) = fast.encode_batch([said], add_special_tokens=False)  # without the interpreter's lock
            ids += encoding.ids
            for begin, end in encoding.offsets if hidden is None else [(0, len(piece))] * len(encoding.ids):
                # A token across the start, such as " it" after "assistant: ", is one that the assistant writes.
                learnt.append(any(at + begin < stop and at + end > start for start, stop in turns))
            at += len(piece)
        spoken = text.rstrip()
        marked = any(mark.end() == len(spoken) for mark in self.literal.finditer(spoken))
        if turns and turns[-1][1] >= len(spoken) and not marked and self.eos is not None:
            # A template without an end mark would teach the model never to end.
            ids, learnt = [*ids, self.eos], [*learnt, True]
        return ids, learnt

    def _hidden(self, messages: Messages, spelled: dict[str, str]) -> Messages:
        """The messages with a mark in place of each special token, or mark, that they spell out; `spelled` has them."""
        if not self.split_special_tokens:
            return messages

        def mark(match: re.Match[str]) -> str:
            spelled[f"{_OPEN}{len(spelled)}{_CLOSE}"] = match[0]
            return next(reversed(spelled))

        return [
            {**message, "content": self.to_hide.sub(mark, message["content"])}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def _rendered(self, messages: Messages, name: str) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and (start, stop) of the assistant's turns in it."""
        about = f"{name}: the chat template refuses these messages"
        text = rendered(self.tokenizer, messages, about, prompts=False)
        turns = []
        for number, message in enumerate(messages):
            if not isinstance(message["content"], str):
                probed = [*messages[:number], {**message, "content": _PROBE}, *messages[number + 1 :]]
                found = self._tried(probed)
                if _PROBE in found and found.replace(_PROBE, str(message["content"])) == text:
                    raise ValueError(
                        f"{about} as they are: it would spell out {message['content']!r:.60}, as Python writes it, in "
                        f"message {number + 1}: make it text, or leave such conversations out"
                    )
            if message.get("tool_calls"):
                silent = [*messages[:number], {**message, "tool_calls": None}, *messages[number + 1 :]]
                if self._tried(silent) == text:
                    raise ValueError(
                        f"{name}: the chat template leaves out the tool_calls of message {number + 1}: write them into "
                        "its content, or leave such conversations out"
                    )
            if message["role"] != "assistant" or not number:
                continue
            before = rendered(self.tokenizer, messages[:number], about)
            after = rendered(self.tokenizer, messages[: number + 1], about, prompts=False)
            mark = self.literal.search(text, len(before))  # the first special token after it
            stop = len(after.rstrip()) if text.startswith(after) else mark and mark.end()
            if not text.startswith(before) or stop is None:
                raise ValueError(
                    f"{name}: the chat template writes message {number + 1} otherwise when more follow, so the "
                    "assistant's words can't be found: set data.tokenizer to one with another template"
                )
            turns.append((len(before), stop))
        return text, turns

    def _tried(self, messages: Messages) -> str:
        """The text of changed messages, empty where the template refuses these."""
        try:
            return rendered(self.tokenizer, messages, "", prompts=False)
        except ValueError:
            return ""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], about: str, *, prompts: bool = True) -> str:
    """A conversation's text by the tokenizer's chat template; `prompts`: with what comes before the answer."""
    try:
        return valid_unicode(tokenizer.apply_chat_template(messages, add_generation_prompt=prompts, tokenize=False))
    except Exception as error:  # whatever an expression in it may raise
        kinds = [type(message["content"]).__name__ for message in messages]
        odd = [f"; message {n} holds {kind}, not text" for n, kind in enumerate(kinds, 1) if kind != "str"]
        raise ValueError(f"{about}: {first_line(error)}{''.join(odd[:1])}") from error
