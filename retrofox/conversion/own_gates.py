"""Checkpoints that came with forget gates, of the FoX authors' repository and of fla: read, and written for fla.

Both are a Llama (with biases on q, k and v: a Qwen2) under other names: `RENAMED`. They differ in four points. Their
output gate is sigmoid(W x), ours 2 sigmoid(W x): o_proj takes the factor, exactly. Their key shift has no gain: 1. The
authors' MLP holds gate and up projection in one tensor. QK-norm and shifts are those of the Pro part "official".
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrofox.anatomy import attentions, is_new_tensor, on_meta, sliding_window
from retrofox.conversion.directory import copy_others
from retrofox.families import OWN_GATES
from retrofox.fox_spec import OFFICIAL, FoxSpec
from retrofox.loading.atomic_directory import atomic_directory, refuse_existing
from retrofox.loading.converted import load
from retrofox.loading.errors import opening
from retrofox.loading.shards import Shards
from retrofox.loading.source import fetch, refuse_adapter
from retrofox.surgery import Plan, make_plan

AUTHORS, FLA = OWN_GATES
QK_NORM_EPS = 1e-5
"""eps of QK-norm in both packages, whatever config.json says."""
TRAINED_LENGTH = 16384
"""Tokens, the paper's: where config.json has no max_position_embeddings."""
HORIZON_ALONE = "{} has forget gates of its own, which stay as they are: of fox it takes horizon alone"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GATES = {"full": "data", "bias_only": "bias", "fixed": "fixed", "none": "none"}
PARTS = {
    "qk_norm": "qk-norm",
    "use_output_norm": "output-norm",
    "use_output_gate": "output-gate",
    "use_k_shift": "k-shift",
    "use_v_shift": "v-shift",
}
"""Key of their config.json -> Pro part."""
EXPRESSIBLE: dict[str, dict[str, tuple[Any, ...]]] = {
    AUTHORS: {"ogate_act": ("sigmoid",), "hidden_act": ("swish", "sigmoid"), "fgate_type": tuple(GATES)},
    FLA: {"window_size": (None,), "attnres_block_size": (None,), "hidden_act": ("swish",)},
}
"""Key of their config.json -> the values that a converted model computes alike. fla's window is for decoding only."""
RENAMED = {
    "embeddings": "embed_tokens",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "q_norm": "q_norm_fox",
    "k_norm": "k_norm_fox",
    "fgate_proj": "forget_gate",
    "f_proj": "forget_gate",
    "ogate_proj": "output_gate",
    "g_proj": "output_gate",
}
"""Part of a tensor's name there -> here; of two for one, the second is fla's."""


def plan_of_own_gates(values: dict[str, Any], spec: FoxSpec, base: str, revision: str | None) -> Plan:
    """The plan of a checkpoint (its config.json as a dict) that came with gates.

    Raises:
        ValueError: `spec` changes more than the horizon, or the checkpoint has something that a converted model can't
            compute exactly.
    """
    if replace(spec, horizon=None) != FoxSpec():
        raise ValueError(HORIZON_ALONE.format(base))
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "hidden_act", "norm_eps"):
        if name not in values:
            raise ValueError(f"config.json of {base} has no {name}: take the one that its package saved")
    kind = AUTHORS if "fgate_type" in values else values["model_type"]  # the authors' was fla's until March 2025
    for name, allowed in EXPRESSIBLE[kind].items():
        if values.get(name, allowed[0]) not in allowed:
            raise ValueError(
                f"{base} has {name} {values[name]!r}, which a converted model can't compute exactly: it computes "
                f"{' or '.join(map(json.dumps, allowed))}"
            )
    parts = tuple(part for name, part in PARTS.items() if values.get(name))
    if {"qk-norm", "k-shift", "v-shift"} & set(parts):
        parts = (*parts, OFFICIAL)
    gate = GATES[values.get("fgate_type", "full")]
    fields: dict[str, Any] = {} if gate == "none" else {"sink_tokens": 0}
    rope = "keep" if values.get("use_rope") else "drop"
    spec = FoxSpec(rope=rope, gate=gate, pro=parts, horizon=spec.horizon, **fields)
    with opening(f"config.json of {base}"):
        plan = make_plan(_base_config(values), spec, base=base, revision=revision)
    plan.own_gates, plan.half_lives = kind, []
    plan.spec.half_life = plan.config.fox["half_life"] = None
    return plan


def came_with_gates(config: Any) -> bool:
    """Whether a converted model's gates came with its checkpoint: a conversion has half-lives to start gates with."""
    fox = getattr(config, "fox", None)
    return fox is not None and fox["half_life"] is None and fox["init"] != "alibi"


def _base_config(values: dict[str, Any]) -> Any:
    hidden, heads = values["hidden_size"], values["num_heads"]
    width = values.get("intermediate_size")
    if width is None:  # two thirds of hidden_ratio * hidden, rounded up to a multiple of 256
        width = -(-int(hidden * (values.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    config_class: Any = CONFIG_MAPPING["qwen2" if values.get("qkv_bias") else "llama"]
    return config_class(
        **{name: values.get(name) for name in names},
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_kv_heads") or heads,
        intermediate_size=width,
        hidden_act={"swish": "silu"}.get(values["hidden_act"], values["hidden_act"]),
        max_position_embeddings=values.get("max_position_embeddings") or TRAINED_LENGTH,
        initializer_range=values.get("initializer_range", 0.02),
        rms_norm_eps=values["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": float(values.get("rope_base") or 500000.0)},
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        dtype=values.get("dtype") or values.get("torch_dtype"),
    )


def write_own_gates(directory: Path, found: Shards, plan: Plan, partial: Path) -> str:
    """Writes a checkpoint that came with gates as a converted one; returns what became of its tensors."""
    state: dict[str, torch.Tensor] = {}
    for file in found.files.values():
        with opening(file):
            pickled = file.suffix != ".safetensors"
            state |= torch.load(file, map_location="cpu", weights_only=True, mmap=True) if pickled else load_file(file)
    with opening(f"a tensor of {directory}"):
        state = renamed(state, plan)
    model = on_meta(plan.model_type, plan.config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    embedding = state.get("model.embed_tokens.weight")
    for name in plan.tied:
        if embedding is not None and not torch.equal(state.setdefault(name, embedding), embedding):
            raise ValueError(
                f"{directory}: {name} is not the embedding, to which its config.json ties it: set tie_word_embeddings: "
                "false there"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    packed = next((name for name, tensor in state.items() if tensor.dtype not in FLOATS), None)
    if packed:
        raise ValueError(f"{directory} has {packed} as {state[packed].dtype}: convert the unquantised model")
    wrong = sorted(name for name in shapes | wanted if shapes.get(name) != wanted.get(name))
    if wrong:
        raise ValueError(
            f"{directory}: {wrong[0]} has shape {shapes.get(wrong[0])}, by its config.json {wanted.get(wrong[0])}: the "
            "two don't belong together"
        )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(partial)
    copy_others(directory, partial)
    return f"renamed from {plan.own_gates}"


def renamed(state: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """Their tensors under our names and in our shapes; gates and Pro parts in float32."""
    found = {}
    for theirs, value in state.items():
        name = re.sub(r"([kv])_proj\.shift_proj", r"\1_shift", theirs).replace("_proj.linear.", "_proj.")
        name = ".".join(RENAMED.get(part, part) for part in name.replace("fgate_bias", "f_proj.bias").split("."))
        name = re.sub(r"(_norm_fox|output_norm)\.weight$", r"\1.gain", name)
        shape = torch.Size(plan.tensors.get(name, value.shape))
        if is_new_tensor(name):
            value = value.float()
        if name.endswith(".gain") and len(shape) == 2 and value.numel() in (shape[-1], shape.numel()):
            value = value.reshape(-1, shape[-1]).expand(shape)  # one for all heads, or one for each
        elif name.endswith("_shift.weight"):
            found[name.replace("weight", "gain")] = torch.ones(shape[0])
        elif name.endswith("o_proj.weight") and "output-gate" in plan.spec.pro:
            value = value / 2
        elif name.endswith("mlp.gate_proj.weight") and theirs.replace("gate_proj", "up_proj") not in state:
            value, found[name.replace("gate_proj", "up_proj")] = value.chunk(2)
        found[name] = value.contiguous()
    return found


def write_for_fla(source: str | Path, out: Path, revision: str | None = None) -> dict[str, Any]:
    """Writes a converted checkpoint for fla's ForgettingTransformerForCausalLM; returns what was written.

    Raises:
        ValueError: `out` exists, `source` is not converted, is an adapter, or has something that fla's model lacks.
    """
    refuse_existing(out)
    refuse_adapter(source)
    model = load(source, revision=revision)
    directory, _ = fetch(source, revision)
    config, spec = model.config, FoxSpec.from_dict(model.config.fox)
    _refuse_for_fla(source, model, spec)
    theirs = {here: there for there, here in RENAMED.items()}
    gated = "output-gate" in spec.pro
    state = {}
    for ours, value in model.state_dict().items():
        name = ".".join(theirs.get(part, part) for part in ours.split("."))
        if ours.endswith(".gain"):
            name, value = name.replace(".gain", ".weight"), value.flatten()
        elif ".forget_gate." in ours:
            value = value.repeat_interleave(config.num_attention_heads // value.shape[0], 0)  # gate_heads kv
        elif ours.endswith("o_proj.weight") and gated:
            value = value * 2
        state[name] = value.contiguous()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    same = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "initializer_range")
    same = (*same, "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    values = {
        "model_type": FLA,
        "architectures": ["ForgettingTransformerForCausalLM"],
        **{name: getattr(config, name) for name in same},
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "hidden_act": "swish",
        "qkv_bias": "model.layers.0.attn.q_proj.bias" in state,
        "qk_norm": "qk-norm" in spec.pro,
        "use_output_gate": gated,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    with atomic_directory(out) as partial:
        save_torch_state_dict(state, partial)
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        copy_others(directory, partial)
    return {"for": "fla", "config": values, "tensors": len(state)}


def _refuse_for_fla(source: str | Path, model: Any, spec: FoxSpec) -> None:
    config, found = model.config, [attention for _, attention in attentions(model)]
    norms = [attention.q_norm_fox for attention in found if attention.q_norm_fox is not None]
    fades: list[Any] = [attention.rotary_fade for attention in found]
    lacks = {
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        f"model_type {config.model_type}": config.model_type not in ("fox_llama", "fox_qwen2"),
        f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        "heads that are not hidden_size / heads wide": found[0].head_dim * found[0].num_fox_heads != config.hidden_size,
        "a bias on o_proj or in the MLP": any(
            name.endswith(("o_proj.bias", "up_proj.bias")) for name, _ in model.named_parameters()
        ),
        "a sliding window": any(sliding_window(attention) for attention in found),
        f"rope {spec.rope}": any(fade is not None and not fade.gone for fade in fades),
        "an attention scaling of its RoPE": any(fade is not None and fade.gone != fade.skippable for fade in fades),
        f"gate {spec.gate}": spec.gate != "data",
        f"sink_tokens {spec.sink_tokens}": spec.sink_tokens != 0,
        f"log_n {spec.log_n}": spec.log_n is not None,
        f"horizon {spec.horizon}": spec.horizon is not None,
        f"max_half_life {spec.max_half_life}": spec.max_half_life is not None,
        **{f"pro {part}": True for part in spec.pro if part not in ("qk-norm", "output-gate", OFFICIAL)},
        f"qk-norm with an eps other than {QK_NORM_EPS}": any(norm.eps != QK_NORM_EPS for norm in norms),
    }
    named = [name for name, lacking in lacks.items() if lacking]
    if named:
        raise ValueError(f"{source} has what fla's ForgettingTransformerForCausalLM lacks: {', '.join(named)}")
