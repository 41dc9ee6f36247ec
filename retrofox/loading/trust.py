"""Code beside a model's weights: run only where the user asked for it, and then said."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_trusting: ContextVar[bool] = ContextVar("_trusting", default=False)


@contextmanager
def trusting_code(allowed: bool = True) -> Iterator[None]:
    """Lets models and tokenizers that are opened in the block run the code beside them (`--trust-remote-code`)."""
    before = _trusting.set(allowed)
    try:
        yield
    finally:
        _trusting.reset(before)


def trusts_code(source: object, values: Mapping[str, Any]) -> bool:
    """The `trust_remote_code` to open a model or tokenizer with; where its code will run, stderr says which.

    Args:
        values: config.json or tokenizer_config.json as a dict.
    """
    code = own_code(values)
    if not (_trusting.get() and code):
        return False
    print(f"--trust-remote-code: running the code of {source}: {', '.join(code)}", file=sys.stderr)
    return True


def refuse_untrusted(source: object, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a model that only its own code can open, where that code may not run."""
    model_type, code = values.get("model_type"), own_code(values)
    if model_type in CONFIG_MAPPING or (_trusting.get() and code):
        return
    if not code:
        raise ValueError(f"{source} has model_type {model_type!r}, which this version of transformers does not know")
    raise ValueError(
        f"{source} has model_type {model_type!r}, which only its own code opens ({', '.join(code)}), and that code is "
        "not run: read it, then give --trust-remote-code (in Python: with trusting_code())"
    )


def own_code(values: Mapping[str, Any]) -> list[str]:
    """The files of code that an `auto_map` names: "modeling_x.py", with the repository where it is another's."""
    entries = values.get("auto_map")
    names: list[Any] = []
    for entry in entries.values() if isinstance(entries, dict) else [entries]:
        names += entry if isinstance(entry, list | tuple) else [entry]
    return sorted({f"{name.rpartition('.')[0] or name}.py" for name in names if isinstance(name, str)})
