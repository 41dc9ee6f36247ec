"""A converted checkpoint on the Hub: its model card, and pushing it there, checked before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file

from retrofox.anatomy import is_new_tensor
from retrofox.conversion.card import HERE, adapter_card, card, history, licence_in, licence_of
from retrofox.fox_spec import FoxSpec
from retrofox.loading import shards
from retrofox.loading.adapter import WEIGHTS, base_of
from retrofox.loading.converted import load, require_finite
from retrofox.loading.errors import first_line
from retrofox.loading.source import hub_errors, read_config

LEFT_AT_HOME = (".pt", ".pth", ".bin", ".pkl", ".pyc", ".gguf", ".partial", ".lock", ".tmp")
"""Endings of files that are not pushed: optimizer states, other formats, work in progress."""
OF_TRAINING = (".", "checkpoint-", "__pycache__", "events.out.tfevents.")
"""How names of a training's folders and files begin that are not pushed."""
WEIGHT_FILES = re.compile(r"((pytorch_|adapter_)?model)[^/]*\.(safetensors|bin)(\.index\.json)?|adapter_config\.json")
"""Files from which a repository's weights are loaded."""


def check_complete(directory: Path) -> None:
    """Raises ValueError or FileNotFoundError where a directory is no converted checkpoint that loads anywhere.

    Checked: config.json with spec and auto_map, the code that it names, every shard by header and size, every tensor
    that the model needs, all of them finite.
    """
    config = read_config(directory)
    if "fox" not in config:
        raise ValueError(f"{directory} is no converted model: make one by `retrofox convert`, and push that")
    entries = config.get("auto_map") or {}
    code = {f"{name.partition('.')[0]}.py" for name in entries.values()}
    if shards.find(directory).pickled or not code or not all((directory / name).is_file() for name in code):
        raise ValueError(
            f"{directory} lacks its code ({', '.join(code) or 'auto_map'}), or keeps its weights in a .bin file: save "
            "it with save_pretrained"
        )
    require_finite(directory, load(directory).state_dict())


def push(
    directory: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, base: str | None = None
) -> dict[str, Any]:
    """Uploads a converted checkpoint, or an adapter of one, to the Hub in one commit.

    The card's placeholder for the repository becomes its name; a directory without a card gets one, with the base's
    licence. Beside a run's recipe.yaml the card shows recipe and loss.

    Args:
        repo: "org/name"; created where it doesn't exist.
        private: the repository must be private: a new one is made so, a public one is refused.
        dry_run: check and list, upload nothing.
        base: for an adapter: the Hub id of its converted base, where the adapter names it by a local path.

    Returns:
        repo, files (path -> bytes), bytes, licence, and the commit unless dry_run.

    Raises:
        ValueError: the checkpoint is incomplete, or `repo` is not a repository name.
        OSError: the Hub can't be reached or refuses it, as without a token that may write.
    """
    if repo.count("/") != 1:  # of a name alone the Hub would make user/name, and then look for the name alone
        raise ValueError(f"{repo!r} is not the name of a Hub repository: give org/name")
    validate_repo_id(repo)
    directory = Path(directory)
    contents = _contents(directory)
    if (directory / "adapter_config.json").is_file():
        named = _base_on_hub(directory, base)
        values = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        contents["adapter_config.json"] = json.dumps({**values, "base_model_name_or_path": named}, indent=2).encode()
        text = adapter_card(named, values, licence_of(named))
    else:
        if base is not None:
            raise ValueError(f"{directory} is no adapter: a converted model names its base itself, drop --base")
        check_complete(directory)
        text = _model_card(directory)
    text = f"{text.rstrip()}\n\n{history(directory)}"
    contents["README.md"] = text.replace(HERE, repo).encode()
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
    found: dict[str, Any] = {"repo": repo, "files": sizes, "bytes": sum(sizes.values())}
    found["licence"] = licence_in(text) or "none found here: add `license:` to README.md's metadata"
    if dry_run:
        return found
    return found | {"commit": publish(repo, contents, private, f"Upload {directory.absolute().name} with retrofox")}


def _contents(directory: Path) -> dict[str, bytes | Path]:
    """Path in the repository -> file, of everything that is pushed."""
    contents: dict[str, bytes | Path] = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        stays = name.name.endswith(LEFT_AT_HOME) or any(part.startswith(OF_TRAINING) for part in name.parts)
        if file.is_file() and not stays and name.parts[0] != "report":
            contents[name.as_posix()] = file
    return contents


def _model_card(directory: Path) -> str:
    """The directory's card, else a new one with the base's licence: train writes none."""
    file = directory / "README.md"
    if file.is_file():
        return file.read_text(encoding="utf-8-sig")
    values = read_config(directory)
    spec, base_type = FoxSpec.from_dict(values["fox"]), values["model_type"].removeprefix("fox_")
    return card(spec, base_type, "Converted, then adapted.", licence=licence_of(spec.base, spec.base_revision))


def _base_on_hub(directory: Path, base: str | None) -> str:
    """The Hub id under which an adapter's converted base is found by others; refuses weights that aren't finite."""
    trained_here = (directory / "COMPLETE").is_file() or any(map(is_new_tensor, shards.header(directory / WEIGHTS)))
    if not trained_here:
        raise ValueError(f"{directory} is an adapter without gates, not trained by retrofox: upload it by `hf upload`")
    require_finite(directory, load_file(directory / WEIGHTS))
    named = base or base_of(directory)
    if Path(named).exists() or named.count("/") != 1 or named.startswith((".", "/")):
        raise ValueError(
            f"the adapter {directory} names its base by a path of this machine, {named}: push that base first "
            f"(`retrofox push {named} ORG/BASE`) and give --base ORG/BASE, or push what `retrofox merge` makes"
        )
    return named


def publish(repo: str, contents: Mapping[str, bytes | Path], private: bool, title: str) -> str:
    """Uploads files (path -> content) in one commit; returns it.

    Weights of an earlier upload that this one does not replace are deleted in the same commit: they might be loaded.
    Where it fails, none of the files is visible, or all are.

    Raises:
        ValueError: the repository is public where a private one was asked for.
        OSError: the Hub refuses it, as without a token that may write, or can't be reached.
    """
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ValueError(f"{repo} is public and --private was asked for: nothing was uploaded; change its settings")
        stale = [name for name in api.list_repo_files(repo) if name not in contents and WEIGHT_FILES.fullmatch(name)]
        add = [CommitOperationAdd(name, c if isinstance(c, bytes) else str(c)) for name, c in contents.items()]
        return api.create_commit(repo, [*add, *map(CommitOperationDelete, stale)], commit_message=title).oid
    except hub_errors() as error:
        if isinstance(error, OSError):
            raise
        raise OSError(f"{constants.ENDPOINT} can't be reached: {first_line(error)}") from error
