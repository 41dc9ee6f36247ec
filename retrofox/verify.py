"""The parity proof: in a fresh process, a converted checkpoint with gates open and RoPE kept is its base model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
LARGEST_IN_FLOAT32 = 4_000_000_000
"""Parameters up to which the proof runs in float32; larger models are compared in their own dtype."""


def prove(source: Any, out: Path, exact: bool = True) -> dict[str, Any]:
    """Runs the proof in a fresh process and returns its numbers.

    The base and the converted model (gates open, RoPE kept) read one fixed text; their logits must agree to
    1e-5 of the largest logit in float32, 2 % in bfloat16 or float16.

    Args:
        source: Hub id, directory, .gguf file, or a live model (which is compared in this process).
        out: the converted checkpoint directory.
        exact: False when calibration rewrote query projections: the difference is then reported, not judged.

    Raises:
        ValueError: the logits differ, or the process failed.
    """
    from transformers import PreTrainedModel

    if isinstance(source, PreTrainedModel):
        result = compare(source, out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "parity.json"
            command = [sys.executable, "-m", "retrofox.verify", str(source), str(out), str(answer)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                raise ValueError(f"the parity proof of {out} failed to run:\n{run.stderr[-2000:]}")
            result = json.loads(answer.read_text())
    result["judged"] = exact
    if exact and not result["equal"]:
        raise ValueError(
            f"parity proof failed: with gates open and RoPE kept the logits differ by {result['max_difference']:.2e} "
            f"(allowed {result['tolerance']:.2e}); nothing was written. Please report the model."
        )
    return result


def compare(source: Any, out: Path) -> dict[str, Any]:
    """The proof's numbers, computed here: difference of logits; loss of base, parity form and chosen form."""
    import torch
    import torch.nn.functional as F
    from transformers import PreTrainedModel

    from retrofox.artefact import tokenizer_of
    from retrofox.surgery import attention_mode, load, load_base

    tokenizer = tokenizer_of(source, out)
    if isinstance(source, PreTrainedModel):
        base = source
    else:
        base, _ = load_base(source)
    dtype = torch.float32 if base.num_parameters() <= LARGEST_IN_FLOAT32 else base.dtype
    before = base.dtype, base.training
    base.to(dtype=dtype).eval()  # type: ignore[call-arg]
    vocabulary = base.config.vocab_size
    if tokenizer is None:
        tokens = torch.randint(vocabulary, (1, 256), generator=torch.Generator().manual_seed(0))
    else:
        tokens = tokenizer(TEXT, return_tensors="pt").input_ids[:, : base.config.max_position_embeddings]
        if int(tokens.max()) >= vocabulary:
            tokens = tokens % vocabulary
    device = base.device
    with torch.inference_mode():
        expected = base(tokens.to(device), use_cache=False).logits[0].float().cpu()
        base.to(dtype=before[0]).train(before[1])  # type: ignore[call-arg]
        if base is not source:
            del base
        model = load(out, dtype=dtype).eval()
        with attention_mode(model, "original"):
            parity = model(tokens, use_cache=False).logits[0].float()
        chosen = model(tokens, use_cache=False).logits[0].float()
    tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * max(1.0, float(expected.abs().max()))
    difference = (parity - expected).abs()

    def loss(logits: torch.Tensor) -> float:
        return float(F.cross_entropy(logits[:-1], tokens[0, 1:]))

    return {
        "equal": bool(difference.max() <= tolerance),
        "max_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "tolerance": tolerance,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens.shape[1],
        "loss_base": loss(expected),
        "loss_gates_open_rope_kept": loss(parity),
        "loss_converted": loss(chosen),
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(compare(sys.argv[1], Path(sys.argv[2]))))
