"""A model's shape and its parameters by part, from its config.json alone: no model is built, no torch imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from retrofox.fox_spec import FoxSpec


class Family(NamedTuple):
    """How a family's parameters differ from Llama's.

    Attributes:
        norms: vectors of hidden size in a layer's norms.
        last_norm: the same outside the layers.
        qk_norm: norms of queries and keys: one gain per channel of a head ("head"), of all heads ("all"), or of
            hidden_size and its share ("hidden").
        qkv_bias: whether q, k and v have biases; None = as `attention_bias` of the config says, o too.
        gated: whether the MLP has three matrices (gate, up, down), not two.
        tied: whether embedding and head are one where the config doesn't say.
        head_dim: where the config doesn't say; None = hidden_size / heads.
        latent: whether keys and values come from one latent for all heads (MLA).
        expert_width: key of the config for the width of an expert, where the MLP has experts.
    """

    norms: int = 2
    last_norm: int = 1
    qk_norm: str = ""
    qkv_bias: bool | None = None
    gated: bool = True
    tied: bool = False
    head_dim: int | None = None
    expert_width: str | None = None
    latent: bool = False


LLAMA = Family()
MIXTRAL = Family(expert_width="intermediate_size")
DEEPSEEK = Family(expert_width="moe_intermediate_size", latent=True)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "phi3", "granite", "ministral", "ministral3"), LLAMA),
    **dict.fromkeys(("mixtral", "granitemoe"), MIXTRAL),
    **dict.fromkeys(("olmo2", "olmo3"), Family(qk_norm="all")),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head", head_dim=128),
    "smollm3": Family(tied=True),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(norms=4, tied=True, head_dim=256),
    "gemma3_text": Family(norms=4, qk_norm="head", tied=True, head_dim=256),
    "cohere": Family(norms=1, tied=True),
    "cohere2": Family(norms=1, tied=True),
    "qwen2_moe": Family(qkv_bias=True, expert_width="moe_intermediate_size"),
    "qwen3_moe": Family(qk_norm="head", head_dim=128, expert_width="moe_intermediate_size"),
    "olmoe": Family(qk_norm="hidden", expert_width="intermediate_size"),
    "arcee": Family(gated=False),
    "ernie4_5": Family(tied=True),
    "exaone4": Family(qk_norm="head"),
    "glm4": Family(norms=4, qkv_bias=True, head_dim=128),
    "olmo": Family(norms=0, last_norm=0),
    "seed_oss": Family(qkv_bias=True, head_dim=128),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "youtu": Family(latent=True, tied=True),
    "starcoder2": Family(norms=4, last_norm=2, gated=False, tied=True),
}
"""model_type -> its differences, for every family that can be converted."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and its parameters by part; those of a layer are means over all layers.

    Attributes:
        head_dim: channels of a head; of MLA the mean of q's and v's, which attention's operations and bytes go by.
        windows: by layer, keys that a query sees at most; None = all.
        width: of what an MLP makes of a token: of its inner layer, or of all experts that the token visits.
        matrices: of attention and of the MLP, (inputs, outputs) of one layer, as LoRA adapts them; of experts, none.
        base: parameters without what a conversion adds.
        attention: parameters of a layer's attention.
        in_layer: parameters of a layer's matrices.
        used: parameters of a layer that a token is multiplied with.
        gates: parameters of a layer's gate, (weights, biases); (0, 0) without one.
        pro: parameters of a layer's Pro parts.
        pro_kept: numbers per token that they keep in a layer for the backward.
        embedding, head: parameters; a tied head has 0.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: float
    vocabulary: int
    width: int
    gated: bool
    windows: tuple[int | None, ...]
    base: int
    attention: int
    in_layer: int
    used: int
    embedding: int
    head: int
    gates: tuple[int, int] = (0, 0)
    pro: int = 0
    pro_kept: int = 0
    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def added(self) -> int:
        """Parameters that a conversion adds."""
        return self.layers * (sum(self.gates) + self.pro)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.base + self.added

    @property
    def converted(self) -> bool:
        """Whether it has gates or Pro parts."""
        return self.added > 0


def shape_of(config: dict[str, Any], fox: FoxSpec | None = None) -> Shape:
    """The shape of a config.json, converted by `fox`, or by the spec that it holds; ValueError where it is unknown."""
    name = str(config.get("model_type", "")).removeprefix("fox_")
    if name not in FAMILIES:
        raise ValueError(
            f"plan counts the parameters of {', '.join(sorted(FAMILIES))} and this model is {name or 'of no type'}: "
            "`retrofox convert` says what can be done with it"
        )
    spec = fox or (FoxSpec.from_dict(config["fox"]) if config.get("fox") else None)
    try:
        return _shape(name, FAMILIES[name], config, spec)
    except KeyError as error:
        raise ValueError(f"this model's config.json lacks {error}: download it again") from None
    except TypeError as error:
        raise ValueError(f"a size in this model's config.json is no number ({error}): download it again") from None


def known_shape(config: Any) -> Shape | None:
    """The shape of a config of transformers, converted or not; None for a family whose parameters aren't known here."""
    known = config.model_type.removeprefix("fox_") in FAMILIES
    return shape_of(config.to_dict()) if known else None


def _shape(name: str, family: Family, config: dict[str, Any], spec: FoxSpec | None) -> Shape:
    layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    out_dim = config["v_head_dim"] if family.latent else head_dim
    queries, keys = heads * head_dim, kv_heads * head_dim
    projections = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    projections["o_proj"] = (queries, hidden)
    if family.latent:
        projections = _latent_projections(config, hidden, heads)
        head_dim = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + out_dim) / 2
    biases = "use_bias" if name in ("ernie4_5", "starcoder2") else "attention_bias"
    all_biased = bool(config.get(biases, name == "starcoder2"))
    qkv_biased = all_biased if family.qkv_bias is None else config.get("attention_bias", family.qkv_bias)
    if family.qkv_bias is not None:
        all_biased = bool(config.get("attention_out_bias"))
    attention = products(projections) + qkv_biased * (queries + 2 * keys) + all_biased * hidden
    if family.latent:  # norms of the latents, and biases of what makes them
        latents = [projections[key][1] for key in ("q_a_proj", "kv_a_proj_with_mqa") if key in projections]
        attention = products(projections) + sum(latents) - config["qk_rope_head_dim"]
        attention += all_biased * (sum(latents) + hidden)
    if family.qk_norm == "head":
        attention += 2 * head_dim
    elif family.qk_norm == "hidden":
        attention += hidden + hidden // heads * kv_heads
    elif family.qk_norm == "all" or config.get("use_qk_norm"):
        attention += queries + keys
    mlp, used, width, matrices = _mlp(family, config, all_biased and name in ("ernie4_5", "starcoder2"))
    tied = config.get("tie_word_embeddings", family.tied)
    heads_of_gates = kv_heads if getattr(spec, "gate_heads", "query") == "kv" else heads
    embedding = config["vocab_size"] * hidden
    head = 0 if tied else embedding
    gates = (0, 0)
    if spec is not None and spec.gate != "none":
        gates = (heads_of_gates * hidden if spec.gate == "data" else 0, 0 if spec.gate == "fixed" else heads_of_gates)
    pro, pro_kept = (0, 0) if spec is None else _pro(spec, hidden, heads, kv_heads, out_dim, bool(family.qk_norm))
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config["vocab_size"],
        width=width,
        gated=family.gated,
        windows=_windows(config, layers),
        base=layers * (attention + mlp + family.norms * hidden) + embedding + head + family.last_norm * hidden,
        attention=attention,
        in_layer=attention + mlp,
        used=products(projections) + used,
        embedding=embedding,
        head=head,
        gates=gates,
        pro=pro,
        pro_kept=pro_kept,
        matrices={**projections, **matrices},
    )


def _latent_projections(config: dict[str, Any], hidden: int, heads: int) -> dict[str, tuple[int, int]]:
    """Multi-head latent attention: (inputs, outputs) of its matrices."""
    rotary, plain, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, queries, latent = config.get("q_lora_rank"), heads * (plain + rotary), config["kv_lora_rank"]
    found = {"q_a_proj": (hidden, rank), "q_b_proj": (rank, queries)} if rank else {"q_proj": (hidden, queries)}
    found |= {"kv_a_proj_with_mqa": (hidden, latent + rotary), "kv_b_proj": (latent, heads * (plain + value))}
    return {**found, "o_proj": (heads * value, hidden)}


def products(matrices: dict[str, tuple[int, int]]) -> int:
    """Parameters of matrices, (inputs, outputs) each."""
    return sum(inputs * outputs for inputs, outputs in matrices.values())


def _mlp(family: Family, config: dict[str, Any], biased: bool) -> tuple[int, int, int, dict[str, tuple[int, int]]]:
    """(parameters, those a token meets, width, matrices) of one layer's MLP, as a mean over layers."""
    hidden, inner = config["hidden_size"], config.get("intermediate_size") or 0
    kinds, layers = 3 if family.gated else 2, config["num_hidden_layers"]
    names = ("gate_proj", "up_proj", "down_proj") if family.gated else ("up_proj", "down_proj")
    matrices = {key: (inner, hidden) if key == "down_proj" else (hidden, inner) for key in names}
    bias = (kinds - 1) * inner + hidden if biased or config.get("mlp_bias") else 0
    dense = kinds * hidden * inner
    if family.expert_width is None:
        return dense + bias, dense, inner, matrices
    named = ("num_local_experts", "n_routed_experts", "num_experts")
    count, width = next(config[key] for key in named if config.get(key)), config[family.expert_width]
    visited = config.get("num_experts_per_tok", 2)
    expert, router = kinds * hidden * width, count * hidden
    gate = config.get("shared_expert_intermediate_size") or 0  # with a gate of its own; DeepSeek's have none
    shared = gate or width * (config.get("n_shared_experts") or 0)
    always = kinds * hidden * shared + (hidden if gate else 0)
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    first, types = config.get("first_k_dense_replace") or 0, config.get("mlp_layer_types") or ["sparse"] * layers
    sparse = sum(n >= first and n not in plain and (n + 1) % step == 0 and types[n] == "sparse" for n in range(layers))
    mixed = count * expert + router + always, visited * expert + router + always, visited * width + shared
    plain_ones = dense, dense, inner
    each = [(sparse * a + (layers - sparse) * b) // layers for a, b in zip(mixed, plain_ones, strict=True)]
    return each[0], each[1], each[2], {}


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or []
    if len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    everywhere = config.get("model_type", "").removeprefix("fox_") in ("mistral", "mixtral", "starcoder2", "phi3")
    return (window if everywhere else None,) * layers


def _pro(spec: FoxSpec, hidden: int, heads: int, kv_heads: int, head_dim: int, has_qk_norm: bool) -> tuple[int, int]:
    """(parameters, numbers kept per token) of one layer's Pro parts: inputs of norms and shifts, a gate's logits."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    both = 0 if has_qk_norm else queries + keys
    sizes = {
        "qk-norm": (both, both),
        "output-norm": (queries, 0),
        "output-gate": (queries * hidden, queries),
        "k-shift": (kv_heads * (hidden + 1), keys),
        "v-shift": (kv_heads * (hidden + 1), keys),
    }
    found = [sizes[part] for part in spec.pro if part in sizes]
    edited = queries if {"output-norm", "output-gate"} & set(spec.pro) else 0  # the output before and after both
    return sum(parameters for parameters, _ in found), edited + sum(kept for _, kept in found)
