"""Conversations that an instruct model makes itself, trained on beside texts so that its answers change less.

The model writes both turns: the user's from the template's opening alone, then its own answer (Xu et al., "Magpie",
arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from retrofox.config import DataConfig, Recipe, Source
from retrofox.config_values import kv_heads_of
from retrofox.data.chat import rendered
from retrofox.generation.generate import complete, end_tokens, seeded
from retrofox.loading.device import PRECISIONS
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.support.files import stamps, write_whole
from retrofox.support.report import check_folder, progress_bar

USER_TOKENS, ANSWER_TOKENS = 128, 384
"""A turn that has not ended by then is dropped with its conversation."""
TEMPERATURE, TOP_P = 0.8, 0.95
TOKENS_LEARNT, OF_MANY = 750, 1300
"""Tokens to train on for each conversation made: some 250 long, each is read about three times, of MANY five times."""
FEWEST, MANY, MOST = 200, 800, 20_000
CACHE_BYTES = 24 << 30
"""Most bytes of keys and values of the conversations sampled together; half of a GPU's free memory if less."""
_USER = "what the user says"


def with_self_chat(recipe: Recipe, tokenizer: Any, device: torch.device, progress: bool) -> DataConfig:
    """The recipe's data with `data.self_chat` as one more source of conversations, made now if they are not there.

    They lie in `data.cache`, under a name that changes with the model's files and their number.

    Raises:
        ValueError: the tokenizer has no chat template, the model ends hardly any turn, or the cache is read-only.
    """
    data = recipe.data
    if not data.self_chat:
        return data
    learnt = data.self_chat * sum(stage.tokens for stage in recipe.stages)
    count = min(MOST, max(FEWEST, min(MANY, round(learnt / TOKENS_LEARNT)), round(learnt / OF_MANY)))
    made_from = [recipe.model, data.tokenizer, count, TEMPERATURE, TOP_P, *stamps(Path(recipe.model))]
    path = data.cache_dir / f"self-chat-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        check_folder(data.cache_dir)  # before minutes of sampling
        opening, closing = turns_around_user(tokenizer)
        opened = open_model(recipe.model, tokenizer=tokenizer, dtype=PRECISIONS[recipe.precision], device=device)
        made = sample_conversations(opened, count, opening, closing, progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():  # a run beside this one may have made its own meanwhile, and read them
            write_whole(path, "".join(json.dumps({"messages": chat}) + "\n" for chat in made).encode())
    weight = data.self_chat / (1 - data.self_chat) * sum(source.weight for source in data.train)
    chats = Source(path=str(path), chat=True).model_copy(update={"weight": weight})  # may exceed what a recipe may give
    return data.model_copy(update={"train": [*data.train, chats]})


def turns_around_user(tokenizer: Any) -> tuple[str, str]:
    """(what a conversation begins with, what stands between the user's words and the answer) by the chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("data.self_chat: without a chat template the model is no instruct model: remove self_chat")
    if tokenizer.eos_token_id is None:
        raise ValueError("data.self_chat: the tokenizer names no token that ends a turn: remove self_chat")
    message = [{"role": "user", "content": _USER}]
    text = rendered(tokenizer, message, "data.self_chat: the chat template refuses a user's turn")
    opening, found, closing = text.partition(_USER)
    if not found:
        raise ValueError("data.self_chat: the chat template changes what the user says: remove self_chat")
    return opening, closing


def sample_conversations(
    opened: LoadedModel, count: int, opening: str, closing: str, progress: bool = True
) -> list[list[dict[str, str]]]:
    """`count` conversations of two turns, [{"role", "content"}, ...], at temperature 0.8 and top-p 0.95, seed 0.

    Raises:
        ValueError: fewer than one in eight conversations come to an end.
    """
    rows = rows_at_a_time(opened.model, count)
    made: list[list[dict[str, str]]] = []
    tried = 0
    with seeded(0, opened.device), progress_bar("conversations", progress) as bar:
        task = bar.add_task("the model talks to itself", total=count)
        while len(made) < count:
            if tried >= 8 * max(len(made), rows):
                raise ValueError(
                    f"data.self_chat: of {tried} conversations that {opened.source} began, it ended "
                    f"{len(made)}: it is hardly an instruct model; remove self_chat"
                )
            tried += rows
            asked = [text for text in _turn(opened, [opening] * rows, USER_TOKENS) if text]
            answers = _turn(opened, [opening + text + closing for text in asked], ANSWER_TOKENS)
            for text, answer in zip(asked, answers, strict=True):
                if answer:
                    made.append([{"role": "user", "content": text}, {"role": "assistant", "content": answer}])
            bar.update(task, completed=min(len(made), count))
    return made[:count]


def rows_at_a_time(model: Any, count: int) -> int:
    """How many conversations are begun together for `count` that end: 8 on a CPU, twice as many on a GPU, or 2048."""
    if model.device.type != "cuda":
        return min(count, 8)
    config = model.config
    kv_heads = kv_heads_of(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    room = min(CACHE_BYTES, torch.cuda.mem_get_info(model.device)[0] // 2)
    return max(1, min(2 * count, room // (token_bytes * (USER_TOKENS + ANSWER_TOKENS)), 2048))


def _turn(opened: LoadedModel, prompts: Sequence[str], longest: int) -> list[str | None]:
    """The model's text after each prompt; None where it is empty, or did not end within `longest` tokens."""
    if not prompts:
        return []
    tokenizer, ends = opened.tokenizer, end_tokens(opened)
    ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    written = complete(opened, ids, longest, temperature=TEMPERATURE, top_p=TOP_P)
    said = [tokenizer.decode(row[:-1], skip_special_tokens=True).strip() if row[-1] in ends else "" for row in written]
    return [text or None for text in said]
