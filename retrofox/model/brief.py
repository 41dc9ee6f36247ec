"""Tokens through plain decoder layers on a CPU, in fewer operations than transformers' layers take.

A decoding step on a CPU reads every weight once; beside that, some hundred small operations a layer cost a few
microseconds each. Here a layer that is written like Llama's, byte for byte, and that nothing has touched takes its one
token through about fifty: norms of five operations, one rotary embedding for queries and keys, keys and gates written
where they belong, residual sums made by the products, and the queries of a kv head as rows of one product, so that
keys are read once for all of them. What a layer leaves behind is memory that the next one overwrites: new memory costs
a product of one row up to a tenth of its time.

A prompt's small operations read and write memory, much of it new from the system at each, which costs more than the
operations. In float32 it goes through the same layers with rotary embeddings written in place, and from the attention
on about a thousand rows at a time. Its larger products are oneDNN's, which take 0.74 to 0.99 of the time of F.linear's
on AMD processors; on Intel's F.linear, which is MKL there, is the faster one. There, and on AMD's with AVX-512, an MLP
of some rows, of a short prompt or of as many texts, is computed in columns, W x^T, by oneDNN: in 0.39 to 1.01 of the
time (benchmarks/few_rows.py).
Padded rows and other layers go through the layer's own forward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from .cache import CACHE, LOG_F_MIN, GateCache, GrowingLayer, growing_layer
from .fused import turns_halves, untouched
from .lean import written_like
from .parts import by_parts, divides

LN_2 = 0.6931471805599453
ROWS = 1024  # about as many of a prompt's tokens leave a layer together: 6 MB for each product of a small MLP
ONE_DNN_PAYS = 1 << 26  # multiplications: 96 tokens of 576 channels to 1536 in 0.93 of the time; fewer may take longer
VECTOR = 16  # float32 numbers in a register: columns are filled up to a multiple
COLUMNS = frozenset(n for n in range(7, 161) if -n % VECTOR <= (10 if n <= 64 else 4))
"""Rows of an MLP that columns pay for, where F.linear is MKL (benchmarks/few_rows.py)."""
MORE_COLUMNS, MANY = range(4, 193), 1 << 21  # the same for so many weights: of 960 x 2560, not of 576 x 1536
Linear = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A linear layer: weight, weight^T, bias."""


def _processor() -> str:
    """The beginning of Linux's /proc/cpuinfo, with the first processor's maker and flags; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read(4096)
    except OSError:
        return ""


def _one_dnn() -> Any:
    """oneDNN's linear layer (x, weight, bias, ...), or None where there is none."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def choices(processor: str) -> tuple[Any, Any, frozenset[int]]:
    """(oneDNN for rows, oneDNN for columns, few rows that oneDNN pays for), by the processor's maker and flags.

    Measured on Intel's with AVX-512 and on AMD's with and without it.
    """
    intel, wide = "GenuineIntel" in processor, "avx512f" in processor
    one_dnn = _one_dnn()
    turned = one_dnn if (intel or wide) and torch.backends.mkl.is_available() else None
    return None if intel else one_dnn, turned, frozenset({2, 3, 5} if wide and not intel else ())


ONE_DNN, TURNED, FEW = choices(_processor())


def plain(layer: Any) -> bool:
    """Whether a decoder layer does what `Pass.layer` does and nothing else."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None or not getattr(attention, "plain_forward", False):
        return False
    norms = [layer._modules.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    linears = [attention._modules.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [mlp._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(x) is nn.Linear and untouched(x) for x in linears):
        return False
    if not written_like(layer, modeling_llama.LlamaDecoderLayer) or not written_like(mlp, modeling_llama.LlamaMLP):
        return False
    if not all(x is not None and written_like(x, modeling_llama.LlamaRMSNorm) for x in norms):
        return False
    gate, fade, config = attention.forget_gate, attention.rotary_fade, attention.config
    return (
        untouched(attention)
        and attention.mode == "fox"
        and config._attn_implementation == "fox"
        and not attention.projects
        and attention.log_n is None
        and attention.window is None
        and attention.output_norm is None
        and attention.output_gate is None
        and gate is not None
        and gate.weight is not None
        and not gate.record
        and untouched(gate)
        and (fade is None or (fade.stacked and turns_halves(type(attention).native_forward)))
    )


class Weights:
    """What a plain layer computes with, looked up once: a token costs a microsecond for each attribute of a module.

    Linear layers are (weight, weight^T, bias), norms (weight, epsilon), all of them tensors.
    """

    def __init__(self, layer: Any):
        parts = layer._modules
        attention, mlp = parts["self_attn"], parts["mlp"]
        gate = attention._modules["forget_gate"]
        self.attention, self.act, self.fade = attention, mlp.act_fn, attention.rotary_fade
        self.silu = "SiLU" in type(mlp.act_fn).__name__
        self.index, self.width, self.heads = attention.layer_idx, attention.head_dim, attention.num_fox_heads
        self.scale, self.sinks = attention.scaling, attention.sink_tokens
        own, inner = attention._modules, mlp._modules
        self.q, self.k, self.v, self.o = (linear_of(own[name]) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        self.gate, self.up, self.down = (linear_of(inner[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        self.first, self.second = scaling(parts["input_layernorm"]), scaling(parts["post_attention_layernorm"])
        weight, bias = gate._parameters["weight"], gate.bias
        if not weight.dtype == bias.dtype == torch.float32:
            weight, bias = weight.float(), bias.float()
        self.forget = weight, weight.t(), bias
        self.kv = self.k[0].shape[0] // self.width
        self.sizes = self.heads, self.kv, self.width, *self.up[0].shape
        self.columns = COLUMNS if self.up[0].numel() < MANY else MORE_COLUMNS


def linear_of(module: nn.Linear) -> Linear:
    """(weight, weight^T, bias) of a linear layer."""
    weight: Any = module._parameters["weight"]
    return weight, weight.t(), module._parameters["bias"]


def scaling(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, epsilon) of an RMSNorm."""
    return module._parameters["weight"], _number(module.variance_epsilon)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _number(value: float) -> torch.Tensor:
    return torch.tensor(value)


class Room:
    """Memory for what lies between the products of a layer, for `rows` tokens; the layers of a pass share it.

    Attributes:
        normed: (rows, hidden), with zeros after it that fill up a vector (`filled`).
        q, k, v: (rows, heads D), side by side in memory; turning: q and k as (rows, H + Hkv, D).
        turned: (rows, H + Hkv, D), these after their rotary embedding, one token a row.
        still, moved: query (rows, Hkv, G, D) and key (rows, Hkv, 1, D) before and after it; value likewise.
        gate, up: (rows of a part, inner).
    """

    def __init__(self, sizes: tuple[int, ...], rows: int, like: torch.Tensor):
        heads, kv, width, inner, hidden = sizes
        part = part_of(rows)
        self.filled = like.new_zeros(-(-rows // VECTOR) * VECTOR, hidden)
        self.normed = self.filled[:rows]
        made = like.new_empty(rows, (heads + 2 * kv) * width)
        self.q, self.k, self.v = made.split((heads * width, kv * width, kv * width), 1)
        self.turning = made[:, : (heads + kv) * width].unflatten(1, (heads + kv, width))
        self.value = self.v.unflatten(1, (kv, 1, width))
        self.turned = torch.empty_like(self.turning)
        self.still, self.moved = (
            (x[:, :heads].unflatten(1, (kv, heads // kv)), x[:, heads:, None]) for x in (self.turning, self.turned)
        )
        self.gate, self.up = like.new_empty(2, part, inner)


def part_of(rows: int) -> int:
    """Rows of each part, as even as can be: a last part of a few rows would read all weights for them."""
    return -(-rows // max(1, round(rows / ROWS)))


class Pass:
    """Runs tokens through plain layers; what all layers of a pass share is made once.

    Attributes:
        weights: of each plain layer of the model, in order.
    """

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self._turned: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._rooms: dict[Any, Room] = {}

    def layer(self, module: Any) -> Any:
        """The forward of a plain decoder layer."""
        w, native = Weights(module), type(module).forward
        self.weights.append(w)

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
            batch, rows = hidden_states.shape[0], hidden_states.shape[0] * hidden_states.shape[1]
            cos_sin = self.angles(w.fade, position_embeddings, position_ids, prompt=cache is None)
            x = hidden_states.reshape(rows, -1)
            room = self.room(w, rows, x)
            h = norm(w.first, x, room.normed)
            if cache is not None:
                attended = attend_one(w, h, cos_sin, cache, room)
            else:
                if not (whole is None or type(whole) is DynamicCache):  # it may keep what it is given
                    room = Room(w.sizes, rows, x)
                attended = attend_all(w, h, batch, cos_sin, whole, room)
            return leave(w, attended, x, room).view(hidden_states.shape)

        return forward

    def room(self, w: Weights, rows: int, like: torch.Tensor) -> Room:
        """What this thread's layers of one shape share."""
        key = threading.get_ident(), torch.is_inference_mode_enabled(), rows, w.sizes, like.dtype
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = Room(w.sizes, rows, like)
        return found

    def angles(self, fade: Any, cos_sin: Any, position_ids: torch.Tensor | None, *, prompt: bool) -> Any:
        """cos and sin (B or 1, 1, D), the first half of sin negated; None where nothing turns.

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
                cos, sin = halved(*fade(*cos_sin, position_ids))
            made = self._turned[fade._shared_by] = (cos_sin[0], cos, sin)
        return made[1:]


def halved(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin (.., D) with its first half negated: x' = x cos + roll(x, D/2) sin."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def norm(weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """LlamaRMSNorm: w * x / sqrt(mean(x^2) + eps), in float32; in one pass for the sizes and two for the rows."""
    weight, eps = weights
    wide = x if x.dtype == torch.float32 else x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, size, size, value=1 / x.shape[-1]).rsqrt_()
    if wide is not x:
        return (wide * scale).to(x.dtype).mul_(weight)
    return torch.mul(x, scale, out=out).mul_(weight)


def product(linear: Linear, x: torch.Tensor, out: Any, prompt: bool = True) -> torch.Tensor:
    """What a linear layer does to rows (N, in): in `out` (N, out), or, of a prompt, in new memory where oneDNN pays."""
    weight, turned, bias = linear
    if prompt and ONE_DNN is not None and _one_dnn_pays(weight, x):
        return ONE_DNN(x, weight, bias, "none", [], "")
    return torch.mm(x, turned, out=out) if bias is None else torch.addmm(bias, x, turned, out=out)


def _one_dnn_pays(weight: torch.Tensor, x: torch.Tensor) -> bool:
    pays = x.shape[0] in FEW or x.numel() * weight.shape[0] >= ONE_DNN_PAYS
    return pays and x.dtype == torch.float32


def added(x: torch.Tensor, linear: Linear, y: torch.Tensor, out: Any = None) -> torch.Tensor:
    """x + what a linear layer does to rows y (N, in); in float32 the product adds to x as it goes."""
    weight, turned, bias = linear
    if x.dtype != torch.float32 or (ONE_DNN is not None and _one_dnn_pays(weight, y)):
        return torch.add(product(linear, y, None), x, out=out)
    total = torch.addmm(x, y, turned, out=out)
    return total if bias is None else total.add_(bias)


def leave(w: Weights, attended: torch.Tensor, x: torch.Tensor, room: Room) -> torch.Tensor:
    """What a layer does after its attention, in parts: (N, H D) and what entered the layer -> (N, hidden)."""
    rows, part = x.shape[0], room.gate.shape[0]
    if rows == part:
        return _leave(w, attended, x, room)
    out = torch.empty_like(x)
    for own in zip(*(rows.split(part) for rows in (attended, x, room.normed, out)), strict=True):
        _leave(w, own[0], own[1], room, *own[2:])
    return out


def _leave(
    w: Weights, attended: torch.Tensor, x: torch.Tensor, room: Room, normed: Any = None, out: Any = None
) -> torch.Tensor:
    x, rows = added(x, w.o, attended, out), x.shape[0]
    h = norm(w.second, x, room.normed if normed is None else normed)
    if TURNED is not None and normed is None and rows in w.columns and x.dtype == torch.float32:
        gate, up = turned(w.gate, room.filled), turned(w.up, room.filled)
        return x.add_(turned(w.down, activated(w, gate).mul_(up).t())[:, :rows].t())
    gate, up = (room.gate, room.up) if rows == room.gate.shape[0] else (room.gate[:rows], room.up[:rows])
    gate = activated(w, product(w.gate, h, gate))
    return added(x, w.down, gate.mul_(product(w.up, h, up)), x)


def activated(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """The MLP's activation, in place where it can be."""
    return F.silu(x, inplace=True) if w.silu else w.act(x)


def turned(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """What a linear layer does to rows (N, in), as columns (out, N)."""
    columns = TURNED(linear[0], x, None, "none", [], "")
    return columns if linear[2] is None else columns.add_(linear[2][:, None])


def log_f(w: Weights, h: torch.Tensor, batch: int) -> torch.Tensor:
    """log f (B, H, T) of a prompt (B T, hidden), a head's in sequence in memory, as they are summed."""
    weight, _, bias = w.forget
    log_f = F.logsigmoid(torch.addmm(bias[:, None], weight, h.t()))
    return log_f[None] if batch == 1 else log_f.view(w.heads, batch, -1).transpose(0, 1)


def attend_all(w: Weights, h: torch.Tensor, batch: int, cos_sin: Any, cache: Any, room: Room) -> torch.Tensor:
    """Forgetting Attention of a prompt or a part of one, before o_proj: (B T, hidden) -> (B T, H D)."""
    gates = log_f(w, h, batch)
    found = growing_layer(cache, w.index) if type(cache) is DynamicCache else None
    layer = found if type(found) is GrowingLayer and not found.get_seq_length() else None
    alone = layer is not None and h.shape[0] == batch  # a token alone sees itself, whatever its query
    rows = room.q if alone else product(w.q, h, room.q), product(w.k, h, room.k), product(w.v, h, room.v)
    q, k, v = (x.view(batch, -1, x.shape[-1] // w.width, w.width) for x in rows)
    if cos_sin is not None and rows[0] is room.q and rows[1] is room.k:
        turn(room.turning.view(batch, -1, *room.turning.shape[1:]), *cos_sin)
    elif cos_sin is not None:
        turn(q, *cos_sin)
        turn(k, *cos_sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if layer is not None:
        c = layer.begin(k, v, gates)
        if alone:
            return v.transpose(1, 2).repeat_interleave(w.heads // w.kv, 2).reshape(h.shape[0], -1)
        if w.attention.prune is None and divides(q, k, v):
            out = by_parts(q, k, v, c, w.scale, w.sinks)
            if out is not None:
                return out.view(h.shape[0], -1)
        view = GateCache(None, gates.transpose(1, 2))
        view.layer = layer
    else:
        view = GateCache(cache, gates.transpose(1, 2))
        k, v = view.update(k, v, w.index)
    return w.attention.attend(q, k, v, None, w.scale, gates=view)[0].reshape(h.shape[0], -1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns pairs (p, p + D/2) of x (B, T, heads, D) where they lie, for the first P of D/2; cos, sin (.., T, 1, P)."""
    pairs, half = cos.shape[-1], x.shape[-1] // 2
    first, second = x.narrow(-1, 0, pairs), x.narrow(-1, half, pairs)
    rest = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(rest)


def attend_one(w: Weights, h: torch.Tensor, cos_sin: Any, cache: GrowingLayer, room: Room) -> torch.Tensor:
    """Forgetting Attention of one token a row, before o_proj: (B, hidden) -> (B, H D); the cache grows by it.

    The decay is formed as in `attention._masked`: from differences of two floats.
    """
    product(w.q, h, room.q, False)
    product(w.k, h, room.k, False)
    product(w.v, h, room.v, False)
    query, key = room.still if cos_sin is None else room.moved
    if cos_sin is not None:
        cos, sin = cos_sin
        torch.mul(room.turning, cos, out=room.turned).addcmul_(room.turning.roll(w.width // 2, -1), sin)
    log_f = F.logsigmoid(product(w.forget, h.float(), None, False)).clamp_min_(LOG_F_MIN)
    keys, values, sums = cache.append_one(key, room.value, log_f)
    decay, lost = (sums.narrow(-1, sums.shape[-1] - 1, 1) - sums).chunk(2, 1)
    bias = decay.add_(lost).mul_(LN_2)
    if w.sinks:
        bias.narrow(-1, 0, min(w.sinks, bias.shape[-1])).zero_()
    bias = bias.view(h.shape[0], w.kv, -1, bias.shape[-1]).to(h.dtype)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=w.scale)
    return out.reshape(h.shape[0], -1)


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
    takes = type(layer) is GrowingLayer and layer.takes_one(x) and not torch.is_autocast_enabled("cpu")
    return layer if takes else None


@contextlib.contextmanager
def brief(model: Any) -> Iterator[Pass]:
    """Inside, a causal model's plain layers run in fewer operations; yields what runs them."""
    tokens = Pass()
    found = [layer for layer in model.get_decoder().layers if plain(layer)]
    for layer in found:
        layer.forward = tokens.layer(layer)
    try:
        yield tokens
    finally:
        for layer in found:
            layer.__dict__.pop("forward", None)  # another thread may have left at the same time
