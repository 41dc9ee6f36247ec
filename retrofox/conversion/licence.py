"""The licence of a model, read from the metadata of its card; a converted model has its base's."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from retrofox.loading.errors import first_line
from retrofox.loading.source import hub_errors

FIELDS = ("license", "license_name", "license_link")
"""Metadata of a card that says under which licence the model is."""


def licence_in(text: str) -> dict[str, str]:
    """The licence fields of a card; none of them where it has no metadata, or damaged metadata."""
    try:
        values = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError):
        return {}
    return {name: str(values[name]) for name in FIELDS if values.get(name)}


def licence_of(source: object, revision: str | None = None) -> dict[str, str]:
    """The licence fields of a model's card, in its directory or on the Hub; empty where none is found.

    Args:
        source: a directory, a Hub id, or anything else, which has no card.
    """
    return read_licence(source, revision)[0]


def read_licence(source: object, revision: str | None = None) -> tuple[dict[str, str], str | None]:
    """(`licence_of` a model, why its card could not be read: None where it was, or where there is none)."""
    if not isinstance(source, (str, Path)):
        return {}, None
    directory = Path(source)
    if directory.is_dir():
        file = directory / "README.md"
        return licence_in(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}, None
    name = str(source)
    if name.count("/") != 1 or name.startswith((".", "/")) or directory.suffix == ".gguf":
        return {}, None
    try:
        file = Path(hf_hub_download(name, "README.md", revision=revision))
    except (*hub_errors(), EntryNotFoundError, ValueError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return {}, None
        return {}, f"the card of {name} could not be read, so its licence is not checked: {first_line(error)}"
    return licence_in(file.read_text(encoding="utf-8", errors="replace")), None


def agreed(own: dict[str, str], base: dict[str, str], base_name: str) -> dict[str, str]:
    """The licence fields of a converted model: its card's own and its base's, which must not contradict each other.

    Raises:
        ValueError: the card names another licence than the base's card does.
    """
    for field in ("license", "license_name"):
        ours, theirs = own.get(field), base.get(field)
        if ours and theirs and ours != theirs:
            raise ValueError(
                f"the card says {field}: {ours}, its base {base_name} says {theirs}: a converted model has its base's "
                "licence; correct README.md"
            )
    return {**base, **own}
