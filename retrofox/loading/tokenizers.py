"""Tokenizers: of a base, of a converted checkpoint, of an adapter's base, of a recipe."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from retrofox.loading.adapter import base_of
from retrofox.loading.configs import any_config
from retrofox.loading.errors import first_line
from retrofox.loading.source import holds_converted, read_config

logger = logging.getLogger(__name__)
PROBES = ("The quick brown fox, 1 2 3 12345!\n\n  def f(x):\treturn x**2\n", "Überraschung — 東京 …", "<|im_end|></s>")


class Unreadable(ValueError):
    """There are tokenizer files, and they make no tokenizer; the text says why, in one line."""


def read_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a Hub id, directory or .gguf file; None where a directory has no tokenizer files.

    Raises:
        FileNotFoundError: no such model.
        Unreadable: its files are damaged, or need other libraries, or code of their own, which is not run.
    """
    path = Path(source)
    where, options = str(source), {"revision": revision or "main"}
    if where.endswith(".gguf"):
        where, options = str(path.parent), {"gguf_file": path.name}
    elif not path.is_dir() or (path / "config.json").is_file():
        read_config(source, revision)  # says where there is no such model
    if path.is_dir() and not any(path.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:  # the tokenizers library raises bare ones at files that it can't read
        raise Unreadable(f"the tokenizer of {source} can't be opened: {first_line(error)}") from error


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """As `read_tokenizer`, but None, with a warning, where it does not open."""
    try:
        return read_tokenizer(source, revision)
    except Unreadable as error:
        logger.warning("%s; going on without it", error)
        return None


def tokenizer_of_live(model: PreTrainedModel) -> Any:
    """The tokenizer of the directory or .gguf file that a live model was loaded from; None where there is none."""
    name = getattr(model.config, "_name_or_path", "")
    return load_tokenizer(name) if name and Path(name).is_dir() else None


def open_tokenizer(source: str) -> Any:
    """The tokenizer beside a model, or beside the base of an adapter.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it has no tokenizer that opens, or needs code of its own that may not run.
    """
    if not holds_converted(source):
        any_config(source)  # refuses one that will not open before texts are read for it
    elif (Path(source) / "adapter_config.json").exists() and not any(Path(source).glob("tokenizer*")):
        return open_tokenizer(base_of(Path(source)))
    return _required(source, "put the tokenizer files beside the model")


def recipe_tokenizer(tokenizer: str | None, model: str) -> Any:
    """The tokenizer that a recipe's texts are read with, its model's by default; ValueError where there is none."""
    return _required(tokenizer or model, "set data.tokenizer to a Hub id or directory that has one")


def _required(source: str, remedy: str) -> Any:
    try:
        tokenizer, why = read_tokenizer(source), f"{source} has no tokenizer"
    except Unreadable as error:
        tokenizer, why = None, str(error)
    if tokenizer is None:
        raise ValueError(f"{why}; {remedy}")
    return tokenizer


def require_same_tokenizer(tokenizer: Any, other: Any) -> None:
    """Raises ValueError where a model to compare with reads text as other tokens.

    Encodings of one text are compared, rather than files: a .gguf's tokenizer is the same one in another form. A live
    model reads the token ids it is given.
    """
    if not isinstance(other, (str, os.PathLike)):
        return
    theirs = open_tokenizer(os.fspath(other))
    for text in PROBES:
        mine, its = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, theirs))
        if mine != its:
            raise ValueError(
                f"tokenizer mismatch: {other} reads {text!r} as {theirs.convert_ids_to_tokens(its)}, the model's "
                f"tokenizer as {tokenizer.convert_ids_to_tokens(mine)}; compare models of the same tokens"
            )


def keep_tokenizer(source: Path, out: Path) -> None:
    """Saves the tokenizer of a base as it opens, where its files, copied into `out`, open as one that reads otherwise.

    transformers 5 chooses a tokenizer's class by the type of its model, too, and a converted model is of another type.
    """
    try:
        tokenizer = read_tokenizer(source)
    except Unreadable:  # as said when texts are read with it
        return
    if tokenizer is not None and _read_otherwise(tokenizer, out):
        tokenizer.save_pretrained(out)
        if _read_otherwise(tokenizer, out):
            logger.warning("beside the converted model this tokenizer reads text otherwise: take that of %s", source)


def _read_otherwise(tokenizer: Any, directory: Path) -> bool:
    other = load_tokenizer(directory)
    return other is None or any(tokenizer(text)["input_ids"] != other(text)["input_ids"] for text in PROBES)
