"""Putting files into a repository of the Hub: all or nothing, private where asked, each file's hash compared after."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from retrofox.loading.errors import first_line
from retrofox.loading.source import hub_errors

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
    """Uploads files (path -> content) in one commit and compares their hashes there; returns the commit.

    Weights of an earlier upload that this one does not replace are deleted in the same commit: they might be loaded.

    Raises:
        ValueError: there is no token, it may not write, the repository is public where a private one was asked for, or
            the upload failed: one line that says what is there now.
    """
    if get_token() is None:
        raise ValueError(f"no Hub token: `hf auth login`, or set HF_TOKEN to one that may write to {repo}")
    api = HfApi()
    operations = [CommitOperationAdd(name, c if isinstance(c, bytes) else str(c)) for name, c in contents.items()]
    with _one_line(api, repo, "nothing was changed there"):
        new = not api.repo_exists(repo)
        api.create_repo(repo, private=private, exist_ok=True)
    with _one_line(api, repo, "nothing of it is visible: files appear in one commit", delete=new):
        if private and not api.repo_info(repo).private:
            raise ValueError(
                f"{repo} is public and --private was asked for: nothing was uploaded; make it private in its settings, "
                "or choose another name"
            )
        older = set() if new else set(api.list_repo_files(repo)) - contents.keys()
        stale = sorted(name for name in older if WEIGHTS.fullmatch(name))
        commit = _committed(api, repo, [*operations, *map(CommitOperationDelete, stale)], title, new)
    with _one_line(api, repo, "it is uploaded, and not verified"):
        found = api.list_repo_tree(repo, recursive=True, revision=commit.oid)
        there = {entry.path: entry for entry in found if isinstance(entry, RepoFile)}
    differing = [name for name, content in contents.items() if name not in there or not _same(content, there[name])]
    if differing:
        raise ValueError(f"{', '.join(differing[:5])} at {repo} differ from what was uploaded: push again")
    return commit.oid


def _committed(api: HfApi, repo: str, operations: list[Any], title: str, new: bool) -> CommitInfo:
    try:
        return api.create_commit(repo, operations, commit_message=title)
    except hub_errors() as error:
        if new or getattr(error, "response", None) is not None:
            raise
        raise ValueError(
            f"the connection to {constants.ENDPOINT} broke off ({first_line(error)}) before it was known whether "
            f"{repo} has changed: all files are there in one commit, or none; push again"
        ) from error
    except ValueError as error:
        why = " ".join(str(error).split())[:300]  # about the card's metadata, in several lines
        raise ValueError(f"the Hub refuses to take {repo}: {why}; nothing was uploaded") from error


@contextlib.contextmanager
def _one_line(api: HfApi, repo: str, state: str, delete: bool = False) -> Iterator[None]:
    """Says in one line what the Hub refused and what is there now; deletes a repository made for this upload."""
    try:
        yield
    except BaseException as error:
        if delete:
            try:
                api.delete_repo(repo, missing_ok=True)
            except hub_errors():
                state += f"; {repo} was made and is empty: delete it in its settings"
        refused = error.__cause__ if isinstance(error, RuntimeError) else error  # of a file in the middle of several
        if not isinstance(refused, hub_errors()):
            raise
        raise ValueError(
            f"{repo} could not be uploaded to {constants.ENDPOINT}: {_reason(refused)}; {state}"
        ) from error


def _reason(error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the Hub does not know this token: `hf auth login` again, or set HF_TOKEN"
    if status == 403:
        return "this token may not write there: take one with write access to that user or organisation"
    return f"{first_line(error)}; check the network, and `hf auth login` with a token that may write"


def _same(content: bytes | Path, there: RepoFile) -> bool:
    """Whether a file on the Hub has the content's hash: SHA-256 where it is stored by LFS, else git's blob hash."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    digest = hashlib.sha256() if there.lfs is not None else hashlib.sha1(b"blob %d\0" % size)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with open(content, "rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest() == (there.blob_id if there.lfs is None else there.lfs.sha256)
