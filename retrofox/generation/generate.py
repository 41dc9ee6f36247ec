"""Generation with a cache of keys, values and gates: batched, left-padded, streamed."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from retrofox.acceleration.cuda_graph_decoding import forgets
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.anatomy import require_known_tokens, vocabulary_size
from retrofox.config_values import depends_on_length, horizon_of
from retrofox.data.chat import rendered
from retrofox.generation.sampling import check_sampling
from retrofox.generation.streaming import Meter, Writer
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.model.modeling_fox import CACHE
from retrofox.support.report import reading_bar

SHORT_PROMPT = 512
"""Tokens of a prompt that is read without a progress bar."""
CPU_PART, PART_BYTES = 2048, 1 << 28
"""Tokens of a long prompt that a CPU reads at a time; bytes of an MLP's activation while a GPU reads a part."""


def generate(
    model: str | os.PathLike | PreTrainedModel,
    prompts: Sequence[str],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stream: bool = True,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    cache: str = "auto",
    *,
    chat_template: bool = False,
    ignore_eos: bool = False,
    tokenizer: Any = None,
    output: TextIO | None = None,
) -> dict[str, Any]:
    """Continues prompts; several run as one left-padded batch and give what each would give alone.

    Args:
        model: Hub id, directory, .gguf file, adapter directory or a live model.
        prompts: one or more texts.
        max_new_tokens: tokens to generate for each prompt, fewer where the model ends its text.
        temperature: 0 = greedy; otherwise tokens are drawn from softmax(logits / temperature).
        top_p: draw only from the likeliest tokens that together hold this probability.
        stream: write text to `output` as it comes: the first prompt's token by token, the others' when all are done.
            False writes nothing.
        seed: of the draw, with a temperature above 0; the same seed gives the same text. None = the global random
            state.
        cache: "auto", "full" or "forgetting", see `new_cache`.
        chat_template: treat each prompt as a user's message and apply the tokenizer's chat template.
        ignore_eos: continue to max_new_tokens past the end-of-text token.
        output: where the stream goes, None = stdout; the closing line with tokens/s goes to stderr.

    Returns:
        {"texts", "token_ids" (new ones), "prompt_tokens", "new_tokens", "seconds", "first_token_seconds",
        "tokens_per_second", "cache_bytes" (what it keeps allocated), "decoded_by" (a captured step, or why not; None
        for base models)}.

    Raises:
        FileNotFoundError: no such model.
        ValueError: no prompt, an empty one where the tokenizer has no token to start from, or bad options.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    check_sampling(prompts, max_new_tokens, temperature, top_p, seed, cache)
    opened = open_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
    token_ids = [_encode(opened.tokenizer, prompt, chat_template) for prompt in prompts]
    writer = Writer(opened.tokenizer, output or sys.stdout, len(prompts)) if stream else None
    meter = Meter(end_tokens(opened), writer)
    kept = new_cache(opened.model, cache)
    started = time.perf_counter()
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "ignore_eos": ignore_eos}
    unread = max(map(len, token_ids)) if stream else 0
    generated = complete(opened, token_ids, max_new_tokens, **sampling, cache=kept, streamer=meter, unread=unread)
    seconds = time.perf_counter() - started
    texts = [opened.tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]
    if writer is not None:
        writer.finish(texts)
    new_tokens = sum(len(ids) for ids in generated)
    result = {
        "texts": texts,
        "token_ids": generated,
        "prompt_tokens": sum(len(ids) for ids in token_ids),
        "new_tokens": new_tokens,
        "seconds": seconds,
        "first_token_seconds": meter.times[0] - started,
        "tokens_per_second": new_tokens / seconds,
        "cache_bytes": cache_bytes(kept),
        "decoded_by": getattr(opened.model, "decoded_by", None),
    }
    if stream:
        print(
            f"[{result['new_tokens']} tokens in {result['seconds']:.2f} s, {result['tokens_per_second']:.1f} tokens/s"
            f", first token after {result['first_token_seconds']:.2f} s, prompt {result['prompt_tokens']} tokens]",
            file=sys.stderr,
        )
    return result


@torch.no_grad()
def complete(
    opened: LoadedModel,
    token_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    cache: Any = None,
    ignore_eos: bool = False,
    streamer: BaseStreamer | None = None,
    unread: int = 0,
) -> list[list[int]]:
    """Continues token ids as one left-padded batch; returns the new ids of each, without what follows its end token.

    Args:
        cache: an empty cache, or one that holds a prefix of the one sequence given, which grows in place; None = a new
            one, see `new_cache`.
        unread: tokens that the cache lacks; a progress bar shows them while they are read. 0 = no bar.
    """
    cache = new_cache(opened.model) if cache is None else cache
    ends = [] if ignore_eos else end_tokens(opened)
    pad = opened.tokenizer.pad_token_id
    if pad is None or not 0 <= pad < vocabulary_size(opened.model):  # added to the tokenizer alone: no row has its id
        pad = 0
    longest = max(len(ids) for ids in token_ids)
    require_known_tokens(opened.model, max(max(ids) for ids in token_ids))
    ids = torch.full((len(token_ids), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(token_ids):
        ids[row, longest - len(own) :] = torch.tensor(own)
        mask[row, longest - len(own) :] = 1
    sampled = temperature > 0
    part = part_tokens(opened.model, len(ids))
    # every field is set, since transformers fills those that are None from the checkpoint's generation_config.json
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampled,
        temperature=temperature if sampled else 1.0,
        top_p=top_p if sampled else 1.0,
        top_k=0 if sampled else 50,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=pad,
        bos_token_id=opened.tokenizer.bos_token_id,
        prefill_chunk_size=part if part is not None and longest > part else None,
    )
    shown = reading_bar(opened.model, "reading the prompt", unread, unread > SHORT_PROMPT)
    with _without_defaults(opened.model) as model, seeded(seed, opened.device), shown:
        output = model.generate(
            input_ids=ids.to(opened.device),
            attention_mask=mask.to(opened.device),
            generation_config=config,
            streamer=streamer,
            **{CACHE: cache},
        )
    new = output[:, longest:].tolist()
    return [next((row[:n] for n, token in enumerate(row, 1) if token in ends), row) for row in new]


def part_tokens(model: Any, rows: int = 1) -> int | None:
    """Tokens of long prompts, so many rows, that a model reads at a time; None: all.

    A converted model reads parts, but where rotary angles depend on the length of what is read. On a GPU they have
    8192 to 65536 tokens (a 135M model's 65536, an 8B model's 8192): it would wait for the host to launch shorter ones.
    On a CPU short ones are faster: a cache that forgets drops keys after each.
    """
    if not model.config.model_type.startswith("fox_") or depends_on_length(model.config):
        return None
    if model.device.type == "cpu":
        return CPU_PART
    wide = model.config.intermediate_size * (getattr(model.config, "num_experts_per_tok", None) or 1)
    fits = max(8192, PART_BYTES // (rows * wide * model.dtype.itemsize))
    return min(1 << (fits.bit_length() - 1), 65536)


def end_tokens(opened: LoadedModel) -> list[int]:
    """Ids that end a text: the generation config's (chat models have several) or the tokenizer's."""
    ends = getattr(opened.model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = opened.tokenizer.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]


def _encode(tokenizer: Any, prompt: str, chat_template: bool) -> list[int]:
    if chat_template:
        return render(tokenizer, [{"role": "user", "content": prompt}])
    ids = list(tokenizer(prompt)["input_ids"])
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ValueError("an empty prompt needs a tokenizer with a begin- or end-of-text token to start from")
        ids = [start]
    return ids


@contextmanager
def _without_defaults(model: Any) -> Iterator[Any]:
    """The model, its modules shared, without the checkpoint's sampling defaults, which transformers would mix into a
    config that leaves a field None.

    The model itself keeps them: other threads may use it meanwhile.
    """
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig()
    yield bare
    if hasattr(bare, "decoded_by"):
        model.decoded_by = bare.decoded_by


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws from a stream of its own and leaves the global random state as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    roles = ", ".join(message["role"] for message in messages)
    text = rendered(tokenizer, messages, f"the chat template can't render messages of {roles}")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def new_cache(model: Any, kind: str = "auto") -> Any:
    """An empty cache for a model, of one of the `sampling.CACHES`.

    "full" keeps all keys; "forgetting" frees those that the model's horizon hides for good; "auto" is the latter
    for a model with a horizon, but on a GPU not for multi-head latent attention.
    """
    if kind == "forgetting" and horizon_of(model.config) is None:
        raise ValueError('cache "forgetting" needs a model with a horizon (fox.horizon): take "full"')
    forgetting = kind == "forgetting" or (kind == "auto" and forgets(model))
    return ForgettingCache() if forgetting else DynamicCache(config=model.config)


def cache_bytes(cache: Any) -> int:
    """Bytes that the tensors of a cache keep allocated."""
    found: dict[int, int] = {}
    if isinstance(cache, ForgettingCache):
        cache.settle()

    def look(held: Any) -> None:
        if isinstance(held, torch.Tensor):
            found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
        elif isinstance(held, (list, tuple)):
            for each in held:
                look(each)
        elif hasattr(held, "is_initialized"):  # a layer, or one in a layer
            look([x for x in vars(held).values() if x is not cache.layers])

    look(cache.layers)
    return sum(found.values())
