"""Where a model comes from: its config before anything else, refusals, fetching it from the Hub.

Imports no torch: a conversion is refused before torch is there.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofox.fox_spec import FoxSpec
from retrofox.loading.atomic_directory import refuse_existing
from retrofox.loading.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_SECONDS = 10
SKIPPED = ("*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "original/*", "consolidated*")
"""Files of a Hub repository that a conversion has no use for."""


def read_config(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """config.json of a directory or Hub id as a dict.

    Raises:
        FileNotFoundError: nothing there; the text names the file that was looked for.
        ValueError: config.json is not a JSON object, or its model_type or fox section is that of no model.
    """
    if not str(path).strip():
        raise ValueError("the model's name is empty: give a model directory, a Hub id or a .gguf file")
    directory = Path(path)
    if directory.is_file():
        raise FileNotFoundError(f"{directory} is a file: give a model directory, a Hub id or a .gguf file")
    if directory.exists():
        file = directory / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{directory} has no config.json: give a model directory, a Hub id or a .gguf file")
    else:
        file = _from_hub(str(path), revision)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): download the model again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__} where a JSON object belongs")
    model_type, fox = values.get("model_type", ""), values.get("fox")
    if not isinstance(model_type, str):
        raise ValueError(f'{file} has model_type {model_type!r} where a name such as "llama" belongs')
    if not isinstance(fox, dict | None):
        raise ValueError(f"{file}: the fox section must be a mapping of keys to values, got {fox!r:.80}")
    if model_type.startswith("fox_"):
        if not fox:
            raise ValueError(
                f"{file} has model_type {model_type} and no fox section, which says how its gates run: it is "
                "incomplete; download it, or convert its base, again"
            )
        try:
            FoxSpec.from_dict(fox)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}: fox: {error}") from error
    return values


def hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where the Hub refuses, does not answer or is not asked.

    OSError, and the base of all errors of the HTTP client in use, httpx or httpx2, from which its own errors inherit.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str) and not constants.HF_HUB_OFFLINE:
            _probe(constants.ENDPOINT)
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except HFValidationError as error:
        raise FileNotFoundError(f"{name}: no such directory, and not a Hub id (org/name) either") from error
    except hub_errors() as error:
        at = f"{constants.ENDPOINT}/{name}" + (f" at revision {revision}" if revision else "")
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error)
        raise FileNotFoundError(
            f"{name}: no such directory here, and no config.json could be fetched from {at} ({why}): check the name "
            "and the network; for a gated or private model, `hf auth login`"
        ) from error


def _probe(endpoint: str) -> None:
    """Fails within seconds where the Hub can't be reached; huggingface_hub itself would go on trying for 23 s."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # the Hub's client may know certificates that this one doesn't
            raise ConnectionError(f"{endpoint} can't be reached: {error.reason}") from error


def check_source(source: str | Path, values: dict[str, Any]) -> None:
    """Raises ValueError, saying what to do instead, for a model (its config.json as a dict) that can't be converted.

    Refused: a converted model, a quantised one, a config without model_type. Families are checked by
    `retrofox.families.check_supported`.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"config.json of {source} has no model_type: it is not a transformers model")
    if model_type.startswith("fox_"):
        base = (values.get("fox") or {}).get("base")
        raise ValueError(
            f"{source} is already converted ({model_type}): train it, or convert its base, "
            f"{base or 'not recorded'}, anew"
        )
    quantised = values.get("quantization_config") or values.get("compression_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    for name in ("quantize_config.json", "quant_config.json", "quant_model_description.json"):
        if (Path(source) / name).is_file():
            quantised, method = True, method or name
    if quantised:
        raise ValueError(
            f"{source} is quantised ({method or 'method not named'}): convert the unquantised model it was made from, "
            "or dequantise it first (from_pretrained(...).dequantize(), where its method can, then save_pretrained); a "
            ".gguf file is dequantised on the way"
        )


def recorded(source: str | Path) -> str:
    """The base's name in a converted model: a Hub id as given, a path made absolute."""
    return os.path.abspath(source) if str(source) and Path(source).exists() else str(source)


def refuse_adapter(source: str | Path) -> None:
    """Raises ValueError for a directory that holds a LoRA adapter, alone or beside a model."""
    file = Path(source) / "adapter_config.json"
    if not file.exists():
        return
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    raise ValueError(
        f"{source} holds a LoRA adapter (adapter_config.json): merge it into its base, {base or 'not recorded'}, first "
        "(peft: merge_and_unload, save_pretrained; one trained by retrofox: `retrofox merge`), then give the result"
    )


def check_adapter(directory: Path) -> None:
    """Raises FileNotFoundError where a directory is no adapter's."""
    if not (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no adapter_config.json: give the directory of a LoRA adapter")


def check_out(source: str | Path, out: Path) -> None:
    """Raises ValueError where `out` is not empty, is the source directory or lies inside it."""
    refuse_existing(out)
    directory = Path(source)
    if directory.is_dir() and directory.resolve() in out.resolve().parents:
        raise ValueError(f"OUT {out} lies inside SOURCE {source}: choose a directory outside it")


def fetch(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """(local directory, commit) of a directory or a Hub id, downloading the files that a conversion reads.

    Where the Hub can't be reached, the local cache is used.

    Raises:
        FileNotFoundError: a Hub id that can neither be downloaded nor found in the cache.
    """
    if Path(source).is_dir():
        return Path(source), None
    from huggingface_hub import HfApi, snapshot_download

    choices = [[*SKIPPED, "*.bin"], [*SKIPPED]]
    try:
        online = _online()
        if online:
            names = HfApi().list_repo_files(str(source), revision=revision)
            choices = choices[:1] if any(name.endswith(".safetensors") for name in names) else choices[1:]
    except hub_errors() as error:
        raise FileNotFoundError(f"{source} could not be downloaded: {first_line(error)}") from error
    problem: Exception | None = None
    for skip in choices:
        try:
            directory = Path(
                snapshot_download(str(source), revision=revision, ignore_patterns=skip, local_files_only=not online)
            )
            return directory, directory.name
        except hub_errors() as error:
            problem = error
    where = "downloaded" if online else "found in the cache, and the Hub can't be reached"
    raise FileNotFoundError(f"{source} could not be {where}: {first_line(problem)}") from problem


def _online() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        _probe(constants.ENDPOINT)
    except ConnectionError:
        return False
    return True


def check_live(model: PreTrainedModel) -> None:
    """Raises ValueError, saying what to do instead, for a model in memory that can't be converted."""
    if model.config.model_type.startswith("fox_"):
        raise ValueError("this model is already converted; start from its base model")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        raise ValueError(f"this {type(model).__name__} is quantised: load the unquantised model, or dequantize() it")
    if getattr(model, "peft_config", None):
        raise ValueError(f"this {type(model).__name__} carries a LoRA adapter: merge it in (merge_and_unload) first")


def holds_converted(source: str) -> bool:
    """Whether a directory or Hub id holds a converted model or an adapter, which `retrofox.load` opens or refuses."""
    if source.endswith(".gguf"):
        return False
    if (Path(source) / "adapter_config.json").exists():
        return True
    return str(read_config(source).get("model_type", "")).startswith("fox_")
