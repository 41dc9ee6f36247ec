"""Errors of transformers and torch about a model's files, told in one line that says what to do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text, at most 300 characters; the error's type where it has no text."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]


@contextmanager
def opening(source: object, stays: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Turns errors of libraries at a model's damaged files into a ValueError of one line.

    They raise anything: KeyError, struct.error, UnpicklingError, bare Exceptions. Errors about an option that
    `from_pretrained` doesn't know, or about memory, stay as they are.

    Args:
        stays: errors that say enough by themselves.
    """
    try:
        yield
    except stays:
        raise
    except Exception as error:
        if "unexpected keyword argument" in str(error) or "out of memory" in str(error):
            raise
        why = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        if isinstance(error, pickle.UnpicklingError):
            why = "a .bin file holds more than tensors and could run code when it is opened, so it was not"
        raise ValueError(
            f"{source} can't be opened in transformers {version('transformers')} ({why}): download it again, or save "
            "the model anew with a version of transformers that reads it"
        ) from error
