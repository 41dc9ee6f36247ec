"""Reinforcement learning of a converted model with TRL's GRPOTrainer: sums, rewarded where they are right and brief.

    pip install trl
    python examples/grpo_with_trl.py --model converted --out rewarded

Prompts and rewards are a few lines each: put your own in their place.
"""

import argparse
import random

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import retrofox


def sums(count: int, chat: bool) -> Dataset:
    """Prompts that ask for a sum, as messages or as text, and the answers that the rewards get."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        ask = f"What is {a} + {b}?"
        rows.append({"prompt": [{"role": "user", "content": ask}] if chat else f"{ask} ", "answer": str(a + b)})
    return Dataset.from_list(rows)


def texts(completions: list) -> list[str]:
    return [text if isinstance(text, str) else text[0]["content"] for text in completions]


def right(completions: list, answer: list[str], **_: object) -> list[float | None]:
    return [float(wanted in text) for text, wanted in zip(texts(completions), answer, strict=True)]


def brief(completions: list, **_: object) -> list[float | None]:
    return [-len(text) / 1000 for text in texts(completions)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="converted", help="a converted model: directory or Hub id")
    parser.add_argument("--out", default="rewarded", help="directory of the tuned model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--answers", type=int, default=4, help="answers drawn for each prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    options = parser.parse_args(arguments)
    options.cpu |= not torch.cuda.is_available()

    model = retrofox.load(options.model, dtype=torch.float32)  # on a GPU, products run in bfloat16
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)  # asks nothing
    settings = GRPOConfig(
        options.out, num_generations=options.answers, max_completion_length=options.max_tokens,
        per_device_train_batch_size=options.answers, max_steps=options.steps, learning_rate=options.learning_rate,
        logging_steps=1, save_strategy="no", bf16=not options.cpu, report_to="none", use_cpu=options.cpu,
    )  # fmt: skip
    data = sums(256, chat=tokenizer.chat_template is not None)
    trainer = GRPOTrainer(model, [right, brief], args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(options.out)
    retrofox.load(options.out)  # refuses a model without its gates
    print(f"saved with its gates: {options.out}")


if __name__ == "__main__":
    main()
