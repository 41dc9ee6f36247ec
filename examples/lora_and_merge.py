"""LoRA on a converted model: adapters on the pretrained projections, gates trained in full beside them, then merged.

    python examples/lora_and_merge.py --model converted --train my-texts/

--model is a directory that `retrofox convert` or examples/convert_live_model.py wrote. The merged result is an ordinary
converted checkpoint, without peft; `retrofox merge` loads what it wrote and proves its logits equal.
"""

import argparse
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"
RECIPE = """\
model: "{model}"
output: "{out}/run"
lora: {{rank: {rank}, alpha: 32, targets: all-linear}}
data: {{fact_share: 0.7, questions: 0.5, train: ["{train}"]}} # made-up facts in 70 % of the texts
stages:
  - objective: extend
    tokens: {tokens}
    sequence_length: {length}
    learning_rate: 3e-4
    rates: {{gate_bias: 1.5e-3, gate_weight: 1.5e-3}}
precision: fp32 # bf16 on a GPU
log: {{every: 5}}
"""


def retrofox(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "retrofox", *arguments], check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="converted", help="a converted model's directory")
    parser.add_argument("--train", default=DATA / "train", help="file or directory of texts")
    parser.add_argument("--out", type=Path, default=Path("lora"), help="where everything goes")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20_480, help="training tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a training window")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    recipe = options.out / "recipe.yaml"
    recipe.write_text(RECIPE.format(**vars(options)))
    adapter, merged = str(options.out / "run" / "model"), str(options.out / "merged")
    retrofox("train", str(recipe))
    retrofox("merge", adapter, merged)
    retrofox("generate", merged, "Once upon a time", "--max-new-tokens", "40")
    print(f"the adapter with its gates: {adapter}; merged: {merged}")


if __name__ == "__main__":
    main()
