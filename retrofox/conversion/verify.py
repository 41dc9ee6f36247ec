"""The parity proof: in a fresh process, a converted checkpoint with gates open and RoPE kept is its base model."""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from transformers import PreTrainedModel

from retrofox.anatomy import attention_mode, is_new_tensor
from retrofox.families import has_softcap
from retrofox.loading.base import load_base
from retrofox.loading.converted import load
from retrofox.loading.tokenizers import load_tokenizer
from retrofox.support import processes

LARGEST_IN_FLOAT32 = 4_000_000_000
"""Parameters up to which a model is loaded in float32; larger ones in their own dtype."""


def prove(source: Any, out: Path) -> dict[str, Any]:
    """Runs the proof in a fresh process and returns its numbers.

    The base and the converted model (gates open, RoPE kept) read one fixed text; their logits must agree to
    1e-5 of the largest logit in float32, 2 % in bfloat16 or float16.

    Args:
        source: Hub id, directory, .gguf file, or a live model (which is compared in this process).
        out: the converted checkpoint directory.

    Raises:
        ValueError: the base's logits are not finite or all alike, they differ from the converted model's, or
            the process failed.
    """
    if isinstance(source, PreTrainedModel):
        result = compare(source, out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "parity.json"
            program = "import sys\nfrom retrofox.conversion.verify import answer\nanswer(*sys.argv[1:])"
            run = processes.run_python(program, source, out, file)
            if run.returncode:
                named = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", run.stderr, re.MULTILINE) or ["it named no error"]
                why = f": {named[-1]}" if run.returncode > 0 else f", killed by signal {-run.returncode}"
                raise ValueError(
                    "the parity proof, which holds the base and then the converted model in memory, failed to run "
                    f"(--no-verify converts without it); nothing was written{why}"
                )
            result = json.loads(file.read_text(encoding="utf-8"))
    if not math.isfinite(result["loss_base"]) or result["base_tells_tokens_apart"] is False:
        raise ValueError(
            f"on {result['text']} the base's own loss is {result['loss_base']} in {result['dtype']}, or it gives all "
            "tokens one score: its weights are damaged, or too large for this dtype; nothing was written"
        )
    if not result["equal"]:
        raise ValueError(
            f"parity proof failed: with gates open and RoPE kept the logits differ by {result['max_difference']:.2e} "
            f"(allowed {result['tolerance']:.2e}); nothing was written. Please report the model."
        )
    return result


def compare(source: Any, out: Path) -> dict[str, Any]:
    """The proof's numbers, computed here: difference of logits; loss of base, parity form and chosen form."""
    live = isinstance(source, PreTrainedModel)
    tokenizer = load_tokenizer(out) or (None if live else load_tokenizer(source))
    base = copy.deepcopy(source) if live else load_base(source, default_attention=True)[0]
    stored = base.dtype  # as config.json says, to which loading rounds what the files hold
    dtype = torch.float32 if base.num_parameters() <= LARGEST_IN_FLOAT32 else stored
    tokens, drawn = fixed_tokens(tokenizer, base.config.vocab_size, base.config.max_position_embeddings)
    base = as_reference(base, dtype)
    with torch.inference_mode():
        expected = base(tokens.to(base.device), use_cache=False).logits[0].float().cpu()
    del base
    model = as_reference(load(out, dtype=dtype if live else stored), dtype)

    def logits(mode: str = "fox") -> torch.Tensor:
        with torch.inference_mode(), attention_mode(model, mode):
            return model(tokens, use_cache=False).logits[0].float()

    def loss(values: torch.Tensor) -> float:
        return float(F.cross_entropy(values[:-1], tokens[0, 1:]))

    chosen = loss(logits())
    parity = logits("original")
    tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * max(1.0, float(expected.abs().max()))
    difference = (parity - expected).abs()
    return {
        "equal": bool(difference.max() <= tolerance),
        "max_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "base_tells_tokens_apart": bool((expected.amax(-1) > expected.amin(-1)).any()),
        "tolerance": tolerance,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens.shape[1],
        "text": "drawn tokens, for want of a tokenizer" if drawn else "a fixed text",
        "loss_base": loss(expected),
        "loss_gates_open_rope_kept": loss(parity),
        "loss_converted": chosen,
    }


def as_reference(base: Any, dtype: Any) -> Any:
    """The base, or its converted form, in `dtype`, in eval mode, with an attention that drops nothing."""
    exact = ("fox", "eager") if has_softcap(base.config) else ("fox", "eager", "sdpa")
    if base.config._attn_implementation not in exact:
        base.set_attn_implementation(exact[-1])
    for name, parameter in base.named_parameters():
        parameter.data = parameter.data.to(parameter.dtype if is_new_tensor(name) else dtype)
    with init_empty_weights(include_buffers=False):  # a model's own buffers may have been rounded to its dtype
        twin = type(base)(base.config)
    for module, fresh in zip(base.modules(), twin.modules(), strict=True):
        for key in module._non_persistent_buffers_set:
            if module._buffers[key] is not None:
                module._buffers[key] = fresh._buffers[key].to(module._buffers[key].device)
    return base.eval()


def answer(source: str, out: str, file: str) -> None:
    """Entry point of the fresh process: writes the proof's numbers to `file` as JSON."""
    Path(file).write_text(json.dumps(compare(source, Path(out))), encoding="utf-8")


TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way. There were a king with a "
    "large jaw and a queen with a plain face, on the throne of England; there were a king with a large jaw and a "
    "queen with a fair face, on the throne of France. In both countries it was clearer than crystal to the lords of "
    "the State preserves of loaves and fishes, that things in general were settled for ever.\n\n"
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n"
    "The area under y = x^2 from 0 to 3 is 9. Water boils at 100 degrees Celsius at sea level; in Denver it boils at "
    "about 95. Le temps des cerises. 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144."
)


def fixed_tokens(tokenizer: Any, vocabulary: int, longest: int) -> tuple[Any, bool]:
    """(1, T <= longest) int64 tokens of a fixed text, and whether they were drawn at random instead.

    Drawn, 256 at most, where there is no tokenizer or it makes less than two tokens of the text.
    """
    ids = [] if tokenizer is None else tokenizer(TEXT).input_ids[:longest]
    if drawn := len(ids) < 2:
        ids = torch.randint(vocabulary, (min(256, longest),), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(ids)[None] % vocabulary, drawn
