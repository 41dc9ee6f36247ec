"""Errors of transformers and torch about a model's files, told in one line that says what to do."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text, at most 300 characters; the error's type where it has no text."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]


@contextmanager
def reading_gguf(file: str | Path) -> Iterator[None]:
    """Turns errors of transformers in the block, about a damaged or foreign .gguf file, into a ValueError."""
    from huggingface_hub.errors import StrictDataclassError

    known = (struct.error, ValueError, LookupError, TypeError, RuntimeError, OverflowError, StrictDataclassError)
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, known):  # the tokenizers library raises bare ones
            raise
        raise ValueError(
            f"{file} can't be read as a model ({first_line(error)}): download it again, or convert the model that it "
            "was made from"
        ) from error


UNREADABLE_BIN = (ValueError, RuntimeError, LookupError, EOFError, struct.error)
"""Errors of torch.load at a .bin file that is damaged or no pickle, beside those of `NO_MODEL`."""


@contextmanager
def opened_by_transformers(source: object) -> Iterator[None]:
    """Turns errors of transformers and torch in the block, about weights that make no model, into one line."""
    try:
        with makes_a_model(source):
            yield
    except (*UNREADABLE_BIN, ImportError) as error:
        raise ValueError(f"{source} can't be opened: {first_line(error)}") from error


NO_MODEL = (KeyError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""Errors of transformers at configs with values that it doesn't expect."""


@contextmanager
def makes_a_model(source: object) -> Iterator[None]:
    """Turns errors in the block, about configs that make no model or a .bin file with more than tensors, into one line.

    Errors that say enough by themselves, ValueErrors, stay as they are.
    """
    try:
        with understood(f"config.json, or generation_config.json, of {source}"):
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source} holds more than tensors in a .bin file and could run code when it is opened, so it was not: "
            "take a safetensors version of the model"
        ) from error


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Turns errors of transformers in the block, about a config that makes no model, into a ValueError.

    An option that `from_pretrained` doesn't know is the caller's, not the config's: its TypeError stays.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, *NO_MODEL) as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise
        why = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise ValueError(
            f"{what} makes no model in transformers {version('transformers')} ({why}): download it again, or save the "
            "model anew with a version of transformers that reads it"
        ) from error
