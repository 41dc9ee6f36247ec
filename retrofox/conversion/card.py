"""A converted model's README on the Hub, and the licence, which is its base's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

from retrofox.fox_spec import FoxSpec
from retrofox.loading.source import hub_answers, hub_errors
from retrofox.serving.refusals import refusal

SOURCE = "https://github.com/retrofox/retrofox"
HERE = "THIS_REPOSITORY"
"""Stands for the repository in a card until it is pushed."""


def card(spec: FoxSpec, base_type: str, state: str, licence: Mapping[str, Any] | None = None) -> str:
    """README.md of a converted checkpoint: its retrofit, how to load and serve it.

    Args:
        spec: resolved.
        base_type: model_type of the base.
        state: a sentence on its training.
        licence: the base's, as `licence_of` gives it.
    """
    base = spec.base or "an unnamed model"
    is_hub_id = spec.base is not None and spec.base.count("/") == 1 and not spec.base.startswith((".", "/"))
    name = base.rstrip("/").split("/")[-1]
    data = ModelCardData(
        base_model=base if is_hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["retrofox", "forgetting-transformer", "forgetting-attention", "long-context", "custom_code"],
        **(licence or {}),
    )
    rows = described(spec) | {"sink tokens exempt from decay": str(spec.sink_tokens or "none")}
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name} with forget gates\n",
        f"`{base if is_hub_id else name}` converted by [retrofox]({SOURCE}) {spec.version}: Forgetting",
        f"Attention (Lin et al., ICLR 2025) in every attention layer. {state}\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n",
        f'model = AutoModelForCausalLM.from_pretrained("{HERE}", trust_remote_code=True)',
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}", trust_remote_code=True)\n```\n',
        "Where retrofox is installed, its Triton kernels run; without it, a slower PyTorch path.\n",
        *_served(spec, base_type),
        "| what | value |\n|---|---|",
        *(f"| {what} | {value} |" for what, value in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def adapter_card(base: str, config: Mapping[str, Any], licence: Mapping[str, Any]) -> str:
    """README.md of a LoRA adapter with its gates, for a converted base on the Hub."""
    data = ModelCardData(
        base_model=base,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["retrofox", "forgetting-transformer", "lora", "base_model:adapter:" + base],
        **licence,
    )
    trained = ", ".join(config.get("modules_to_save") or ()) or "none"
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# LoRA adapter of {base}\n",
        f"Made with [retrofox]({SOURCE}). Its base `{base}` is a converted model: it has forget gates. On any other",
        "base, and in plain PEFT on the unconverted one, the adapter runs without them.\n",
        "```python\nimport retrofox\nfrom huggingface_hub import snapshot_download\n",
        f'model = retrofox.load(snapshot_download("{HERE}"))\n```\n',
        "For an engine, merge it first: `retrofox merge ADAPTER OUT`.\n",
        "| what | value |\n|---|---|",
        f"| rank | {config.get('r')} |",
        f"| alpha | {config.get('lora_alpha')} |",
        f"| trained whole | {trained} |",
    ]
    return "\n".join(lines) + "\n"


def history(directory: Path) -> str:
    """A section of the card about a model's training, from the recipe.yaml and result.json that a run keeps beside it.

    Empty for a model of no run, and for the conversion that a run began with.
    """
    directory = directory.absolute()
    run = directory.parent
    files = (run / "recipe.yaml", run / "result.json")
    if directory.name == "converted" or not all(file.is_file() for file in files):
        return ""
    stages = json.loads((run / "result.json").read_text(encoding="utf-8"))["stages"]
    recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["recipe"]
    tokens = sum(stage["tokens"] for stage in stages) / 1e6
    text = yaml.safe_dump(recipe, sort_keys=False).rstrip()
    return (
        f"## Training\n\n{tokens:.1f}M tokens; in the last stage loss {stages[-1]['loss_first']:.3f} at first and "
        f"{stages[-1]['loss_last']:.3f} at last.\n\n"
        f"<details><summary>recipe</summary>\n\n```yaml\n{text}\n```\n\n</details>\n"
    )


def described(spec: FoxSpec) -> dict[str, str]:
    """Part of a retrofit -> what the resolved spec makes of it, in words."""
    rows = {"gates": _gates(spec), "RoPE": str(spec.rope), "Pro parts": ", ".join(spec.pro) or "none"}
    if spec.layer_pairs:
        rows["RoPE"] += ", pairs chosen by layer"
    elif spec.rope == "interpolate":
        rows["RoPE"] += f", slow pairs up to {spec.rope_factor:g} times slower"
        rows["RoPE"] += f" (beta_fast {spec.beta_fast:g}, beta_slow {spec.beta_slow:g})"
    elif spec.rope == "partial":
        rows["RoPE"] += f", wavelengths up to {spec.max_wavelength:g} tokens kept"
    if spec.horizon is not None:
        rows["horizon"] = f"keys that decayed by {spec.horizon:g} nats are masked"
    return rows


def _gates(spec: FoxSpec) -> str:
    if spec.gate == "none":
        return "none"
    text = spec.gate + (", one per kv head" if spec.gate_heads == "kv" else "")
    if spec.init == "open":
        text += ", open at first (no decay)"
    elif spec.half_life is None:
        text += ", ALiBi's slopes" if spec.init == "alibi" else ", as they were trained"
    else:
        first, last = (1 / (1 / x + 1 / (spec.max_half_life or math.inf)) for x in spec.half_life)
        text += f", half-lives of {first:.0f} to {last:.0f} tokens at first"
    if spec.init == "measured":
        text += ", by measured attention distance"
    if spec.max_half_life is not None:
        text += f", never over {spec.max_half_life:g} tokens but in open heads"
    opened = spec.open_heads if isinstance(spec.open_heads, int) else len(spec.open_heads)
    return text + (f"; {opened} kv heads start open" if opened else "")


def _served(spec: FoxSpec, base_type: str) -> list[str]:
    """How to serve the model with vLLM, or why not."""
    why = refusal(base_type, spec)
    if why is not None:
        return [f"vLLM can't serve it: {why}.\n"]
    where = "" if spec.horizon is None else "It has a horizon, which vLLM serves on NVIDIA GPUs only:\n\n"
    return [f"{where}```bash\ngit clone {SOURCE} && pip install './retrofox[vllm]'\nvllm serve {HERE}\n```\n"]


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
    """The licence fields of a model's card, in its directory or on the Hub; empty without a card that can be read."""
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
