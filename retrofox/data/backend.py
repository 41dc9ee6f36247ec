"""The Rust tokenizer inside a tokenizer of transformers, its special tokens, and its fingerprint."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any

PROBE = "Hello  world,\n\n it's 1234 é!\tfoo_bar"


def backend(tokenizer: Any) -> Any:
    """The Rust tokenizer inside, without truncation or padding; None where it alone gives other tokens."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    inner = copy.deepcopy(inner)
    inner.no_truncation()
    inner.no_padding()
    same = inner.encode(PROBE).ids == _probe(tokenizer)
    return inner if same else None


def _probe(tokenizer: Any) -> list[int]:
    return tokenizer(PROBE, truncation=False, verbose=False)["input_ids"]


def fingerprint(tokenizer: Any) -> str:
    """sha256 (first 32 digits) of everything that decides which tokens a text becomes."""
    inner = backend(tokenizer)
    if inner is not None:
        # Merges in a fixed order; the vocabulary is a map, and maps are written in no fixed order.
        content = json.dumps(json.loads(inner.to_str()), sort_keys=True)
    else:
        probe = _probe(tokenizer)
        content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), probe])
    return hashlib.sha256(f"{content}\n{tokenizer.eos_token_id}\n{len(tokenizer)}".encode()).hexdigest()[:32]


def valid_unicode(text: str) -> str:
    """Lone surrogates, legal in JSON, are no Unicode text: replaced as decoding would."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_literals(tokenizer: Any) -> re.Pattern[str]:
    """Finds the tokenizer's special tokens, such as </s>, spelled out in a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = [token.content for token in added.values() if token.special and token.content]
    longest_first = sorted(found, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # that matches nothing
