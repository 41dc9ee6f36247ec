"""Generation whose context several processes share: a prompt too long for one GPU, and what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from retrofox.anatomy import inner_model, logits_from_hidden, require_known_tokens
from retrofox.parallel.decoding import Reading
from retrofox.parallel.launched import join, refuse_unconverted
from retrofox.parallel.layout import degrees
from retrofox.parallel.mesh import Mesh, build_mesh
from retrofox.parallel.settings import key_value_heads, refuse_sharing
from retrofox.parallel.shards import cut


def join_for(context: int, model: Any, **unshared: Any) -> str | None:
    """Joins the processes that share a context; the device of this one, None where there is no GPU.

    Args:
        unshared: options of `generate` that run on one GPU each; none may be given.

    Raises:
        ValueError: such an option is given, the model is unconverted, or another number of processes was launched.
    """
    given = [name for name, value in unshared.items() if value]
    if given:
        raise ValueError(
            f"context shares the keys of plain decoding, greedy or sampled, between processes: leave out "
            f"{', '.join(given)}"
        )
    refuse_unconverted(model)
    return join(context, "generate MODEL PROMPT")


@torch.no_grad()
def complete_shared(
    model: Any,
    token_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    ends: Sequence[int] = (),
    streamer: BaseStreamer | None = None,
    mesh: Mesh | None = None,
    logits: list[torch.Tensor] | None = None,
) -> list[list[int]]:
    """Continues prompts of one length, which the processes of a context group share; every process must call it.

    The first process draws, with torch's global random state, and tells the others.

    Args:
        temperature, top_p: as in `generate.complete`, with its draws.
        ends: ids that end a text.
        mesh: the context group; None = all processes.
        logits: gets those of each step, (B, vocabulary) float32 on the CPU, if given.

    Returns:
        New ids of each prompt, of one length: what follows a prompt's first end is not part of its text.

    Raises:
        ValueError: prompts of several lengths, or a model that can't be shared.
    """
    lengths = sorted({len(ids) for ids in token_ids})
    if len(lengths) > 1:
        raise ValueError(f"context takes prompts of one length, got {lengths} tokens: give them one by one")
    require_known_tokens(model, max(max(ids) for ids in token_ids))
    device, length = next(model.parameters()).device, lengths[0]
    if mesh is None:
        mesh = build_mesh(degrees(dist.get_world_size(), key_value_heads(model.config)))
    unit = mesh.degrees.unit
    padded = -(-length // unit) * unit
    refuse_sharing(model, padded, mesh.degrees)
    warpers: Any = LogitsProcessorList()
    if temperature > 0:
        warpers.append(TemperatureLogitsWarper(temperature))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
    prompt = torch.tensor(token_ids, dtype=torch.long)
    if streamer is not None:
        streamer.put(prompt)
    hidden, reading = _read(mesh, model, F.pad(prompt, (0, padded - length)), length, device)
    decoding = reading.decoding(max_new_tokens)
    ended = torch.zeros(len(token_ids), dtype=torch.bool)
    stops = torch.tensor(list(ends), dtype=torch.long)
    found = []
    for number in range(max_new_tokens):
        scores = logits_from_hidden(model, hidden).float()
        if logits is not None:
            logits.append(scores.cpu())
        tokens = _chosen(mesh, warpers, prompt, scores, sampled=temperature > 0)
        here = tokens.cpu()
        found.append(here)
        if streamer is not None:
            streamer.put(here)
        ended |= torch.isin(here, stops)
        if bool(ended.all()) or number + 1 == max_new_tokens:
            break
        positions = torch.full((len(token_ids), 1), decoding.position, device=device)
        hidden = inner_model(model)(
            input_ids=tokens[:, None], position_ids=positions, use_cache=False, shards=decoding
        ).last_hidden_state[:, -1]
    return torch.stack(found, 1).tolist()


def _read(
    mesh: Mesh, model: Any, rows: torch.Tensor, length: int, device: torch.device
) -> tuple[torch.Tensor, Reading]:
    """(hidden state (B, hidden) of the prompt's last token, on every process; the keys that this one keeps)."""
    positions = torch.arange(rows.shape[1]).expand(rows.shape[0], -1)
    part = cut({"input_ids": rows, "position_ids": positions, "targets": rows}, mesh.degrees, mesh.rank)
    reading = Reading(mesh, part["rows"], device, length)
    hidden = inner_model(model)(
        input_ids=part["input_ids"].to(device),
        position_ids=part["position_ids"].to(device),
        use_cache=False,
        shards=reading,
    ).last_hidden_state
    at = reading.last
    return mesh.sum(torch.zeros_like(hidden[:, 0]) if at is None else hidden[:, at]), reading


def _chosen(mesh: Mesh, warpers: Any, prompt: torch.Tensor, scores: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    """(B,) the next tokens, as the group's first process chose them."""
    scores = warpers(prompt, scores)
    if sampled:
        tokens = torch.multinomial(torch.softmax(scores, -1), num_samples=1)[:, 0]
    else:
        tokens = scores.argmax(-1)
    dist.broadcast(tokens, mesh.reader * mesh.size, group=mesh.group)
    return tokens
