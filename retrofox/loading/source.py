"""Where a model comes from: its config before anything else, refusals, fetching it from the Hub.

Imports no torch: a conversion is refused before torch is there.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofox.config_values import kv_heads_of
from retrofox.fox_spec import FoxSpec
from retrofox.loading.errors import first_line
from retrofox.spec_values import require_places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_SECONDS = 4
SKIPPED = ("*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "original/*", "consolidated*")
"""Files of a Hub repository that a conversion has no use for."""


def read_config(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """config.json of a directory or Hub id as a dict.

    Raises:
        FileNotFoundError: nothing there; the text names the file that was looked for.
        ValueError: config.json is no model's, or its fox section is that of no converted model.
    """
    directory = Path(path)
    file = directory / "config.json" if directory.exists() else _from_hub(str(path), revision)
    if not file.is_file():
        run = (directory / "model" / "config.json").is_file()
        instead = directory / "model" if run else "a model directory, a Hub id or a .gguf file"
        raise FileNotFoundError(f"{directory} has no config.json: give {instead}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.get("model_type", "").startswith("fox_"):
            spec = FoxSpec.from_dict(values.get("fox"))
            require_places(spec, values["num_hidden_layers"], kv_heads_of(values))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "download it, or convert its base, again; what a later retrofox has written needs an upgrade"
        raise ValueError(f"{file} is no model's config ({error}): {advice}") from error
    return values


def hub_errors() -> tuple[type[Exception], ...]:
    """Errors of huggingface_hub where the Hub refuses, does not answer or is not asked.

    OSError, and the base of all errors of the HTTP client in use, httpx or httpx2, from which its own errors inherit.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    online = hub_answers()
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=not online))
    except HFValidationError as error:
        raise FileNotFoundError(f"{name}: no such directory, and not a Hub id (org/name) either") from error
    except hub_errors() as error:
        at = f"{constants.ENDPOINT}/{name}" + (f" at revision {revision}" if revision else "")
        why = first_line(error) if online else "HF_HUB_OFFLINE is set, or the Hub can't be reached"
        raise FileNotFoundError(
            f"{name}: no such directory here, and no config.json could be fetched from {at} ({why}): check the name "
            "and the network; for a gated or private model, `hf auth login`"
        ) from error


def hub_answers() -> bool:
    """Whether the Hub can be asked; huggingface_hub itself would go on trying for 23 s where it can't be reached."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@functools.cache
def _answers(endpoint: str) -> bool:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=PROBE_SECONDS)
    except hub_errors() as error:
        return "SSL" in str(error)  # a certificate: the download's own error says what is wrong with it
    return True


def check_source(source: str | Path, values: dict[str, Any]) -> None:
    """Raises ValueError, saying what to do instead, for a model (its config.json as a dict) that can't be converted.

    Refused: a converted model, a quantised one. Families are checked by `families.check_supported`.
    """
    refuse_converted(str(source), values.get("model_type"))
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ValueError(
            f"{source} is quantised ({method or 'method not named'}): convert the unquantised model it was made from, "
            "or dequantise it first (from_pretrained(...).dequantize(), where its method can, then save_pretrained); a "
            ".gguf file is dequantised on the way"
        )


def check_live(model: PreTrainedModel) -> None:
    """Raises ValueError, saying what to do instead, for a model in memory that can't be converted."""
    refuse_converted(f"this {type(model).__name__}", model.config.model_type)
    if getattr(model.config, "quantization_config", None) or getattr(model, "peft_config", None):
        raise ValueError(
            f"this {type(model).__name__} is quantised or carries a LoRA adapter: load the unquantised model, or "
            "dequantize() it; merge the adapter in (merge_and_unload)"
        )


def refuse_converted(name: str, model_type: object) -> None:
    """Raises ValueError for a model type of converted models."""
    if str(model_type).startswith("fox_"):
        raise ValueError(f"{name} is already converted ({model_type}): train it, or convert its base")


def recorded(source: str | Path) -> str:
    """The base's name in a converted model: a Hub id as given, a path made absolute."""
    return os.path.abspath(source) if str(source) and Path(source).exists() else str(source)


def refuse_adapter(source: str | Path) -> None:
    """Raises ValueError for a directory that holds a LoRA adapter, alone or beside a model."""
    if (Path(source) / "adapter_config.json").exists():
        raise ValueError(
            f"{source} holds a LoRA adapter (adapter_config.json): merge it into its base first (peft: "
            "merge_and_unload, save_pretrained; one trained by retrofox: `retrofox merge`), then give the result"
        )


def fetch(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """(local directory, commit) of a directory or a Hub id, downloading the files that a conversion reads.

    Where the Hub can't be reached, the local cache is used.

    Raises:
        FileNotFoundError: a Hub id that can neither be downloaded nor found in the cache.
    """
    if Path(source).is_dir():
        return Path(source), None
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"revision": revision, "local_files_only": not hub_answers()}
    try:
        directory = Path(snapshot_download(str(source), ignore_patterns=[*SKIPPED, "*.bin"], **options))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(str(source), ignore_patterns=[*SKIPPED], **options))
    except hub_errors() as error:
        raise FileNotFoundError(f"{source} could not be downloaded: {first_line(error)}") from error
    return directory, directory.name


def holds_converted(source: str) -> bool:
    """Whether a directory or Hub id holds a converted model or an adapter, which `retrofox.load` opens or refuses."""
    if source.endswith(".gguf"):
        return False
    if (Path(source) / "adapter_config.json").exists():
        return True
    return read_config(source).get("model_type", "").startswith("fox_")
