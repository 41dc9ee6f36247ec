"""Raw records to texts or to conversations: UTF-8, lines of JSON with a field."""

from __future__ import annotations

import json
from typing import Any

from retrofox.data.read import Batch

Messages = list[dict[str, Any]]
"""A conversation: {"role": ..., "content": ...} each."""


def texts_of(batch: Batch, field: str) -> tuple[list[str], list[str]]:
    """The texts of a batch and their names.

    Raises:
        ValueError: not UTF-8, not JSON, no such field; the text says which record.
    """
    if batch.kind == "json":
        return [_text(field_of(line, name, field), name, field) for line, name in _records(batch)], batch.names
    if batch.kind == "bytes":
        return [utf8(item, name) for item, name in _records(batch)], batch.names
    return batch.items, batch.names


def conversations_of(batch: Batch, field: str) -> list[Messages]:
    """The conversations of a batch; an empty one where the field is null.

    Raises:
        ValueError: a record of another form; the text says which.
    """
    if batch.kind == "json":
        found = [(field_of(line, name, field), name) for line, name in _records(batch)]
    else:
        found = _records(batch)
    for messages, name in found:
        if messages and not (isinstance(messages, list) and all(map(_is_message, messages))):
            raise ValueError(
                f"{name}: field {field!r} must hold a list of {{role, content}}, got {str(messages)[:100]}"
            )
    return [messages or [] for messages, _ in found]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _records(batch: Batch) -> list[tuple[Any, str]]:
    return list(zip(batch.items, batch.names, strict=True))


def field_of(line: bytes, name: str, field: str) -> Any:
    """The value of a field of a line of JSON.

    Raises:
        ValueError: no JSON object, or no such field in it.
    """
    text = utf8(line, name)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets in one another
        raise ValueError(f"{name}: not a line of JSON: {error}") from None
    if not isinstance(value, dict) or field not in value:
        has = ", ".join(map(repr, value)) if isinstance(value, dict) and value else type(value).__name__
        raise ValueError(f"{name}: no field {field!r}; the record has {has}: set text_field")
    return value[field]


def _text(value: Any, name: str, field: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name}: field {field!r} must hold text, got {type(value).__name__}")
    return value or ""


def utf8(data: bytes, name: str) -> str:
    """Decodes a text, its byte order mark left out.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{name}: not UTF-8 text ({why}): convert or remove it") from None
