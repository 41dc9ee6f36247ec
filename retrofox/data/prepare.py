"""prepare: tokenises a recipe's data into shards."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from retrofox.config import DataConfig, Recipe
from retrofox.data.packed import PackedDataset
from retrofox.data.shards import Manifest, prepare_sources
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.support.files import FULL
from retrofox.support.interruptions import Interruptions

logger = logging.getLogger(__name__)


def prepare(recipe: Recipe, *, progress: bool = True) -> dict[str, Any]:
    """Tokenises a recipe's training and evaluation data into shards in `data.cache`; finished ones are reused.

    Returns:
        Counts: {"cache", "tokenizer", "train": {...}, "eval": {...} or None}, each part with its
        tokens, documents, shards written and reused, and the same per source; "train" also has, per sequence length
        of the stages, the number of windows and their fill ratio.

    Raises:
        FileNotFoundError, ValueError: see `prepare_sources`; or the model has no tokenizer.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, finished shards kept.
    """
    with Interruptions("finished token shards are kept"):
        tokens = prepare_data(recipe.data, recipe_tokenizer(recipe.data.tokenizer, recipe.model), progress)
    if recipe.data.self_chat and progress:
        print("data.self_chat: these conversations are made when training begins", file=sys.stderr)
    train = tokens.train.summary()
    packed = [PackedDataset(tokens.train, length) for length in sorted({s.sequence_length for s in recipe.stages})]
    train["windows"] = {
        str(data.sequence_length): {"windows": len(data), "fill": round(data.fill, 6)} for data in packed
    }
    return {
        "cache": str(recipe.data.cache_dir),
        "tokenizer": recipe.data.tokenizer or recipe.model,
        "train": train,
        "eval": None if tokens.eval is None else tokens.eval.summary(),
    }


@dataclass
class PreparedTokens:
    """The manifests of a recipe's training and held-out tokens."""

    train: Manifest
    eval: Manifest | None


def prepare_data(data: DataConfig, tokenizer: Any, progress: bool) -> PreparedTokens:
    """Tokenises what the cache lacks of a recipe's data; raises as `prepare_sources`."""
    if both := {source.path for source in data.train} & {source.path for source in data.eval}:
        logger.warning("the held-out loss will be of texts that are trained on: %s", ", ".join(sorted(map(str, both))))
    options: dict[str, Any] = {"progress": progress, "text_field": data.text_field}
    options["split_special_tokens"] = data.split_special_tokens
    try:
        train = prepare_sources(data.read_as(), tokenizer, data.cache_dir, **options)
        held_out = prepare_sources(data.eval, tokenizer, data.cache_dir, **options) if data.eval else None
    except OSError as error:
        if error.errno not in FULL:
            raise
        why = f"{error.strerror}; free some disk space or name another `data.cache`: finished shards are reused"
        raise OSError(f"{data.cache_dir} could not be written: {why}") from error
    tokens = PreparedTokens(train, held_out)
    parts = [part for part in (tokens.train, tokens.eval) if part is not None]
    made, reused = sum(part.made for part in parts), sum(part.reused for part in parts)
    if progress and reused:
        rest = "" if made else ": nothing to tokenise"
        print(f"{reused} of {made + reused} token shards were in {data.cache_dir}{rest}", file=sys.stderr)
    return tokens
