"""A converted checkpoint on the Hub: its model card, and pushing it there, checked before and after."""

from __future__ import annotations

import ast
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, snapshot_download

from retrofox.anatomy import vocabulary_size
from retrofox.conversion.card import HERE, adapter_card, card_of, own_card, with_metadata
from retrofox.conversion.history import history
from retrofox.conversion.licence import agreed, licence_in, read_licence
from retrofox.conversion.upload import check_repo, publish
from retrofox.fox_spec import FoxSpec
from retrofox.loading import shards
from retrofox.loading.adapter import base_of
from retrofox.loading.check_added_tensors import check_added, check_finite
from retrofox.loading.converted import load
from retrofox.loading.errors import first_line
from retrofox.loading.source import hub_errors, read_config
from retrofox.loading.tokenizers import refuse_damaged_tokenizer
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.reporting.pushed import FOLDER, report_of, with_section

LEFT_AT_HOME = (".pt", ".pth", ".bin", ".pkl", ".pyc", ".gguf", ".partial", ".lock", ".tmp")
"""Endings of files that are not pushed: optimizer states, other formats, work in progress."""
OF_TRAINING = ("checkpoint-", "__pycache__", "events.out.tfevents.")
"""How names of a training's folders and files begin that are not pushed."""
PROBE_TOKENS = 64


def missing_code(directory: Path, entries: set[str]) -> list[str]:
    """Files of the model's code that are not there: the entries, and whatever the code that is there imports beside it.

    Code of an earlier version is complete in itself: it has fewer files than today's.
    """
    missing, seen, waiting = [], set(), sorted(entries)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = directory / name
        if not file.is_file():
            missing.append(name)
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f"{file} is not Python ({first_line(error)}): save the model with save_pretrained"
            ) from error
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                waiting += [f"{module.partition('.')[0]}.py" for module in modules]
    return sorted(missing)


def check_complete(directory: Path) -> None:
    """Raises ValueError where a directory is not a complete converted checkpoint that loads anywhere.

    Checked: config.json with spec and auto_map, every remote-code file, every shard by header and size, every
    tensor that the spec asks for, finite, a card with metadata where there is one.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    values = read_config(directory)
    model_type = str(values.get("model_type"))
    if model_type.removeprefix("fox_") not in SUPPORTED or not model_type.startswith("fox_"):
        raise ValueError(f"{directory} has model_type {model_type}: only converted models are pushed")
    FoxSpec.from_dict(values.get("fox"))
    entries = values.get("auto_map")
    names = entries.values() if isinstance(entries, dict) else ()
    code = {f"{name.partition('.')[0]}.py" for name in names if isinstance(name, str)}
    missing = missing_code(directory, code)
    if missing or not code:
        raise ValueError(
            f"{directory} lacks its code ({', '.join(missing) or 'auto_map'}): save it with save_pretrained"
        )
    found = shards.find(directory)
    if found.pickled:
        raise ValueError(f"{directory} keeps its weights in a .bin file: save it with save_pretrained, as safetensors")
    check_added(directory, values, found)
    check_finite(directory, found)
    text = own_card(directory)
    if text is not None:
        data = ModelCard(text, ignore_metadata_errors=False).data.to_dict()
        if "custom_code" not in (data.get("tags") or ()):
            raise ValueError(
                f"{directory}/README.md lacks the tag custom_code in its metadata, which announces auto_map"
            )


DRY = "a dry run contacts nothing: the card of {}, with its licence, is read at the push"


def push(
    directory: str | Path,
    repo: str,
    *,
    private: bool = False,
    message: str | None = None,
    dry_run: bool = False,
    base: str | None = None,
    report: str | Path | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Uploads a converted checkpoint, or an adapter of one, to the Hub in one commit, and verifies what is there.

    The card's placeholder for the repository becomes its name; a directory without a card gets one. Beside a run's
    recipe.yaml the card shows recipe and loss. Where the upload fails nothing is visible of it, and a repository that
    was made for it is deleted again.

    Args:
        repo: "org/name"; created where it doesn't exist.
        private: the repository must be private: a new one is made so, a public one is refused.
        dry_run: check and list, contact nothing.
        base: for an adapter: the Hub id of its converted base, where the adapter names it by a local path.
        report: folder that `retrofox report` wrote; None = `report` in the directory, if it is there.
        check: afterwards download it into an empty cache and compare the logits.

    Returns:
        repo, files (path -> bytes), bytes, licence, and licence_unchecked, why there is none or it was not compared;
        unless dry_run also commit and verified, how many files were compared, and logits_equal (None without `check`).

    Raises:
        ValueError: the checkpoint or its tokenizer is incomplete, `repo` is not a repository name, the card contradicts
            the base's licence, there is no token or it may not write, the upload failed, a file or the logits differ,
            the report is of other weights.
    """
    directory = Path(directory)
    adapter = (directory / "adapter_config.json").is_file()
    refuse_damaged_tokenizer(directory)
    if adapter:
        named = _base_on_hub(directory, base)
    else:
        if base is not None:
            raise ValueError(f"{directory} is no adapter: a converted model names its base itself, drop --base")
        check_complete(directory)
    check_repo(repo)
    contents = _contents(directory)
    if adapter:
        values = _adapter_config(directory)
        contents["adapter_config.json"] = json.dumps({**values, "base_model_name_or_path": named}, indent=2).encode()
        licence, unread = ({}, DRY.format(named)) if dry_run else read_licence(named)
        text = adapter_card(named, values, licence)
    else:
        text, licence, unread = _model_card(directory, dry_run)
    section, files = history(directory)
    contents |= files
    text = f"{text.rstrip()}\n{section and chr(10) + section}"
    measured = None if adapter else report_of(directory, None if report is None else Path(report))
    if measured is not None:
        text, files = with_section(text, measured[0]), measured[1]
        contents |= files
    contents["README.md"] = text.replace(HERE, repo).encode()
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
    found: dict[str, Any] = {"repo": repo, "files": sizes, "bytes": sum(sizes.values()), "licence": licence or None}
    if not licence:
        unread = unread or "neither the card nor its base's names one: add `license:` to README.md's metadata"
    found |= {"licence_unchecked": unread} if unread else {}
    if dry_run:
        return found
    title = message or f"Upload {directory.absolute().name} with retrofox"
    commit = publish(repo, contents, private, title)
    found |= {"commit": commit, "verified": len(contents), "logits_equal": None}
    if check:
        found["logits_equal"] = _loads_the_same(directory, repo, commit)
    return found


def _contents(directory: Path) -> dict[str, bytes | Path]:
    """Path in the repository -> file, of everything that is pushed."""
    contents: dict[str, bytes | Path] = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        if name.parts[0] == FOLDER:
            continue  # what of it goes along is added by `push`
        if file.is_file() and not name.name.endswith(LEFT_AT_HOME) and not any(map(_stays, name.parts)):
            contents[name.as_posix()] = file
    return contents


def _stays(part: str) -> bool:
    """Whether nothing is pushed that has such a name, or lies in a folder that has it."""
    return part.startswith((".", *OF_TRAINING))


def _model_card(directory: Path, offline: bool) -> tuple[str, dict[str, str], str | None]:
    """(the card with the base's licence in its metadata, the licence fields, why the base's card was not read)."""
    text = own_card(directory) or card_of(directory)
    spec = FoxSpec.from_dict(read_config(directory).get("fox"))
    asked = not offline or spec.base is None or Path(spec.base).is_dir()
    known, unread = read_licence(spec.base, spec.base_revision) if asked else ({}, DRY.format(spec.base))
    licence = agreed(licence_in(text), known, str(spec.base))
    return with_metadata(text, licence), licence, unread


def _adapter_config(directory: Path) -> dict[str, Any]:
    file = directory / "adapter_config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return dict(values.items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({first_line(error)}): save the adapter again") from error


def _base_on_hub(directory: Path, base: str | None) -> str:
    """The Hub id under which an adapter's converted base is found by others.

    Raises:
        ValueError: the adapter names it by a path of this machine and no other name was given; weights are missing,
            cut short or not finite.
    """
    _adapter_config(directory)
    named = base or base_of(directory)
    if not (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"{directory} has an adapter_config.json and no adapter_model.safetensors: it is incomplete")
    check_finite(directory, shards.read(directory, ["adapter_model.safetensors"]))
    if Path(named).exists() or named.count("/") != 1 or named.startswith((".", "/")):
        raise ValueError(
            f"the adapter {directory} names its base by a path of this machine, {named}: push that base first "
            f"(`retrofox push {named} ORG/BASE`) and give --base ORG/BASE, or push what `retrofox merge` makes"
        )
    return named


def _loads_the_same(directory: Path, repo: str, commit: str) -> bool:
    """True where a download into an empty cache gives the logits that the directory gives.

    Raises:
        ValueError: the download fails, or the logits differ.
    """
    with tempfile.TemporaryDirectory(prefix="retrofox-push-") as cache:
        try:
            there = snapshot_download(repo, revision=commit, cache_dir=cache)
        except hub_errors() as error:
            raise ValueError(f"{repo} is uploaded but could not be downloaded again: {first_line(error)}") from error
        mine, theirs = _logits(directory), _logits(Path(there))
    if not torch.equal(mine, theirs):
        difference = float((mine - theirs).abs().max())
        raise ValueError(f"{repo} is uploaded but its logits differ from {directory}'s by {difference:.1e}: push again")
    return True


@torch.no_grad()
def _logits(directory: Path) -> torch.Tensor:
    model = load(directory).eval()
    ids = torch.arange(PROBE_TOKENS)[None] * 7919 % vocabulary_size(model)
    return model(input_ids=ids, use_cache=False).logits
