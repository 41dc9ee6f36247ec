"""Tiny random models of fla and of the FoX authors' repository on a CPU: their modules, torch in place of kernels.

    python tests/conversion/forget_gate_models.py      # rewrites the fixture; needs both packages, and einops

The fixture was made with flash-linear-attention 0.6.0 and zhixuan-lin/forgetting-transformer at 883f260.
"""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from retrofox.model.modeling_fox import CACHE

FIXTURE = Path(__file__).with_name("forget-gate-models.json")
TOKENS = torch.tensor([[3, 17, 5, 9, 30, 2, 2, 21, 8, 14, 27, 1], [11, 4, 4, 25, 6, 19, 0, 31, 7, 13, 22, 10]])
PLACES = [0, 1, 11]
"""Positions of TOKENS whose logits the fixture holds."""
module: Any = importlib.import_module
SHAPE = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 16}
PRO = ("qk_norm", "use_output_norm", "use_output_gate", "use_k_shift", "use_v_shift")
AUTHORS = {
    "authors-llama": {"max_position_embeddings": None},
    "authors-pro": dict.fromkeys(PRO, True),
    "authors-shared-norm": {"qk_norm": True, "qk_norm_share_param_across_head": True, "use_output_gate": True},
    "authors-rope": {"use_rope": True, "hidden_act": "sigmoid", "tie_word_embeddings": True, "use_output_norm": True},
    "authors-bias": {"fgate_type": "bias_only", "use_v_shift": True},
}
FLA_FAST = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
FLA = {
    "fla-plain": FLA_FAST,
    "fla-all": {**FLA_FAST, "num_kv_heads": 1, "qkv_bias": True, "qk_norm": True, "use_output_gate": True},
}


def attention(q: Any, k: Any, v: Any, log_f: Any) -> Any:
    """Forgetting Attention of the last T of S positions: q (B, T, H, D), k, v (B, S, Hkv, D), log_f (B, S, H)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    c = log_f.cumsum(1).transpose(1, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + c[:, :, -q.shape[1] :, None] - c[:, :, None]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def group_norm(reference: Any) -> Any:
    """The forward of a GroupNorm by the package's own reference."""
    same = {"is_rms_norm": True, "upcast": True}
    return lambda self, x, **gate: reference(
        x, weight=self.weight, bias=self.bias, num_groups=self.num_groups, eps=self.eps, **same, **gate
    )


def build(name: str) -> Any:
    """A model of one of these names with the values of `drawn`; ImportError without its package."""
    package = fla() if name in FLA else _authors()
    config = package.ForgettingTransformerConfig(**SHAPE, bos_token_id=0, eos_token_id=1, **{**FLA, **AUTHORS}[name])
    model = package.ForgettingTransformerForCausalLM(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.copy_(drawn(key, tensor.shape))
    return model


def drawn(name: str, shape: Any) -> torch.Tensor:
    """The values of a tensor: the same for a name every time; norm gains lie between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.rand(*shape, generator=generator) * 2 - 1
    return 1 + values / 2 if name.endswith("norm.weight") else values / (1 if len(shape) == 1 else 2)


def write(name: str, directory: Path) -> torch.Tensor:
    """Writes a model of the fixture as its package saved it; returns its logits at PLACES."""
    made = json.loads(FIXTURE.read_text())[name]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(made["config"]))
    save_file({key: drawn(key, shape) for key, shape in made["shapes"].items()}, directory / "model.safetensors")
    return torch.tensor(made["logits"])


def logits(model: Any) -> torch.Tensor:
    """(2, 12, V) float32 of TOKENS, read at once."""
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def stepwise(model: Any) -> torch.Tensor:
    """The same, token by token through the cache of their own class."""
    argument = CACHE if hasattr(model.config, "fox") else "past_key_values"
    options, found = {argument: None, "use_cache": True}, []
    for position, token in enumerate(TOKENS.split(1, 1)):
        if "fla." in type(model).__module__:
            options["attention_mask"] = torch.ones(2, position + 1, dtype=torch.long)
        with torch.no_grad():
            out = model(token, **options)
        options[argument] = out[argument]
        found.append(out.logits)
    return torch.cat(found, 1)


def fla() -> Any:
    models = module("fla.models")
    names = ("layers.forgetting_attn", "modules.mlp", "modules.norm.layernorm")
    layer, mlp, norm = (module(f"fla.{name}") for name in names)

    def unpadded(q: Any, k: Any, v: Any, g: Any, cu_seqlens: Any = None) -> Any:
        batch = len(q) if cu_seqlens is None else len(cu_seqlens) - 1  # rows of one length
        return attention(*(x.reshape(batch, -1, *x.shape[2:]) for x in (q, k, v, g))).reshape(q.shape)

    layer.parallel_forgetting_attn = layer.attn_decoding_one_step = unpadded
    mlp.swiglu = lambda gate, up: F.silu(gate) * up
    norm.GroupNorm.forward = group_norm(norm.group_norm_ref)
    return models


def _authors() -> Any:
    at = "forgetting_transformer.model.forgetting_transformer"
    with mock.patch("transformers.cache_utils.Cache", object):  # whose constructor theirs calls as it was in 2024
        package = module(at)
    names = ("modeling_forgetting_transformer", "layernorm", "fuse_norm_gate", "rotary")
    model, norm, gated, rotary = (module(f"{at}.{name}") for name in names)

    def by_head(q: Any, k: Any, v: Any, log_fgate: Any, **_: Any) -> Any:
        return attention(*(x.transpose(1, 2) for x in (q, k, v, log_fgate))).transpose(1, 2)

    def token_shift(x: Any, before: Any, now: Any) -> Any:
        return F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1] * before[..., None] + x * now[..., None]

    def rms_norm(self: Any, x: Any, residual: Any = None, prenorm: bool = False) -> Any:
        return norm.rms_norm_ref(x, self.weight, self.bias, residual, eps=self.eps, prenorm=prenorm, upcast=True)

    def rotated(x: Any, cos: Any, sin: Any, interleaved: bool, seqlen_offsets: int) -> Any:
        at = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        return rotary.apply_rotary_emb_torch(x, cos[at], sin[at], interleaved)

    package.ForgettingTransformerForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    model.forgetting_attention, model.token_shift = by_head, token_shift
    model.swiglu_linear = lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    model.glu_linear = lambda x, y, weight, bias: F.linear(x.sigmoid() * y, weight, bias)
    model.RMSNorm.forward, model.GroupNorm.forward = rms_norm, group_norm(norm.group_norm_ref)
    model.FusedGroupNormGated.forward = group_norm(gated.group_norm_gated_ref)
    rotary.apply_rotary_emb_func = rotated
    return package


def main() -> None:
    """Writes the fixture: config, shapes and logits of each model."""
    made = {}
    for name in (*FLA, *AUTHORS):
        model = build(name)
        config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
        tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
        shapes = {key: list(x.shape) for key, x in model.state_dict().items() if key not in tied}
        rounded = (logits(model)[:, PLACES] * 1e6).round().div(1e6).double().tolist()
        made[name] = {"config": config, "shapes": shapes, "logits": rounded}
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in made.items())
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
