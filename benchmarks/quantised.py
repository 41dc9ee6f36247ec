"""Loss of a converted model beside its base's when both are quantised while loading, on a CPU or GPU.

    pip install bitsandbytes torchao
    python benchmarks/quantised.py BASE MODEL TEXT

The same 2048 tokens of the text for all; writes benchmarks/quantised.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as ao
from provenance import out_file, provenance
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

import retrofox

WAYS: dict[str, Any] = {
    "float32": None,
    "torchao int8 weights": TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao int8 weights and activations": TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig()),
    "torchao fp8 weights": TorchAoConfig(ao.Float8WeightOnlyConfig()),
    "bitsandbytes int8": BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("model", help="converted from it")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=out_file, default=Path(__file__).with_name("quantised.json"))
    options = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(options.base)(options.text.read_text(), return_tensors="pt").input_ids
    tokens = tokens[:, 2000:4048]
    rows = []
    for way, config in WAYS.items():
        row: dict[str, Any] = {"way": way}
        for name, load in (("base", AutoModelForCausalLM.from_pretrained), ("retrofit", retrofox.load)):
            where = options.base if name == "base" else options.model
            model = load(where, dtype=torch.float32, quantization_config=config)
            row[name] = model.eval()(tokens, labels=tokens).loss.item()
        rows.append(row)
        print(f"{way:40}{row['base']:8.3f}{row['retrofit']:8.3f}", flush=True)
    options.out.write_text(json.dumps({**provenance(), "text": options.text.name, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
