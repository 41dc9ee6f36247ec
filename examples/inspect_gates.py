"""Reads the gates of a converted model over a text: how far each head looks back, and which tokens make it forget.

    python examples/inspect_gates.py --model converted --text FILE

`retrofox inspect converted --data FILE --out gates` has the whole table and a plot.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

import retrofox

TEXT = Path(__file__).parent / "data" / "heldout" / "conrad-falk.txt"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="converted", help="a converted model: directory or Hub id")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file to read")
    parser.add_argument("--tokens", type=int, default=512, help="tokens read of it")
    options = parser.parse_args(arguments)

    model = retrofox.load(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)  # asks nothing
    text = options.text.read_text(encoding="utf-8")[: 20 * options.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]

    log_f: dict[str, torch.Tensor] = {}  # layer's gate -> (T, H), the log of each token's gate in each head
    for name, module in model.named_modules():
        if name.endswith("forget_gate"):
            module.register_forward_hook(lambda module, x, output, name=name: log_f.update({name: output[0]}))
    with torch.no_grad():
        model(ids)

    print("half-life of each head in tokens: ln 2 / mean(-log f)")
    for name, values in log_f.items():
        half_lives = sorted(math.log(2) / decay if decay else math.inf for decay in (-values.mean(0)).tolist())
        print(f"  {name}: " + " ".join(f"{value:.0f}" for value in half_lives))
    forgetting = -torch.stack(list(log_f.values())).mean((0, 2))  # (T,), nats, mean over layers and heads
    print("tokens after which the model forgets most:")
    for position in forgetting.topk(min(10, ids.shape[1])).indices.tolist():
        token = tokenizer.decode(ids[0, position : position + 1])
        print(f"  position {position:5}  {forgetting[position]:.4f} nats  {token!r}")


if __name__ == "__main__":
    main()
