"""A converted checkpoint on the Hub: its model card, and pushing it there, checked before and after."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from retrofox import model, shards
from retrofox.model.configuration_fox import SUPPORTED, FoxSpec
from retrofox.source import first_line, hub_errors, read_config

if TYPE_CHECKING:
    from retrofox.surgery import Plan

SOURCE = "https://github.com/retrofox/retrofox"
HERE = "THIS_REPOSITORY"
"""What a card calls its own repository until it is pushed."""
LEFT_AT_HOME = (".pt", ".pth", ".bin", ".gguf", ".partial", ".lock", ".tmp")
"""Endings of files that are not pushed: optimizer states, other formats, work in progress."""


def card(plan: Plan, report: dict[str, Any]) -> str:
    """README.md of a freshly converted checkpoint: what it is, how to load it, what the parity proof measured."""
    parity = report["parity"]
    kept = f"{min(plan.kept_pairs)}-{max(plan.kept_pairs)}" if plan.kept_pairs else "0"
    layers = report.get("calibration", {}).get("half_lives_tokens") or [plan.half_lives]
    tokens = [x for layer in layers for x in layer]
    start = f"starting half-lives {min(tokens):.0f} to {max(tokens):.0f} tokens" if tokens else "fitted to the base"
    if plan.spec.init == "open":
        start = "open at first (no decay)"
    rows = {
        "gates": plan.spec.gate + ("" if plan.spec.gate == "none" else f", {start}"),
        "RoPE": f"{plan.spec.rope}, {kept} of {plan.pairs} rotary pairs kept",
        "parameters added": f"{plan.parameters:,}",
    }
    if isinstance(parity, dict):
        rows |= {
            "parity proof (gates open, RoPE kept)": f"logits within {parity['max_difference']:.1e} of the base",
            "loss on the proof's text, base": f"{parity['loss_base']:.3f}",
            "loss on the proof's text, converted": f"{parity['loss_converted']:.3f}",
        }
    return _card(plan.spec, "Converted, not yet adapted.", rows)


def own_card(directory: Path) -> str | None:
    """README.md of a directory; None where there is none."""
    file = directory / "README.md"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def card_of(directory: Path) -> str:
    """README.md of a converted checkpoint that has none, such as a trained one: what its config.json says."""
    spec = FoxSpec.from_dict(read_config(directory)["fox"])
    kept = f" (wavelengths up to {spec.max_wavelength:g} tokens)" if spec.rope == "partial" else ""
    return _card(spec, "Converted, then adapted.", {"gates": spec.gate, "RoPE": spec.rope + kept})


def _card(spec: FoxSpec, state: str, rows: dict[str, str]) -> str:
    base = spec.base or "an unnamed model"
    is_hub_id = spec.base is not None and spec.base.count("/") == 1 and not spec.base.startswith((".", "/"))
    name = base.rstrip("/").split("/")[-1]
    data = ModelCardData(
        base_model=base if is_hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["retrofox", "forgetting-transformer", "forgetting-attention", "long-context", "custom_code"],
    )
    rows = {**rows, "sink tokens exempt from decay": str(spec.sink_tokens), "Pro parts": ", ".join(spec.pro) or "none"}
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name} with forget gates\n",
        f"`{base if is_hub_id else name}` converted by [retrofox]({SOURCE}) {spec.version}: Forgetting",
        f"Attention (Lin et al., ICLR 2025) in every attention layer. {state}\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n",
        f'model = AutoModelForCausalLM.from_pretrained("{HERE}", trust_remote_code=True)',
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}", trust_remote_code=True)\n```\n',
        "Where retrofox is installed, its Triton kernels run; without it, a slower PyTorch path.\n",
        "| what | value |\n|---|---|",
        *(f"| {what} | {value} |" for what, value in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def check_complete(directory: Path) -> None:
    """Raises ValueError where a directory is not a complete converted checkpoint that loads anywhere.

    Checked: config.json with spec and auto_map, every remote-code file, every shard by header and size, a gate in every
    layer that the spec asks for, a card with metadata where there is one.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{directory} is a LoRA adapter: merge it first (`retrofox merge {directory} OUT`), push OUT")
    values = read_config(directory)
    model_type = str(values.get("model_type"))
    if model_type.removeprefix("fox_") not in SUPPORTED or not model_type.startswith("fox_"):
        raise ValueError(f"{directory} has model_type {model_type}: only converted models are pushed")
    spec = FoxSpec.from_dict(values.get("fox"))
    code = {f"{name.partition('.')[0]}.py" for name in (values.get("auto_map") or {}).values()}
    travelling = {file.name for file in Path(model.__path__[0]).glob("*.py")} - {"__init__.py"}
    missing = [name for name in sorted(travelling | code) if not (directory / name).is_file()]
    if missing or not code:
        raise ValueError(
            f"{directory} lacks its code ({', '.join(missing) or 'auto_map'}): save it with save_pretrained"
        )
    found = shards.find(directory)
    gates = sum(name.endswith("forget_gate.bias") for name in found.weight_map)
    layers = 0 if spec.gate == "none" else values["num_hidden_layers"]
    if gates != layers:
        raise ValueError(
            f"{directory} has the gates of {gates} layers where its config asks for {layers}: it is incomplete"
        )
    text = own_card(directory)
    if text is not None:
        data = ModelCard(text, ignore_metadata_errors=False).data.to_dict()
        if "custom_code" not in (data.get("tags") or ()):
            raise ValueError(
                f"{directory}/README.md lacks the tag custom_code in its metadata, which announces auto_map"
            )


def push(
    directory: str | Path, repo: str, *, private: bool = False, message: str | None = None, dry_run: bool = False
) -> dict[str, Any]:
    """Uploads a converted checkpoint to the Hub in one commit and verifies each file's hash there.

    The card's placeholder for the repository becomes its name; a directory without a card gets one.

    Args:
        repo: "org/name"; created where it doesn't exist.
        private: whether a new repository is private.
        dry_run: check and list, contact nothing.

    Returns:
        repo, files (path -> bytes), bytes; unless dry_run also commit and verified, how many files were compared.

    Raises:
        ValueError: the checkpoint is incomplete, `repo` is not a repository name, the upload failed, a file differs.
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
        if file.is_file() and not name.name.endswith(LEFT_AT_HOME) and not any(part[0] == "." for part in name.parts):
            contents[name.as_posix()] = file
    contents["README.md"] = text.replace(HERE, repo).encode()
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
    report: dict[str, Any] = {"repo": repo, "files": sizes, "bytes": sum(sizes.values())}
    if dry_run:
        return report
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
    return report | {"commit": commit.oid, "verified": len(contents)}


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
