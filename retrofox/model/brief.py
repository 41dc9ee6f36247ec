"""Tokens through plain decoder layers on a CPU, in fewer operations than transformers' layers take.

A decoding step on a CPU reads every weight once; beside that, some hundred small operations a layer cost a few
microseconds each. Here a layer that is written like Llama's, byte for byte, and that nothing has touched takes its one
token through about thirty: norms of four operations, one rotary embedding for queries and keys, keys and gates written
where they belong, and the queries of a kv head as rows of one product, so that keys are read once for all of them.

A prompt's small operations read and write memory, much of it new from the system at each, which costs more than the
operations. In float32 it goes through the same layers with rotary embeddings written in place, and from the attention
on some hundred rows at a time, so that what lies between two products stays in the processor's cache. Its larger
products are oneDNN's, which take 0.74 to 0.98 of the time of F.linear's on an AMD processor; on Intel's F.linear, which
is MKL there, is the faster one. MKL takes a few rows through the weights three at a time, and sixteen columns at once:
there an MLP of 9 to 16 rows, of a short prompt or of as many texts, is computed in columns, in 0.44 to 0.94 of the
time.
Padded rows and other layers go through the layer's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import modeling_llama

from .cache import CACHE, LOG_F_MIN, GateCache, GrowingLayer
from .fused import turns_halves, untouched
from .lean import written_like

LN_2 = 0.6931471805599453
ROWS = 512  # a prompt's tokens that leave a layer together: 3 MB for each product of a small model's MLP
ONE_DNN_PAYS = 1 << 23  # multiplications: 76 tokens to 192 of 576 channels; for fewer, the call takes longer
LARGE = 1 << 19  # weights: with more, it pays from 2 rows on; of 576 x 1536 in 0.69 of the time, 0.97 for 4 rows
COLUMNS = range(9, 17)  # rows that MKL multiplies sooner as columns (benchmarks/few_rows.py)


def _intel() -> bool:
    """Whether this is one of Intel's processors, as Linux says."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "GenuineIntel" in file.read(4096)
    except OSError:
        return False


def _one_dnn(intel: bool) -> Any:
    """oneDNN's linear layer; None where there is none, or F.linear is faster: on Intel's processors."""
    if intel or not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


INTEL = _intel()
ONE_DNN: Any = _one_dnn(INTEL)
MKL = INTEL and torch.backends.mkl.is_available()  # what F.linear is there


def plain(layer: Any) -> bool:
    """Whether a decoder layer does what `Pass.layer` does and nothing else."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None or not getattr(attention, "plain_forward", False):
        return False
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    if not all(type(x) is nn.Linear and untouched(x) for x in linears):
        return False
    if not written_like(layer, modeling_llama.LlamaDecoderLayer) or not written_like(mlp, modeling_llama.LlamaMLP):
        return False
    if not all(x is not None and written_like(x, modeling_llama.LlamaRMSNorm) for x in norms):
        return False
    gate, fade, config = attention.forget_gate, attention.rotary_fade, attention.config
    added = (attention.output_norm, attention.output_gate)
    return (
        untouched(attention)
        and attention.mode == "fox"
        and config._attn_implementation == "fox"
        and not attention.projects
        and attention.log_n is None
        and attention.window is None
        and all(x is None for x in added)
        and gate is not None
        and gate.weight is not None
        and not gate.record
        and untouched(gate)
        and (fade is None or (fade.stacked and turns_halves(type(attention).native_forward)))
    )


class Weights:
    """What a plain layer computes with, looked up once: a token costs a microsecond for each attribute of a module.

    Linear layers are (weight, bias), norms (weight, epsilon), both as tensors.
    """

    def __init__(self, layer: Any):
        attention, mlp, gate = layer.self_attn, layer.mlp, layer.self_attn.forget_gate
        self.attention, self.act, self.fade = attention, mlp.act_fn, attention.rotary_fade
        self.index, self.width, self.heads = attention.layer_idx, attention.head_dim, attention.num_fox_heads
        self.scale, self.sinks = attention.scaling, attention.sink_tokens
        linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
        linears += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = ((x.weight, x.bias) for x in linears)
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.first, self.second = ((x.weight, torch.tensor(x.variance_epsilon)) for x in norms)
        self.forget = gate.weight.float(), gate.bias.float()


class Pass:
    """Runs tokens through plain layers; what all layers of a pass share is made once."""

    def __init__(self) -> None:
        self._turned: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def layer(self, module: Any) -> Any:
        """The forward of a plain decoder layer."""
        w, native = Weights(module), type(module).forward

        def forward(
            hidden_states: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            past_key_values: Any = None,
            use_cache: bool | None = False,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            whole = kwargs.pop("cache", past_key_values)
            cache = _room_for_one(whole, w.index, hidden_states)
            if attention_mask is not None or kwargs or (cache is None and not _prompt(hidden_states)):
                return native(
                    module, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                    use_cache=use_cache, position_embeddings=position_embeddings, **{CACHE: whole}, **kwargs,
                )  # fmt: skip
            cos_sin = self._cos_sin(w.fade, position_embeddings, position_ids, cache is None)
            x = norm(w.first, hidden_states)
            if cache is not None:
                attended = attend_one(w, x, cos_sin, cache)
            else:
                gates = GateCache(whole, log_f(w, x), x, position_ids)
                attended = attend_all(w, x, cos_sin, gates)
            if x.shape[0] * x.shape[1] <= ROWS:
                return leave(w, attended, hidden_states)
            out = torch.empty_like(hidden_states)
            tiles = (rows.reshape(-1, rows.shape[-1]).split(ROWS) for rows in (attended, hidden_states))
            for tile, *rows in zip(out.view(-1, out.shape[-1]).split(ROWS), *tiles, strict=True):
                tile.copy_(leave(w, *rows))
            return out

        return forward

    def _cos_sin(self, fade: Any, cos_sin: Any, position_ids: torch.Tensor | None, prompt: bool) -> Any:
        """cos and sin (B or 1, 1, 1, D), the first half of sin negated; None where nothing turns.

        Of a prompt (B or 1, T, 1, P), of the P pairs that may turn.
        """
        if fade is None or fade.skippable or cos_sin is None:
            return None
        made = self._turned.get(fade._shared_by)
        if made is None or made[0] is not cos_sin[0]:
            if prompt:
                half = cos_sin[0].shape[-1] // 2
                cos, sin = (x[:, :, None, :half] for x in fade.leading(*cos_sin, position_ids))
            else:
                cos, sin = (x[:, None] for x in fade(*cos_sin, position_ids))
                half = sin.shape[-1] // 2
                sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            made = self._turned[fade._shared_by] = (cos_sin[0], cos, sin)
        return made[1:]


def norm(weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm: w * x / sqrt(mean(x^2) + eps), in float32; in one pass for the sizes and two for the rows."""
    weight, eps = weights
    wide = x.float()
    scale = torch.add(eps, torch.linalg.vecdot(wide, wide)[..., None], alpha=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def leave(w: Weights, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a layer does after its attention, row by row: (.., H D) and what entered the layer -> (.., hidden)."""
    x = product(w.o, attended).add_(x)
    h = norm(w.second, x)
    if MKL and x.numel() // x.shape[-1] in COLUMNS and x.dtype == torch.float32:
        h = h.reshape(-1, x.shape[-1]).t().contiguous()
        h = w.act(columns(w.gate, h)).mul_(columns(w.up, h))
        return torch.add(x, columns(w.down, h).t().view(x.shape))
    h = w.act(product(w.gate, h)).mul_(product(w.up, h))
    return product(w.down, h).add_(x)


def columns(linear: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
    """What a linear layer does to columns: (in, N) -> (out, N)."""
    weight, bias = linear
    return torch.mm(weight, x) if bias is None else torch.addmm(bias[:, None], weight, x)


def product(linear: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
    """What a linear layer does; of several float32 rows, oneDNN's where it pays."""
    few = linear[0].numel() < LARGE and x.numel() * linear[0].shape[0] < ONE_DNN_PAYS
    if few or x.numel() == x.shape[-1] or ONE_DNN is None or x.dtype != torch.float32:
        return F.linear(x, *linear)
    return ONE_DNN(x, *linear, "none", [], "")


def log_f(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """log f (B, T, H) of a prompt, a head's in sequence in memory, as they are summed."""
    weight, bias = w.forget
    opened = torch.baddbmm(bias[:, None], weight.expand(x.shape[0], -1, -1), x.transpose(1, 2))
    return F.logsigmoid(opened).transpose(1, 2)


def attend_all(w: Weights, x: torch.Tensor, cos_sin: Any, gates: GateCache) -> torch.Tensor:
    """Forgetting Attention of a prompt or a part of one, before o_proj: x (B, T, hidden) -> (B, T, H D)."""
    q, k, v = (product(p, x).unflatten(-1, (-1, w.width)) for p in (w.q, w.k, w.v))
    if cos_sin is not None:
        turn(q, *cos_sin)
        turn(k, *cos_sin)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = gates.update(k, v, w.index)
    forgets = gates.layer is not None and type(gates.layer) is not GrowingLayer
    if k.shape[2] == 1 and not forgets:  # a token alone sees itself
        return v.transpose(1, 2).repeat_interleave(w.heads // v.shape[1], 2).flatten(2)
    return w.attention.attend(q, k, v, None, w.scale, gates=gates)[0].flatten(2)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns pairs (p, p + D/2) of x (B, T, heads, D) where they lie, for the first P of D/2; cos, sin (.., T, 1, P)."""
    pairs, half = cos.shape[-1], x.shape[-1] // 2
    first, second = x.narrow(-1, 0, pairs), x.narrow(-1, half, pairs)
    rest = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(rest)


def attend_one(w: Weights, x: torch.Tensor, cos_sin: Any, cache: GrowingLayer) -> torch.Tensor:
    """Forgetting Attention of one token a row, before o_proj: x (B, 1, hidden) -> (B, 1, H D); the cache grows by it.

    The decay is formed as in `attention._masked`: from differences of two floats.
    """
    batch, width, heads = x.shape[0], w.width, w.heads
    q, k, v = F.linear(x, *w.q), F.linear(x, *w.k), F.linear(x, *w.v)
    kv = k.shape[-1] // width
    group = heads // kv
    both = torch.cat([q.view(batch, kv, group, width), k.view(batch, kv, 1, width)], 2)
    if cos_sin is not None:
        cos, sin = cos_sin
        both = torch.addcmul(both * cos, both.roll(width // 2, -1), sin)
    log_f = F.logsigmoid(F.linear(x.float(), *w.forget)).clamp_min_(LOG_F_MIN)
    query, key = both.split_with_sizes((group, 1), 2)
    keys, values, sums = cache.append_one(key, v.view(batch, kv, 1, width), log_f)
    decay, lost = (sums[..., -1:] - sums).chunk(2, 1)
    bias = decay.add_(lost).mul_(LN_2)
    if w.sinks:
        bias[..., : w.sinks].zero_()
    bias = bias.view(batch, kv, group, -1).to(x.dtype)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=w.scale)
    return out.reshape(batch, 1, heads * width)


def _prompt(x: torch.Tensor) -> bool:
    """Whether these are float32 tokens in plain inference on a CPU."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or type(x) is not torch.Tensor:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())


def _room_for_one(cache: Any, index: int, x: torch.Tensor) -> Any:
    """The cache layer, if it is one that grows in place and takes one more token a row as it is."""
    if x.shape[1] != 1 or cache is None or index >= len(cache.layers) or getattr(cache, "offloading", False):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is GrowingLayer and layer.takes_one(x) else None


@contextlib.contextmanager
def brief(model: Any) -> Iterator[int]:
    """Inside, a causal model's plain layers run in fewer operations; yields how many there are."""
    tokens = Pass()
    found = [layer for layer in model.get_decoder().layers if plain(layer)]
    for layer in found:
        layer.forward = tokens.layer(layer)
    try:
        yield len(found)
    finally:
        for layer in found:
            layer.__dict__.pop("forward", None)  # another thread may have left at the same time
