"""Converts a model in memory: pretrained tensors are shared, gates are added, and open gates change no logit.

    python examples/convert_live_model.py --model HUB_ID_OR_DIRECTORY --out converted

`retrofox convert` does the same from disk to disk without loading the weights, and proves the result.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrofox

TEXT = "The old house stood at the end of the lane, and nobody had lived in it since the summer of the flood."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="the model to convert")
    parser.add_argument("--out", help="directory to save the converted model in")
    options = parser.parse_args(arguments)

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # every rotary pair kept and gates that never forget: the base, computed by Forgetting Attention
    proof = retrofox.convert(base, fox=retrofox.FoxSpec(rope="keep", init="open"))
    # the default: slow rotary pairs scaled, half-lives log-spaced over the heads, the first token exempt from decay
    converted = retrofox.convert(base, fox=retrofox.FoxSpec())

    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = base(ids, labels=ids)
        difference = (proof(ids).logits - wanted.logits).abs().max().item()
        print(f"gates open, RoPE kept: logits differ from the base's by at most {difference:.1e}")
        print(f"loss: base {wanted.loss:.3f}, converted and not yet trained {converted(ids, labels=ids).loss:.3f}")
    before = {parameter.data_ptr() for parameter in base.parameters()}
    added = [name for name, parameter in converted.named_parameters() if parameter.data_ptr() not in before]
    print(f"{len(added)} tensors added, such as {added[0]}; all others are the base's own memory")

    if options.out is not None:
        converted.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        print(f"saved: retrofox.load({options.out!r}) opens it")


if __name__ == "__main__":
    main()
