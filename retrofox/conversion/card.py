"""A converted model's README on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from retrofox.anatomy import attentions, exempt_tokens, lm_class, on_meta
from retrofox.fox_spec import FoxSpec
from retrofox.loading.errors import first_line
from retrofox.loading.source import read_config
from retrofox.serving.refusals import refusal

if TYPE_CHECKING:
    from retrofox.surgery import Plan

SOURCE = "https://github.com/retrofox/retrofox"
HERE = "THIS_REPOSITORY"
"""Stands for the repository in a card until it is pushed."""


def card(plan: Plan, report: dict[str, Any], licence: Mapping[str, Any] | None = None) -> str:
    """README.md of a freshly converted checkpoint: its retrofit, how to load it, the parity proof's numbers.

    Args:
        licence: the base's, as `retrofox.conversion.licence.licence_of` gives it.
    """
    parity = report["parity"]
    fewest, most = min(plan.kept_pairs, default=0), max(plan.kept_pairs, default=0)
    kept = f"{most}" if fewest == most else f"{fewest}-{most}"
    tokens = plan.half_lives
    start = f"starting half-lives {min(tokens):.0f} to {max(tokens):.0f} tokens" if tokens else "as they were trained"
    if plan.spec.init == "open":
        start = "open at first (no decay)"
    rows = {
        "gates": plan.spec.gate + ("" if plan.spec.gate == "none" else f", {start}"),
        "RoPE": f"{plan.spec.rope}, {kept} of {plan.pairs} rotary pairs kept" + _turning(plan.spec),
        "parameters added": f"{plan.parameters:,}",
    }
    if isinstance(parity, dict):
        rows |= {
            "parity proof (gates open, RoPE kept)": f"logits within {parity['max_difference']:.1e} of the base",
            "loss on the proof's text, base": f"{parity['loss_base']:.3f}",
            "loss on the proof's text, converted": f"{parity['loss_converted']:.3f}",
        }
    state = "Converted, not yet adapted." if plan.own_gates is None else "Its gates were trained with it."
    return _card(plan.spec, state, plan.exempt_tokens, rows, plan.model_type, licence or {})


def _turning(spec: FoxSpec) -> str:
    if spec.layer_pairs:
        return ", chosen by layer"
    return f", slow pairs up to {spec.rope_factor:g} times slower" if spec.rope == "interpolate" else ""


def own_card(directory: Path) -> str | None:
    """README.md of a directory; None where there is none.

    Raises:
        ValueError: it is not UTF-8 text, or its metadata can't be read.
    """
    file = directory / "README.md"
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
        ModelCard(text, ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{file} is damaged ({first_line(error)}): correct its metadata, UTF-8 text between two lines of ---, or "
            "delete it, and `retrofox push` writes a new one"
        ) from error
    return text


def card_of(directory: Path) -> str:
    """README.md of a converted checkpoint that has none, such as a trained one, from its config.json."""
    values = read_config(directory)
    spec = FoxSpec.from_dict(values["fox"])
    base_type = values["model_type"].removeprefix("fox_")
    model = on_meta(base_type, lm_class(base_type).config_class.from_dict(values))
    exempt = [exempt_tokens(attention) for _, attention in attentions(model) if attention.forget_gate is not None]
    by_wavelength = spec.rope == "partial" and not spec.layer_pairs
    kept = f" (wavelengths up to {spec.max_wavelength:g} tokens)" if by_wavelength else _turning(spec)
    rows = {"gates": spec.gate, "RoPE": str(spec.rope) + kept}
    return _card(spec, "Converted, then adapted.", exempt, rows, base_type, {})


def with_metadata(text: str, values: Mapping[str, str]) -> str:
    """A card with these fields added to its metadata; those it has stay."""
    found = ModelCard(text, ignore_metadata_errors=True)
    missing = {name: value for name, value in values.items() if found.data.get(name) is None}
    if not missing:
        return text
    for name, value in missing.items():
        found.data[name] = value
    return str(found)


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


def exemption(tokens: Sequence[int]) -> str:
    """How many first tokens of a document never decay, in words, from the number in each layer."""
    some = [count for count in tokens if count]
    if not some:
        return "none"
    where = f" in {len(some)} of {len(tokens)} layers (the others have a sliding window)"
    return f"{some[0]}{where if len(some) < len(tokens) else ''}"


def _card(
    spec: FoxSpec,
    state: str,
    exempt: Sequence[int],
    rows: dict[str, str],
    base_type: str,
    licence: Mapping[str, Any],
) -> str:
    base = spec.base or "an unnamed model"
    is_hub_id = spec.base is not None and spec.base.count("/") == 1 and not spec.base.startswith((".", "/"))
    name = base.rstrip("/").split("/")[-1]
    data = ModelCardData(
        base_model=base if is_hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["retrofox", "forgetting-transformer", "forgetting-attention", "long-context", "custom_code"],
        **licence,
    )
    rows = {**rows, "sink tokens exempt from decay": exemption(exempt), "Pro parts": ", ".join(spec.pro) or "none"}
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


def _served(spec: FoxSpec, base_type: str) -> list[str]:
    """How to serve the model with vLLM, or why not."""
    why = refusal(base_type, spec)
    if why is not None:
        return [f"vLLM can't serve it: {why}.\n"]
    return [f"```bash\ngit clone {SOURCE} && pip install './retrofox[vllm]'\nvllm serve {HERE}\n```\n"]
