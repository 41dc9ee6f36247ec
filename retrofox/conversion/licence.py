"""The licence of a model, read from the metadata of its card; a converted model has its base's."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import ModelCard, hf_hub_download

from retrofox.loading.source import hub_answers, hub_errors

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
    """The licence fields of a model's card, in its directory or on the Hub; empty where no card can be read.

    Args:
        source: a directory, a Hub id, or anything else, which has no card.
    """
    if not isinstance(source, (str, Path)):
        return {}
    file = Path(source) / "README.md"
    if not Path(source).exists():
        offline = not hub_answers()
        try:
            file = Path(hf_hub_download(str(source), "README.md", revision=revision, local_files_only=offline))
        except (*hub_errors(), ValueError):  # no such repository or card, no Hub, or not the name of a repository
            return {}
    return licence_in(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}
