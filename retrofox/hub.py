"""A converted checkpoint on the Hub: its model card, and pushing it there, checked before and after."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from retrofox import model
from retrofox.conversion.card import HERE, card_of, own_card
from retrofox.loading import shards
from retrofox.loading.added import check_added, check_finite
from retrofox.loading.source import first_line, hub_errors, read_config
from retrofox.model.configuration_fox import SUPPORTED, FoxSpec
from retrofox.reporting.pushed import FOLDER, report_of, with_section

LEFT_AT_HOME = (".pt", ".pth", ".bin", ".gguf", ".partial", ".lock", ".tmp")
"""Endings of files that are not pushed: optimizer states, other formats, work in progress."""


def check_complete(directory: Path) -> None:
    """Raises ValueError where a directory is not a complete converted checkpoint that loads anywhere.

    Checked: config.json with spec and auto_map, every remote-code file, every shard by header and size, every
    tensor that the spec asks for, finite, a card with metadata where there is one.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{directory} is a LoRA adapter: merge it first (`retrofox merge {directory} OUT`), push OUT")
    values = read_config(directory)
    model_type = str(values.get("model_type"))
    if model_type.removeprefix("fox_") not in SUPPORTED or not model_type.startswith("fox_"):
        raise ValueError(f"{directory} has model_type {model_type}: only converted models are pushed")
    FoxSpec.from_dict(values.get("fox"))
    code = {f"{name.partition('.')[0]}.py" for name in (values.get("auto_map") or {}).values()}
    travelling = {file.name for file in Path(model.__path__[0]).glob("*.py")} - {"__init__.py"}
    missing = [name for name in sorted(travelling | code) if not (directory / name).is_file()]
    if missing or not code:
        raise ValueError(
            f"{directory} lacks its code ({', '.join(missing) or 'auto_map'}): save it with save_pretrained"
        )
    found = shards.find(directory)
    check_added(directory, values, found)
    check_finite(directory, found)
    text = own_card(directory)
    if text is not None:
        data = ModelCard(text, ignore_metadata_errors=False).data.to_dict()
        if "custom_code" not in (data.get("tags") or ()):
            raise ValueError(
                f"{directory}/README.md lacks the tag custom_code in its metadata, which announces auto_map"
            )


def push(
    directory: str | Path,
    repo: str,
    *,
    private: bool = False,
    message: str | None = None,
    report: str | Path | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Uploads a converted checkpoint to the Hub in one commit and verifies each file's hash there.

    The card's placeholder for the repository becomes its name; a directory without a card gets one. A report's page
    and JSON go along, and its table into the card.

    Args:
        repo: "org/name"; created where it doesn't exist.
        private: whether a new repository is private.
        report: folder that `retrofox report` wrote; None = `report` in the directory, if it is there.
        dry_run: check and list, contact nothing.

    Returns:
        repo, files (path -> bytes), bytes; unless dry_run also commit and verified, how many files were compared.

    Raises:
        ValueError: the checkpoint is incomplete, `repo` is not a repository name, the upload failed, a file differs,
            or the report is of other weights.
    """
    directory = Path(directory)
    check_complete(directory)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is not the name of a Hub repository (org/name): {error}") from error
    text = own_card(directory) or card_of(directory)
    contents: dict[str, bytes | Path] = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        if name.parts[0] == FOLDER:
            continue  # what of it goes along is added below
        if file.is_file() and not name.name.endswith(LEFT_AT_HOME) and not any(part[0] == "." for part in name.parts):
            contents[name.as_posix()] = file
    measured = report_of(directory, None if report is None else Path(report))
    if measured is not None:
        section, files = measured
        text = with_section(text, section)
        contents |= files
    contents["README.md"] = text.replace(HERE, repo).encode()
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
    found: dict[str, Any] = {"repo": repo, "files": sizes, "bytes": sum(sizes.values())}
    if dry_run:
        return found
    api = HfApi()
    operations = [CommitOperationAdd(name, c if isinstance(c, bytes) else str(c)) for name, c in contents.items()]
    title = message or f"Upload {directory.absolute().name} with retrofox"
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message=title)
        there = {
            f.path: f for f in api.list_repo_tree(repo, recursive=True, revision=commit.oid) if isinstance(f, RepoFile)
        }
    except hub_errors() as error:
        raise ValueError(
            f"{repo} could not be uploaded to {constants.ENDPOINT}: {first_line(error)}; check the network, and "
            "`hf auth login` with a token that may write"
        ) from error
    differing = [name for name, content in contents.items() if name not in there or not _same(content, there[name])]
    if differing:
        raise ValueError(f"{', '.join(differing[:5])} at {repo} differ from what was uploaded: push again")
    return found | {"commit": commit.oid, "verified": len(contents)}


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
