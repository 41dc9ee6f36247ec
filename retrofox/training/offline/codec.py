"""A teacher's distribution in a few bytes: the k likeliest tokens and, as one outcome, all the others.

Log-probabilities are whole steps of 1/256 nat: with their sum made 1 again, a probability moves by 0.4 % at most,
whatever its size; the KL of the exact ones to them is 5e-7 nats. The k stand in falling order, so that their
differences are small numbers, and bytes of one kind stand together, which zstd packs best. SmolLM2-135M on 3072
tokens of novels, k = 64: 167 bytes a token; float16 packed in the same way 192, unpacked 256.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

STEPS_PER_NAT = 256
NEVER = 65535
"""Code of probability 0: of the rest, where the k are the whole vocabulary."""
ZSTD_LEVEL = 3
"""Level 9 saves 0.1 % at k = 64, 0.4 % at 256."""


def top_k_and_rest(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids (N, k) int64, log-probabilities (N, k + 1)) of logits (N, V), in falling order, the rest's mass last.

    The rest's is a log-sum-exp over the other tokens: 1 minus the sum of the k would be rounding where little is left.
    """
    largest, ids = logits.topk(top_k)
    rest = rest_of(logits, ids)
    total = torch.logaddexp(largest.logsumexp(-1), rest)
    return ids, torch.cat((largest, rest[:, None]), 1) - total[:, None]


def rest_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log sum exp of logits (N, V) over all tokens but ids (N, k): (N,); -inf, without a gradient, where k = V."""
    if ids.shape[1] == logits.shape[1]:
        return logits.new_full(logits.shape[:1], -torch.inf)
    return logits.scatter(1, ids, -torch.inf).logsumexp(-1)


def quantised(log_p: torch.Tensor) -> torch.Tensor:
    """Codes (N, k + 1) int32 of log-probabilities: round(-256 log p), at most 65534; 65535 for probability 0."""
    codes = (log_p.float() * -STEPS_PER_NAT).round().clamp(0, NEVER - 1)
    return torch.where(log_p == -torch.inf, float(NEVER), codes).int()


def log_probabilities(codes: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (N, k + 1) float32 of codes as `unpack` gives them, their sum made 1 again."""
    codes = unsigned(codes)
    log_p = torch.where(codes == NEVER, -torch.inf, codes.float() / -STEPS_PER_NAT)
    return log_p - log_p.logsumexp(-1, keepdim=True)


def unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """int64 of numbers whose 16 bits, where they have so few, are unsigned: torch computes little with uint16."""
    return numbers.long() & 0xFFFF if numbers.dtype == torch.int16 else numbers.long()


def id_type(vocabulary: int) -> np.dtype:
    """The type of token ids on disk: uint16 where the vocabulary allows it."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def pack(ids: np.ndarray, codes: np.ndarray) -> bytes:
    """One window, compressed: ids (T, k) of `id_type`, codes (T, k + 1) with the first k in rising order."""
    steps = codes.astype("<u2")
    steps[:, 1:-1] -= steps[:, :-2].copy()
    return pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(_planes(ids) + _planes(steps), asbytes=True)


def unpack(packed: bytes, tokens: int, top_k: int, ids_as: np.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids (T, k) int16 or int32, codes (T, k + 1) int16) of a packed window; int16 are unsigned bits (`unsigned`).

    Raises:
        ValueError: it is not a window of this shape.
    """
    sizes = tokens * top_k * ids_as.itemsize, tokens * (top_k + 1) * 2
    try:
        content = pa.decompress(packed, sum(sizes), codec="zstd", asbytes=True)
    except OSError as error:
        raise ValueError(str(error)) from error
    ids = _from_planes(content[: sizes[0]], (tokens, top_k), ids_as)
    codes = _from_planes(content[sizes[0] :], (tokens, top_k + 1), np.dtype("<u2"))
    np.cumsum(codes[:, :-1], axis=1, dtype=codes.dtype, out=codes[:, :-1])
    signed = np.dtype(f"<i{ids_as.itemsize}")
    return torch.from_numpy(ids.view(signed)), torch.from_numpy(codes.view("<i2"))


def _planes(numbers: np.ndarray) -> bytes:
    """All lowest bytes, then all second bytes, ..."""
    whole = np.ascontiguousarray(numbers)
    return whole.view(np.uint8).reshape(-1, whole.itemsize).T.tobytes()


def _from_planes(content: bytes, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
