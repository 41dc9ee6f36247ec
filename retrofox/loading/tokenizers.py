"""Tokenizers: of a base, of a converted checkpoint, of an adapter's base, of a recipe."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from retrofox.config import Recipe
from retrofox.loading.configs import any_config
from retrofox.loading.errors import first_line, reading_gguf
from retrofox.loading.fla_models import register_outside
from retrofox.loading.source import holds_converted, read_config
from retrofox.loading.trust import own_code, trusts_code
from retrofox.model import configuration_fox
from retrofox.model.configuration_fox import SUPPORTED

logger = logging.getLogger(__name__)


def checkpoint_tokenizer(source: str | Path, out: Path) -> Any:
    """The tokenizer of a converted checkpoint, or of its source where the checkpoint has none."""
    return load_tokenizer(out) or (None if isinstance(source, PreTrainedModel) else load_tokenizer(source))


UNREADABLE = (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError)
"""Errors of transformers at tokenizer files that are damaged, need other libraries, or need code of their own."""


class Unreadable(ValueError):
    """A directory holds tokenizer files, and they make no tokenizer; the text says why, in one line."""


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a Hub id, directory or .gguf file; None where a directory holds none that opens.

    Code beside a tokenizer is not run unless `loading.trust` allows it: such a tokenizer doesn't open. A
    warning says so.
    """
    try:
        return read_tokenizer(source, revision)
    except Unreadable as error:
        logger.warning("the tokenizer in %s can't be opened (%s): going on without it", source, error)
        return None


def read_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a Hub id, directory or .gguf file; None where a directory has no tokenizer files.

    Raises:
        Unreadable: its files are damaged, or need other libraries or code that may not run.
    """
    path = Path(source)
    if str(source).endswith(".gguf"):
        with reading_gguf(path):
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if path.is_dir() and not any(path.glob("tokenizer*")):
        return None
    values = {} if path.is_dir() and not (path / "config.json").is_file() else read_config(source, revision)
    register_outside(values)
    model_type = values.get("model_type", "").removeprefix("fox_")
    if model_type in SUPPORTED:  # else transformers would ask whether to trust the code beside the tokenizer
        config_class = getattr(configuration_fox, f"Fox{SUPPORTED[model_type]}Config")
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    code, trusted = _code(path)
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trusted}
    try:
        return AutoTokenizer.from_pretrained(str(source), **options)
    except Exception as error:
        # At files it can't read, the tokenizers library raises bare Exceptions.
        if not path.is_dir() or not (type(error) is Exception or isinstance(error, UNREADABLE)):
            raise
        if code and not trusted:
            raise Unreadable(
                f"only its own code opens it ({', '.join(code)}), and that code is not run: read it, then give "
                "--trust-remote-code (in Python: with trusting_code())"
            ) from None
        raise Unreadable((str(error).strip() or type(error).__name__).splitlines()[0]) from None


def refuse_damaged_tokenizer(directory: str | Path) -> None:
    """Raises ValueError where a directory's tokenizer files are cut short, or pointers to files that were not fetched.

    Those that are whole and don't open here, for they need code, a library or another version, may open elsewhere.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"):
        file = Path(directory) / name
        if not file.is_file():
            continue
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged, the tokenizer can't be read ({first_line(error)}): download it again, or put a "
                "whole one there"
            ) from None


def _code(directory: Path) -> tuple[list[str], bool]:
    """(files of code beside a directory's tokenizer, whether to run them); those of a Hub id are never run."""
    file = directory / "tokenizer_config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return own_code(values), trusts_code(directory, values)
    except (ValueError, AttributeError):
        return [], False  # a damaged file, which opening the tokenizer will tell


PROBES = ("The quick brown fox, 1 2 3 12345!\n\n  def f(x):\treturn x**2\n", "Überraschung — 東京 …", "<|im_end|></s>")


def open_tokenizer(source: str) -> Any:
    """The tokenizer beside a model, or beside the base of an adapter.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: there is none that opens, or the model needs code of its own that may not run.
    """
    looks_local = source.startswith((".", "/", "~")) or source.endswith(".gguf") or source.count("/") > 1
    if looks_local and not Path(source).exists():
        raise FileNotFoundError(
            f"no such model: {source}: give a directory (converted or not), a .gguf file or a Hub id (org/name)"
        )
    problem = "no tokenizer files there"
    if not holds_converted(source) and not source.endswith(".gguf"):
        any_config(source)  # refuses one that will not open before texts are read for it
    try:
        tokenizer = read_tokenizer(source)
    except FileNotFoundError:
        raise  # no model there at all
    except (OSError, ValueError) as error:
        tokenizer, problem = None, str(error).strip().split("\n")[0]
    adapter = Path(source) / "adapter_config.json"
    if tokenizer is None and adapter.exists():
        return open_tokenizer(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    if tokenizer is None:
        raise ValueError(f"no tokenizer for {source!r} ({problem}); put the tokenizer files beside the model")
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
        mine_ids, their_ids = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, theirs))
        if mine_ids != their_ids:
            raise ValueError(
                f"tokenizer mismatch: {other} splits {text!r} into {their_ids[:8]}..., the model's tokenizer into "
                f"{mine_ids[:8]}...; two models can only be compared on the same tokens"
            )


def tokenizer_of_live(model: PreTrainedModel) -> Any:
    """The tokenizer of the directory or .gguf file that a live model was loaded from; None where there is none."""
    name = getattr(model.config, "_name_or_path", "")
    return load_tokenizer(name) if name and Path(name).is_dir() else None


def recipe_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer that a recipe's texts are read with; raises ValueError where there is none."""
    name = recipe.data.tokenizer or recipe.model
    try:
        tokenizer = read_tokenizer(name)
    except Unreadable as error:
        raise ValueError(
            f"the tokenizer in {name} can't be opened ({error}); or set data.tokenizer to another"
        ) from None
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer: set data.tokenizer to a Hub id or directory that has one")
    return tokenizer
