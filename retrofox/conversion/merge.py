"""Merging a LoRA adapter into its converted base, proven by logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from retrofox.anatomy import causal_lm, is_new_tensor
from retrofox.loading.adapter import converted_base, with_adapter
from retrofox.loading.atomic_directory import atomic_directory, refuse_existing
from retrofox.loading.converted import load
from retrofox.loading.source import read_config
from retrofox.loading.tokenizers import load_tokenizer
from retrofox.support.files import write_json
from retrofox.version import __version__

PROBE_TOKENS = 64


def merge(adapter: str | Path, out: str | Path) -> dict[str, Any]:
    """Merges an adapter into its converted base and proves the logits of the written model.

    W' = W + (alpha / rank) B A (DoRA: rescaled by its magnitudes) in float32, then stored in the base's dtype; gates
    and Pro parts replace the base's, float32.

    Returns:
        Paths, the relative difference |z_merged - z_unmerged| / |z_unmerged| of the logits on fixed tokens, and the
        limit it is under: 1e-4 for float32, 2e-2 for weights stored in 16 bits.

    Raises:
        FileNotFoundError: no adapter there.
        ValueError: an unconverted or quantised base, `out` exists, or logits that differ (nothing is left in `out`).
    """
    adapter, out = Path(adapter), Path(out)
    refuse_existing(out)
    base = converted_base(adapter)
    config = read_config(base)
    if config.get("quantization_config"):
        raise ValueError(
            f"{base} is quantised, and merging needs whole weights: name the model that it was made from as "
            "base_model_name_or_path in adapter_config.json"
        )
    stored = getattr(torch, str(config.get("dtype") or "float32").removeprefix("torch."))
    model = with_adapter(load(base, dtype=torch.float32), adapter)
    unmerged = probe_logits(model)
    merged: Any = model.merge_and_unload(safe_merge=True)
    for name, parameter in merged.named_parameters():
        if not is_new_tensor(name):
            parameter.data = parameter.data.to(stored)
    limit = 1e-4 if stored == torch.float32 else 2e-2
    with atomic_directory(out) as partial:
        merged.save_pretrained(str(partial))
        tokenizer = load_tokenizer(base)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        write_json(
            partial / "retrofox.json", {"retrofox": __version__, "merged": {"adapter": str(adapter), "base": base}}
        )
        del model, merged
        difference = float((probe_logits(load(partial, dtype=torch.float32)) - unmerged).norm() / unmerged.norm())
        if not difference <= limit:
            raise ValueError(
                f"merged logits differ by {difference:.2e} (limit {limit:.0e}) from the adapter's: not written"
            )
    return {
        "adapter": str(adapter),
        "base": base,
        "out": str(out),
        "dtype": str(stored).removeprefix("torch."),
        "relative_difference": difference,
        "limit": limit,
    }


@torch.no_grad()
def probe_logits(model: Any) -> torch.Tensor:
    """Logits of PROBE_TOKENS fixed tokens."""
    vocabulary = causal_lm(model).config.vocab_size
    return model.eval()(input_ids=torch.arange(PROBE_TOKENS)[None] * 7919 % vocabulary).logits
