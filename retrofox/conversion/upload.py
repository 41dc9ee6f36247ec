"""Putting files into a repository of the Hub: in one commit, private where asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

WEIGHTS = re.compile(r"((pytorch_|adapter_)?model)[^/]*\.(safetensors|bin)(\.index\.json)?|adapter_config\.json")
"""Files from which a repository's weights are loaded."""


def check_repo(repo: str) -> None:
    """Raises ValueError for what is not the name of a repository."""
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:  # the Hub would make user/name of a name, and look for the name alone
            raise HFValidationError("the user or organisation is missing")
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is not the name of a Hub repository (org/name): {error}") from error


def publish(repo: str, contents: Mapping[str, bytes | Path], private: bool, title: str) -> str:
    """Uploads files (path -> content) in one commit; returns it.

    Weights of an earlier upload that this one does not replace are deleted in the same commit: they might be loaded.
    Where it fails, none of the files is visible, or all are.

    Raises:
        ValueError: the repository is public where a private one was asked for.
        OSError: the Hub refuses it, as without a token that may write.
    """
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise ValueError(
            f"{repo} is public and --private was asked for: nothing was uploaded; make it private in its settings, or "
            "choose another name"
        )
    stale = [name for name in api.list_repo_files(repo) if name not in contents and WEIGHTS.fullmatch(name)]
    add = [CommitOperationAdd(name, c if isinstance(c, bytes) else str(c)) for name, c in contents.items()]
    return api.create_commit(repo, [*add, *map(CommitOperationDelete, stale)], commit_message=title).oid
