"""Opening a model for use: converted or not, from a Hub id, a directory, a .gguf file, an adapter or a live object."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBES = ("The quick brown fox, 1 2 3 12345!\n\n  def f(x):\treturn x**2\n", "Überraschung — 東京 …", "<|im_end|></s>")


@dataclass
class Opened:
    """A model ready to run, with its tokenizer and the name it goes by in tables."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    source: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def fox(self) -> dict[str, Any] | None:
        """The `fox` section of a converted model's config, None for any other model."""
        return getattr(self.model.config, "fox", None)


def open_model(
    source: str | os.PathLike | PreTrainedModel,
    *,
    tokenizer: Any = None,
    reads_text: bool = True,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Opened:
    """Opens a converted model or an adapter through `retrofox.load`, any other through `retrofox.loading.load_base`.

    Args:
        source: Hub id, local directory, .gguf file, or a model that is already in memory.
        tokenizer: used instead of the one that lies beside the model.
        reads_text: whether a tokenizer is needed; without, one that is not given is None.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; None = bfloat16 on a GPU, float32 on a CPU. A live
            model keeps the dtype it has.
        device: None = the GPU if there is one, else the CPU; a live model then stays where it is.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: an unknown dtype or device, a dtype for a live model, or a model without a tokenizer.
    """
    wanted = resolve_dtype(dtype)
    if not isinstance(source, (str, os.PathLike)):
        if wanted is not None and wanted != next(source.parameters()).dtype:
            raise ValueError(f"a live model keeps its dtype, {next(source.parameters()).dtype}; got dtype {dtype!r}")
        if device is not None:
            source.to(resolve_device(device))  # type: ignore[arg-type]
        label = getattr(source.config, "name_or_path", "") or type(source).__name__
        if tokenizer is None and reads_text:
            tokenizer = open_tokenizer(label)
        return Opened(_unwrapped(source), tokenizer, _short(label), label)
    from retrofox.loading import load_base
    from retrofox.surgery import load

    text, place = os.fspath(source), resolve_device(device)
    if wanted is None:
        wanted = torch.bfloat16 if place.type == "cuda" else torch.float32
    if tokenizer is None and reads_text:
        tokenizer = open_tokenizer(text)
    if is_converted(text):
        model = load(text, dtype=wanted, device=place)
    else:
        model, _ = load_base(text, dtype=wanted, device=place)
    return Opened(_unwrapped(model), tokenizer, _short(text), text)


def open_tokenizer(source: str) -> Any:
    """The tokenizer beside a model, or beside the base of an adapter.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: there is none.
    """
    looks_local = source.startswith((".", "/", "~")) or source.endswith(".gguf") or source.count("/") > 1
    if looks_local and not Path(source).exists():
        raise FileNotFoundError(
            f"no such model: {source}: give a directory (converted or not), a .gguf file or a Hub id (org/name)"
        )
    problem = "no tokenizer files there"
    is_converted(source)  # says what is wrong with the model's own files
    try:
        tokenizer = _load_tokenizer(source)
    except FileNotFoundError:
        raise  # no model there at all
    except (OSError, ValueError) as error:
        tokenizer, problem = None, str(error).strip().split("\n")[0]
    adapter = Path(source) / "adapter_config.json"
    if tokenizer is None and adapter.exists():
        return open_tokenizer(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    if tokenizer is None:
        raise ValueError(f"no tokenizer for {source!r} ({problem}); put the tokenizer files beside the model")
    return tokenizer


def require_same_tokenizer(tokenizer: Any, other: Any) -> None:
    """Raises ValueError where a model to compare with reads text as other tokens.

    Encodings of one text are compared, rather than files: a .gguf's tokenizer is the same one in another form. A live
    model reads the token ids it is given.
    """
    if not isinstance(other, (str, os.PathLike)):
        return
    theirs = open_tokenizer(os.fspath(other))
    for text in PROBES:
        mine_ids, their_ids = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, theirs))
        if mine_ids != their_ids:
            raise ValueError(
                f"tokenizer mismatch: {other} splits {text!r} into {their_ids[:8]}..., the model's tokenizer into "
                f"{mine_ids[:8]}...; two models can only be compared on the same tokens"
            )


def _load_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer, PretrainedConfig

    from retrofox.loading import load_tokenizer

    if Path(source).is_dir() and not any(Path(source).glob("tokenizer*")):
        return None
    if not is_converted(source):
        return load_tokenizer(source)
    # an empty config: the converted one names remote code, and AutoTokenizer would ask whether to run it
    return AutoTokenizer.from_pretrained(source, config=PretrainedConfig())


def is_converted(source: str) -> bool:
    """Whether a directory or Hub id holds a converted model or an adapter, which `retrofox.load` opens or refuses."""
    from retrofox.surgery import read_config

    if source.endswith(".gguf"):
        return False
    if (Path(source) / "adapter_config.json").exists():
        return True
    return str(read_config(source).get("model_type", "")).startswith("fox_")


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the GPU if there is one, else the CPU; refuses one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown; use cpu, cuda or cuda:N") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was asked for but torch sees no GPU; use device cpu")
    try:
        torch.empty(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).split("\n")[0]
        raise ValueError(f"device {str(device)!r} can't be used here ({why}); use cpu, cuda or cuda:N") from error
    return place


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None stays None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]


def _unwrapped(model: Any) -> PreTrainedModel:
    """The causal LM itself, adapters in place: a PeftModel's attributes would name the wrong inner model."""
    from retrofox.families import causal_lm

    return causal_lm(model).eval()


def _short(source: str) -> str:
    """What a model is called in tables: the end of its path, or the run's name for what `train` wrote, RUN/model."""
    path = os.path.abspath(source) if os.path.exists(source) else os.path.normpath(source)
    if os.path.basename(path) == "model":
        path = os.path.dirname(path) or path
    return os.path.basename(path) or source
