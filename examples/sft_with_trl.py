"""Instruction tuning of a converted chat model with TRL's SFTTrainer: loss on the assistant's tokens only, gates kept.

    pip install trl
    python examples/sft_with_trl.py --model converted --data FILE.jsonl --out tuned

Each line of the data is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import retrofox

DATA = Path(__file__).parent / "data" / "chat.jsonl"
# ChatML, as SmolLM2 has it, with marks around what the assistant says: TRL takes the loss there and nowhere else.
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}\
{% else %}{{ message.content + eos_token }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="converted", help="a converted model: directory or Hub id")
    parser.add_argument("--data", default=str(DATA), help="conversations, JSON lines")
    parser.add_argument("--out", default="tuned", help="directory of the tuned model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    options = parser.parse_args(arguments)
    options.cpu |= not torch.cuda.is_available()

    model = retrofox.load(options.model, dtype=torch.float32)  # on a GPU, products run in bfloat16
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)  # asks nothing
    tokenizer.chat_template = CHATML
    settings = SFTConfig(
        options.out, assistant_only_loss=True, max_length=1024, per_device_train_batch_size=2,
        max_steps=options.steps, learning_rate=options.learning_rate, logging_steps=1, save_strategy="no",
        bf16=not options.cpu, report_to="none", use_cpu=options.cpu,
    )  # fmt: skip
    data = load_dataset("json", data_files=options.data, split="train")
    trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(options.out)
    retrofox.load(options.out)  # refuses a model without its gates
    print(f"saved with its gates: {options.out}")


if __name__ == "__main__":
    main()
