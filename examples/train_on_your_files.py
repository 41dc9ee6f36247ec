"""A retrofit on one's own files: writes a recipe, plans it, trains by it, and compares the result with the original.

    python examples/train_on_your_files.py --train my-texts/ --heldout other-texts/ --model HUB_ID_OR_DIRECTORY

The four steps are commands; each can be typed by hand. `retrofox config schema` describes every field of a recipe.
"""

import argparse
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"
RECIPE = """\
model: "{model}"
output: "{out}/run"
fox: {{preset: fox-stretch}} # retrofox's defaults: slow rotary pairs stretched, a gate on every head, one sink token
data:
  fact_share: 0.7 # made-up facts in 70 % of the texts, told twice: what teaches the model to look back
  questions: 0.5 # half of them are asked for the second time
  train: ["{train}"]
  eval: ["{heldout}"]
stages:
  - objective: extend
    tokens: {tokens}
    sequence_length: {length}
    batch_tokens: {batch_tokens}
    learning_rate: 2e-4
    schedule: linear
precision: fp32 # bf16 on a GPU
log: {{every: 5, eval_tokens: 8Ki}}
"""


def retrofox(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "retrofox", *arguments], check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="the model to convert and train")
    parser.add_argument("--train", default=DATA / "train", help="file or directory: text, JSONL, Parquet")
    parser.add_argument("--heldout", default=DATA / "heldout", help="texts that are not in --train")
    parser.add_argument("--out", type=Path, default=Path("own-files"), help="where everything goes")
    parser.add_argument("--tokens", type=int, default=40_960, help="training tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a training window")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = options.out / "recipe.yaml"
    recipe.write_text(RECIPE.format(**vars(options), batch_tokens=2 * options.length))
    run, results = str(options.out / "run" / "model"), str(options.out / "results")
    retrofox("plan", str(recipe), "--check")  # memory, hours, and whatever `train` would refuse
    retrofox("train", str(recipe))  # converts first; given again after an interruption, it goes on
    retrofox("eval", run, "--against", options.model, "--data", str(options.heldout), "--length",
             str(4 * options.length), "--out", results)  # fmt: skip
    print(f"the model: {run}; loss at each position: {results}/per_token_loss.png")


if __name__ == "__main__":
    main()
