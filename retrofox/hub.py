"""The face of a converted checkpoint on the Hub: its card, and pushing it there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

if TYPE_CHECKING:
    from retrofox.surgery import Plan


def card(plan: Plan, report: dict[str, Any]) -> str:
    """README.md of a converted checkpoint: what it is, how to load it, what the parity proof measured."""
    spec, parity = plan.spec, report["parity"]
    base = spec.base or "an unnamed model"
    is_hub_id = spec.base is not None and spec.base.count("/") == 1 and not spec.base.startswith((".", "/"))
    data = ModelCardData(
        base_model=base if is_hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["retrofox", "forgetting-transformer", "forgetting-attention", "long-context", "custom_code"],
    )
    kept = f"{min(plan.kept_pairs)}-{max(plan.kept_pairs)}" if plan.kept_pairs else "0"
    half_lives = f"{plan.half_lives[0]:.0f} to {plan.half_lives[-1]:.0f} tokens" if plan.half_lives else "none"
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {base.rstrip('/').split('/')[-1]} with forget gates\n",
        f"`{base}` converted by [retrofox](https://pypi.org/project/retrofox) {report['retrofox']}: Forgetting",
        "Attention (Lin et al., ICLR 2025) in every attention layer. Converted, not adapted, unless a training report",
        "stands below.\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n",
        'model = AutoModelForCausalLM.from_pretrained("THIS_REPOSITORY", trust_remote_code=True)',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_REPOSITORY")\n```\n',
        "`pip install retrofox` adds the Triton kernels; without it a slow PyTorch path runs.\n",
        "| what | value |\n|---|---|",
        f"| gates | {spec.gate}, starting half-lives {half_lives} |",
        f"| RoPE | {spec.rope}, {kept} of {plan.pairs} rotary pairs kept |",
        f"| sink tokens exempt from decay | {spec.sink_tokens} |",
        f"| Pro parts | {', '.join(spec.pro) or 'none'} |",
        f"| parameters added | {plan.parameters:,} |",
    ]
    if isinstance(parity, dict):
        lines += [
            f"| parity proof (gates open, RoPE kept) | logits within {parity['max_difference']:.1e} of the base |",
            f"| loss on the proof's text, base | {parity['loss_base']:.3f} |",
            f"| loss on the proof's text, converted | {parity['loss_converted']:.3f} |",
        ]
    return "\n".join(lines) + "\n"
