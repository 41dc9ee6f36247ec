"""Preference tuning of a converted model with TRL's DPOTrainer, its reference opened beside it: gates kept.

    pip install trl
    python examples/dpo_with_trl.py --model converted --data FILE.jsonl --out preferred

Each line of the data is {"prompt": ..., "chosen": ..., "rejected": ...}, each of them a text or a list of messages.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import retrofox

DATA = Path(__file__).parent / "data" / "preferences.jsonl"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="converted", help="a converted model: directory or Hub id")
    parser.add_argument("--data", default=str(DATA), help="preferences, JSON lines")
    parser.add_argument("--out", default="preferred", help="directory of the tuned model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--beta", type=float, default=0.1, help="how closely it stays to the model as it was")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    options = parser.parse_args(arguments)
    options.cpu |= not torch.cuda.is_available()

    model = retrofox.load(options.model, dtype=torch.float32)  # on a GPU, products run in bfloat16
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)  # asks nothing
    settings = DPOConfig(
        options.out, beta=options.beta, max_length=1024, per_device_train_batch_size=2,
        max_steps=options.steps, learning_rate=options.learning_rate, logging_steps=1, save_strategy="no",
        bf16=not options.cpu, report_to="none", use_cpu=options.cpu,
    )  # fmt: skip
    data = load_dataset("json", data_files=options.data, split="train")
    # The reference is the model at its path. One that was converted in memory has none: ref_model=copy.deepcopy(model).
    trainer = DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(options.out)
    retrofox.load(options.out)  # refuses a model without its gates
    print(f"saved with its gates: {options.out}")


if __name__ == "__main__":
    main()
