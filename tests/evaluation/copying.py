"""A two-layer Llama that copies: its weights are written down, not trained, so that it copies the same way everywhere.

Layer 0 is a previous-token head: constant queries and keys, turned against each other by one position in every rotary
pair, so that sum_p cos(w_p (i - j - 1)) is largest at j = i - 1. It copies the token before into a place of its own.
Layer 1 is an induction head: it looks for positions whose token before is the present token and predicts the token
there. Its queries and keys lie in the slow rotary pairs, which hardly turn over the texts of a test.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 700
CODE = 64
HEAD = 128
FAST = 22
"""Rotary pairs, of 64, that turn by more than half a radian within 1000 tokens."""


def copying_model() -> Any:
    """A LlamaForCausalLM in eval mode whose next token is the one that followed the present token before."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * CODE,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e10},
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    token, before, constant, found = (slice(n * CODE, (n + 1) * CODE) for n in range(4))
    code = torch.randn(VOCABULARY, CODE, generator=torch.Generator().manual_seed(0)).sign()
    pairs = torch.arange(HEAD // 2)
    angle = 1e10 ** (-pairs / (HEAD // 2))
    slow = torch.cat((pairs[FAST:], pairs[FAST:] + HEAD // 2))[:CODE]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.model.embed_tokens.weight[:, token] = code
        model.model.embed_tokens.weight[:, constant] = 1.0
        layers: Any = model.model.layers
        first, second = (layer.self_attn for layer in layers)
        first.k_proj.weight[pairs[:FAST], constant] = 2.0 / CODE
        first.q_proj.weight[pairs[:FAST], constant] = (400.0 / CODE * angle[:FAST].cos())[:, None]
        first.q_proj.weight[pairs[:FAST] + HEAD // 2, constant] = (-400.0 / CODE * angle[:FAST].sin())[:, None]
        first.v_proj.weight[:CODE, token] = torch.eye(CODE)
        first.o_proj.weight[before, :CODE] = torch.eye(CODE)
        second.q_proj.weight[slow, token] = 20.0 * torch.eye(CODE)
        second.k_proj.weight[slow, before] = torch.eye(CODE)
        second.v_proj.weight[:CODE, token] = torch.eye(CODE)
        second.o_proj.weight[found, :CODE] = torch.eye(CODE)
        model.lm_head.weight[:, found] = code
    return model


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are the words w0, w1, ... and an end-of-text token."""
    names = ["</s>", *(f"▁w{n}" for n in range(VOCABULARY - 1))]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def text_with_repeats(seed: int) -> str:
    """600 words, each standing once, but for 50 words that stand again 100 tokens on and 50 others 400 tokens on."""
    names = torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    order = names[:100] + names[:50] + names[100:350] + names[350:400] + names[50:100] + names[400:500]
    return " ".join(f"w{n}" for n in order)
