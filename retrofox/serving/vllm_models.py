"""vLLM model classes of converted models, made on first use: vLLM's own class of the base, its attention given gates.

`Fox<Family>ForCausalLM` builds vLLM's model as for the base and then changes every attention: rotary pairs turn by the
spec's fades, keys take log f along, and the added modules (gates, norms) are there for their weights.
"""

from __future__ import annotations

import copy
import importlib
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import set_default_torch_dtype

from retrofox.anatomy import attentions, exempt_tokens, on_meta, reach, sliding_window
from retrofox.fox_spec import FoxSpec
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.serving.plugin import check
from retrofox.serving.refusals import NATIVE, THROUGH_TRANSFORMERS
from retrofox.serving.vllm_attention import attend, with_gates
from retrofox.serving.vllm_rotary import faded


class Added(nn.Module):
    """One module that a conversion added, such as `forget_gate`: its tensors in float32, this rank's heads of them."""

    def __init__(self, module: Any, num_heads: dict[int, int], repeat: int = 1):
        """Args:
        num_heads: heads of the whole model -> heads of one rank, for query heads and for kv heads.
        repeat: how often each head's row is held, as where the query heads of a kv head share a gate.
        """
        super().__init__()
        for name, tensor in module.state_dict().items():
            whole = tensor.shape[0]
            per_head = 1
            if whole not in num_heads:  # the output gate has a row per channel
                heads = max(num_heads)
                per_head, whole = whole // heads, heads
            shape = (num_heads[whole] * per_head * repeat, *tensor.shape[1:])
            parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": _loader(whole, per_head, repeat)})
            self.register_parameter(name, parameter)
        self.eps = getattr(module, "eps", 0.0)
        self.register_buffer("bounds", None, persistent=False)
        bounds = getattr(module, "bounds", None)
        if bounds is not None:
            self.bounds = torch.empty(num_heads[len(bounds)] * repeat, dtype=torch.float32)
            _loader(len(bounds), 1, repeat)(self.bounds, torch.tensor(bounds, dtype=torch.float32))


def _loader(whole: int, per_head: int, repeat: int) -> Any:
    """Loads this rank's heads of a tensor whose first dimension has `whole` heads; shared kv heads are repeated."""

    def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        rows = parameter.shape[0] // repeat
        first = rank * whole // ranks * per_head
        parameter.data.copy_(loaded[first : first + rows].repeat_interleave(repeat, 0))

    return load


class FoxAttention:
    """Parts added to a vLLM attention module; its own forward runs with a `Call` in place of `self`."""

    native_forward: Any
    fox: Any
    attn: Attention
    head_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the native forward: (positions, hidden_states), or hidden_states=... of transformers' modules."""
        hidden: Any = kwargs.get("hidden_states", args[-1] if args else None)
        positions: Any = kwargs.get("positions", kwargs.get("position_ids", args[0] if args else None))
        call = Call(self, hidden.reshape(-1, hidden.shape[-1]), positions.reshape(-1))
        if kwargs.get("position_embeddings") is not None and self.fox.tables is not None:
            kwargs["position_embeddings"] = self.fox.tables(positions, kwargs["position_embeddings"][0].dtype)
        return self.native_forward(call, *args, **kwargs)


class Call:
    """Stands in for an attention module during one call: projections give normed heads, `attn` decays.

    Shapes: hidden_states (T, hidden), positions (T,), the tokens of all requests one after the other.
    """

    def __init__(self, module: Any, hidden_states: torch.Tensor, positions: torch.Tensor):
        self._module, self._hidden_states, self._positions = module, hidden_states, positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def qkv_proj(self) -> Any:
        """The projection to queries, keys and values side by side."""
        return self._module.qkv_proj if self._module.q_norm_fox is None else Normed(self._module)

    @property
    def attn(self) -> Attend:
        """The attention that the native forward calls with queries, keys and values."""
        return Attend(self._module, self._hidden_states, self._positions)


class Normed:
    """A projection to queries, keys and values that norms the heads of queries and keys (qk-norm)."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module.qkv_proj, name)

    def __call__(self, hidden_states: torch.Tensor) -> Any:
        module, attention = self._module, self._module.attn
        out = module.qkv_proj(hidden_states)
        flat = out[0] if isinstance(out, tuple) else out
        queries, keys = (heads * module.fox.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
        q, k, v = flat.split([queries, keys, keys], -1)
        q, k = _head_norm(q, module.q_norm_fox), _head_norm(k, module.k_norm_fox)
        flat = torch.cat([q, k, v], -1)
        return (flat, out[1]) if isinstance(out, tuple) else flat


class Attend:
    """Forgetting Attention in the place of a vLLM attention; norms and gates the output."""

    def __init__(self, module: Any, hidden_states: torch.Tensor, positions: torch.Tensor):
        self.module, self.hidden_states, self.positions = module, hidden_states, positions

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        """(T, H * D), (T, Hkv * D) twice -> (T, H * D)."""
        module, attention, fox = self.module, self.module.attn, self.module.fox
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, fox.head_dim
        query, key, value = (x.reshape(-1, n, dim) for x, n in ((query, heads), (key, kv_heads), (value, kv_heads)))
        if fox.log_n is not None:
            factor = (torch.log(self.positions.float() + 1) / math.log(fox.log_n)).clamp_min(1.0)
            query = query * factor[:, None, None].to(query.dtype)
        if module.forget_gate is None:
            output = attention(query.flatten(1), key.flatten(1), value.flatten(1)).view(-1, heads, dim)
        else:
            gates = self._log_f() if attention.impl.gate is None else self.hidden_states
            output = attend(attention, query, key, value, gates)
        if module.output_norm is not None:
            output = _head_norm(output.flatten(1), module.output_norm).view(output.shape)
        if module.output_gate is not None:
            logit = F.linear(self.hidden_states, module.output_gate.weight.to(self.hidden_states.dtype))
            output = (output * (2 * torch.sigmoid(logit.view(output.shape).float()))).to(output.dtype)
        return output.flatten(1)

    __call__ = forward

    def _log_f(self) -> torch.Tensor:
        """log f (T, H) float32, as `retrofox.model.modeling_fox.ForgetGate` computes it."""
        gate = self.module.forget_gate
        if hasattr(gate, "weight"):
            log_f = F.logsigmoid(F.linear(self.hidden_states.float(), gate.weight, gate.bias))
        else:
            log_f = F.logsigmoid(gate.bias).expand(self.hidden_states.shape[0], -1)
        return log_f if gate.bounds is None else log_f - gate.bounds


def _head_norm(flat: torch.Tensor, norm: Any) -> torch.Tensor:
    """(..., heads * D), each head divided by its RMS and times its gain, as a `HeadNorm` does."""
    wide = flat.float().view(-1, *norm.gain.shape)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.gain
    return normed.to(flat.dtype).view(flat.shape)


def install(model: nn.Module, config: Any, vllm_config: VllmConfig) -> None:
    """Gives each attention of a vLLM model the added parts of the converted model of `config`."""
    spec = FoxSpec.from_dict(config.fox)
    config = copy.deepcopy(config)
    config._attn_implementation = "fox"
    with torch.device("cpu"), set_default_torch_dtype(torch.float32):
        converted = on_meta(config.model_type.removeprefix("fox_"), config)
        wanted = {module.layer_idx: module for _, module in attentions(converted)}
    found = {
        extract_layer_index(name): module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "attn", None), Attention)
    }
    if not found or not set(found) <= set(wanted):
        raise ValueError(f"vLLM's {type(model).__name__} has no attention modules where they are looked for")
    for layer, module in found.items():
        _convert(module, wanted[layer], spec, vllm_config)


def _convert(module: Any, wanted: Any, spec: FoxSpec, vllm_config: VllmConfig) -> None:
    native: Attention = module.attn
    if (native.sliding_window or None) != sliding_window(wanted):
        raise ValueError(
            f"layer {wanted.layer_idx} has a sliding window of {sliding_window(wanted)} tokens, vLLM gives it one of "
            f"{native.sliding_window}"
        )
    config = wanted.config
    num_heads = {config.num_key_value_heads: native.num_kv_heads, config.num_attention_heads: native.num_heads}
    for name in ("forget_gate", "q_norm_fox", "k_norm_fox", "output_norm", "output_gate"):
        added = getattr(wanted, name)
        shared = name == "forget_gate" and wanted.heads_per_gate > 1
        repeat = native.num_heads // native.num_kv_heads if shared else 1
        setattr(module, name, None if added is None else Added(added, num_heads, repeat))
    fox = types.SimpleNamespace(head_dim=native.head_size, log_n=spec.log_n, tables=None)
    if wanted.forget_gate is not None:
        module.attn = with_gates(native, module.forget_gate, exempt_tokens(wanted), wanted.horizon, reach(wanted))
    if wanted.rotary_fade is not None and not wanted.rotary_fade.kept:
        length = max(config.max_position_embeddings, vllm_config.model_config.max_model_len)
        rotary = getattr(module, "rotary_emb", None)
        if rotary is None:
            fox.tables = faded(wanted.rotary_fade, length)
        else:
            module.rotary_emb = faded(wanted.rotary_fade, length, rotary)
    module.fox = fox
    own = module.__dict__.pop("forward", None)  # vLLM's fused forward of a transformers module
    forward = type(module).forward if own is None else own.__func__
    body = {"native_forward": staticmethod(forward), "__module__": __name__}
    module.__class__ = type(f"Fox{type(module).__name__}", (FoxAttention, type(module)), body)


def unconverted_config(config: Any) -> Any:
    """The config of the model that `config` was converted from."""
    values = config.to_dict()
    for name in ("fox", "auto_map", "transformers_weights", "model_type", "architectures"):
        values.pop(name, None)
    return CONFIG_MAPPING[config.model_type.removeprefix("fox_")].from_dict(values)


def make_class(base_type: str) -> type:
    """Fox<Family>ForCausalLM for vLLM."""
    native: Any = TransformersForCausalLM
    if base_type in NATIVE:
        file, name = NATIVE[base_type]
        native = getattr(importlib.import_module(f"vllm.model_executor.models.{file}"), name)

    def init(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check(vllm_config)
        config = vllm_config.model_config.hf_config
        given = vllm_config
        if base_type in THROUGH_TRANSFORMERS:
            given = vllm_config.with_hf_config(unconverted_config(config), architectures=["TransformersForCausalLM"])
        native.__init__(self, vllm_config=given, prefix=prefix)
        install(self, config, vllm_config)

    return type(f"Fox{SUPPORTED[base_type]}ForCausalLM", (native,), {"__init__": init, "__module__": __name__})


def __getattr__(name: str) -> type:
    """Classes are made on first use: FoxLlamaForCausalLM, ..."""
    for base_type in (*NATIVE, *THROUGH_TRANSFORMERS):
        if name == f"Fox{SUPPORTED[base_type]}ForCausalLM":
            globals()[name] = make_class(base_type)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
