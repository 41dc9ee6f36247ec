"""prepare: tokenises a recipe's data into shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrofox.data.shards import prepare_sources
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.support.interruptions import Interruptions

if TYPE_CHECKING:
    from retrofox.config import Recipe
from retrofox.data.packed import PackedDataset


def prepare(recipe: Recipe, *, progress: bool = True) -> dict[str, Any]:
    """Tokenises a recipe's training and evaluation data into shards in `data.cache`; finished ones are reused.

    Returns:
        Counts: {"cache", "tokenizer", "train": {...}, "eval": {...} or None}, each part with its manifest's path,
        tokens, documents, shards written and reused, and the same per source; "train" also has, per sequence length
        of the stages, the number of windows and their fill ratio.

    Raises:
        FileNotFoundError, ValueError: see `prepare_sources`; or the model has no tokenizer.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, finished shards kept.
    """
    with Interruptions("finished token shards are kept"):
        return _prepare(recipe, progress)


def _prepare(recipe: Recipe, progress: bool) -> dict[str, Any]:
    name = recipe.data.tokenizer or recipe.model
    tokenizer = recipe_tokenizer(recipe)
    report: dict[str, Any] = {"cache": str(recipe.data.cache_dir), "tokenizer": name}
    for part, sources in (("train", recipe.data.read_as()), ("eval", recipe.data.eval)):
        report[part] = None
        if sources:
            manifest = prepare_sources(
                sources,
                tokenizer,
                recipe.data.cache_dir,
                workers=recipe.data.workers,
                progress=progress,
                text_field=recipe.data.text_field,
                split_special_tokens=recipe.data.split_special_tokens,
            )
            report[part] = manifest.summary()
            if part == "train":
                packed = [PackedDataset(manifest, length) for length in sorted(_lengths(recipe))]
                report[part]["windows"] = {
                    str(data.sequence_length): {"windows": len(data), "fill": round(data.fill, 6)} for data in packed
                }
    return report


def _lengths(recipe: Recipe) -> set[int]:
    return {stage.sequence_length for stage in recipe.stages}
