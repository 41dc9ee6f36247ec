"""Forgetting Attention, the specification: read this first. Everything else in the package computes the same, faster.

    B batch, T queries, S keys, H query heads, Hkv key/value heads, D head dim; query t sits at position i = S - T + t

    log_f   (B, S, H)   log of the forget gate f = sigmoid(w.x + b), one per position and query head, <= 0
    c       (B, H, S)   cumulative log-forget: c_t = sum_{l <= t} max(log_f_l, -1e4); always summed in float64
    start   (B, S)      first position of a query's document: from cu_seqlens (packed), seq_start (left padding), else 0
    sink    keys start <= j < start + sink: no decay for them, and neither window nor horizon hides them
    horizon nats > 0: a key is visible while it has decayed by less. c falls, so the hidden keys of a query are a prefix

    visible(i, j)  =  start_i <= j <= i  and  (near(i, j)  or  j is a sink)
    near(i, j)     =  i - j < window  and  c_j < c_i + horizon
    raw_ij         =  scale * q_i.k_j,  then  softcap * tanh(raw_ij / softcap)  if there is a softcap
    s_ij           =  raw_ij + (c_i - c_j),  sinks: raw_ij alone
    lse_i          =  ln sum_{visible j} exp(s_ij)
    o_i            =  sum_{visible j} exp(s_ij - lse_i) v_j;   o_i = 0 and lse_i = -inf if nothing is visible

The horizon is part of the model: every implementation hides the same keys, and it has no gradient. Matrix products run
in the inputs' dtype; logits, decay and softmax in float32, or in float64 for float64.

Source: Lin et al., "Forgetting Transformer", ICLR 2025, arXiv 2503.02130. We differ from the paper in the sinks, in the
packed documents, in the horizon, and in summing c more precisely.
"""

import math

import torch

from .arguments import check, under_autocast
from .chunked import cumulative, document_starts
from .options import Documents, Options, given

Tensor = torch.Tensor


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, *, return_lse: bool = False, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """Forgetting Attention by its definition, the whole score matrix at once; differentiable twice, any floating dtype.

    q (B, T, H, D); k (B, S, Hkv, D), v (B, S, Hkv, DV), H % Hkv == 0; log_f (B, S, H) float32 or float64; options as in
    `fox_kernels.forgetting_attention`. Returns o (B, T, H, DV) in q's dtype and, with return_lse, lse (B, T, H) in
    float32 (float64 for float64). Raises ValueError for shapes, dtypes or options out of range.
    """
    q, k, v = under_autocast(q, k, v)
    wanted, documents = given(**options)
    return attend(q, k, v, log_f, check(q, k, v, log_f, wanted, documents), documents, return_lse)


def attend(q, k, v, log_f, options: Options, documents: Documents, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`forgetting_attention` for arguments that have been checked."""
    scale, window, sink, softcap, horizon = options
    (B, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    c = cumulative(log_f)
    decay = c[:, :, S - T :, None] - c[:, :, None, :]  # (B, H, T, S)
    i = torch.arange(S - T, S, device=q.device)[:, None]
    j = torch.arange(S, device=q.device)
    start = document_starts(B, S, documents.cu_seqlens, documents.seq_start, q.device)
    start = start[:, None, S - T :, None]  # (B, 1, T, 1)
    is_sink = j < start + sink
    hidden = torch.zeros_like(is_sink) if window is None else i - j >= window
    if horizon is not None:
        hidden = hidden | (c[:, :, None, :] >= (c[:, :, S - T :] + horizon)[..., None])
    visible = (start <= j) & (j <= i) & (is_sink | ~hidden)

    heads = torch.arange(H, device=q.device) // (H // Hkv)  # the kv head of each query head
    raw = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)[:, heads]).to(dtype) * scale
    if softcap is not None:
        raw = softcap * torch.tanh(raw / softcap)
    scores = raw + decay.masked_fill(is_sink, 0).to(dtype)
    scores = scores.masked_fill(~visible, -math.inf)

    empty = ~visible.any(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0), dim=-1, keepdim=True)  # finite also where nothing is visible
    weights = torch.exp(scores - lse)
    o = (weights.to(v.dtype) @ v.transpose(1, 2)[:, heads]).transpose(1, 2)
    if not return_lse:
        return o
    return o, lse.masked_fill(empty, -math.inf)[..., 0].transpose(1, 2)
