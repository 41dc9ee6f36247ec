"""The proof that vLLM serves converted models right: SmolLM2-135M and tiny random models of every family, on a CPU.

    make test-vllm        # sets up .venv-vllm and runs this; under an hour on two cores
    .venv-vllm/bin/python benchmarks/vllm_cpu.py [--out FILE.json] [--work DIR] [--only NAME ...] [--fresh]

Each case is a `retrofox verify-serving`: requests at once, prefix hits, chunked prefill, preemption, every
log-probability beside retrofox's own. A finished case is kept in the JSON file and not run again. Exit code 1 where one
failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from provenance import out_file, provenance
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.anatomy import is_new_tensor
from retrofox.conversion.merge import merge
from retrofox.loading.base import load_base
from retrofox.serving.verify import verify_serving
from retrofox.support.files import write_json

HERE = Path(__file__).parent
TEXT = HERE.parent / "examples" / "data" / "heldout"
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 100, "layer_types": MIXED}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 48}
MOE = {"num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 512}
SHORT = {"half_life": (5.0, 1000.0)}
PRO = ("qk-norm", "output-norm", "output-gate")


@dataclass
class Case:
    """One tiny model: its family, what its config has beyond TINY, its spec, and how vLLM runs it."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=lambda: dict(SHORT))
    options: dict[str, Any] = field(default_factory=dict)
    merge: bool = False  # of a LoRA adapter


CASES = {
    "llama": Case("llama", options={"eager": False}),
    "mistral, window": Case("mistral", {"sliding_window": 100}),
    "qwen2": Case("qwen2", {"hidden_size": 256}),
    "qwen3, head dim 80": Case("qwen3", {"head_dim": 80}),
    "gemma": Case("gemma"),
    "gemma 2, softcap, windows": Case(
        "gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    ),
    "gemma 3, windows": Case("gemma3_text", GEMMA),
    "olmo 2": Case("olmo2"),
    "smollm3, a layer without RoPE": Case("smollm3", {"no_rope_layers": [1, 0]}),
    "mixtral": Case("mixtral", {"num_local_experts": 4, **MOE}),
    "qwen3 moe": Case("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 64, **MOE}),
    "rope keep": Case("llama", spec={"rope": "keep", **SHORT}),
    "rope drop": Case("llama", spec={"rope": "drop", **SHORT}),
    "rope partial": Case("llama", {"rope_parameters": LLAMA3}, {"rope": "partial", "max_wavelength": 100.0, **SHORT}),
    "rope partial, pairs chosen by layer": Case(
        "llama", spec={"rope": "partial", "layer_pairs": {0: (0, 3, 9, 30), 1: (2, 5, 31)}, **SHORT}
    ),
    "rope drop, yarn": Case("llama", {"rope_parameters": YARN}, {"rope": "drop", **SHORT}),
    "rope drop through transformers": Case("smollm3", {"no_rope_layers": [1, 0]}, {"rope": "drop", **SHORT}),
    "no sink": Case("llama", spec={"sink_tokens": 0, **SHORT}),
    "five sinks": Case("llama", spec={"sink_tokens": 5, **SHORT}),
    "gate bias": Case("llama", spec={"gate": "bias", **SHORT}),
    "gate fixed, ALiBi": Case("llama", spec={"gate": "fixed", "init": "alibi", "rope": "drop", "sink_tokens": 0}),
    "gate none": Case("llama", spec={"gate": "none", "rope": "partial", "max_wavelength": 200.0}),
    "merged LoRA": Case("llama", merge=True),
    "short half-lives": Case("llama", spec={"half_life": (0.3, 2.0)}),
    "pro parts": Case("llama", spec={"pro": PRO, **SHORT}),
    "pro parts, own qk-norm": Case("qwen3", spec={"pro": PRO, **SHORT}),
    "pro parts through transformers": Case("smollm3", spec={"pro": PRO, **SHORT}),
    "log n": Case("llama", spec={"log_n": 64, **SHORT}),
    "head dim 96": Case("llama", {"head_dim": 96}),
    "head dim 128, 8 heads a group": Case(
        "llama", {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1}
    ),
    "5 heads a group": Case("llama", {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 1}, SHORT),
    "one head a group": Case("llama", {"num_key_value_heads": 4}),
    "two ranks": Case("llama", options={"tensor_parallel": 2}),
}
SMALL: dict[str, Any] = {"requests": 8, "longest": 1024, "tokens": 16}


def stirred(model: Any, size: float = 0.05) -> Any:
    """The model with noise on every added tensor: gates that depend on the data, no part an identity."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_new_tensor(name):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def make(case: Case, out: Path) -> None:
    """Writes the converted tiny model of a case."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model_type, **{**TINY, **case.config})).float()
    spec = retrofox.FoxSpec(**case.spec)
    model = stirred(retrofox.convert(base.eval(), fox=spec))
    if not case.merge:
        model.save_pretrained(out)
        return
    whole, adapter = (out.with_name(f"{out.name}-{part}") for part in ("base", "adapter"))
    model.save_pretrained(whole)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["forget_gate"], init_lora_weights=False
    )
    get_peft_model(retrofox.load(whole), lora).save_pretrained(str(adapter))
    shutil.rmtree(out, ignore_errors=True)  # of an earlier run, which `merge` would not write over
    merge(adapter, out)


def make_smollm2(work: Path) -> tuple[Path, Path, Path]:
    """(the base, it converted with the defaults, that with stirred gates) as directories."""
    base, converted, shaken = (work / name for name in ("smollm2", "smollm2-fox", "smollm2-stirred"))
    if not shaken.exists():
        sys.path.insert(0, str(HERE.parent / "examples"))
        from demo import fetch

        model, tokenizer = load_base(fetch(work / "fetched"))
        for directory, what in ((base, model), (converted, None), (shaken, None)):
            if what is None:
                what = retrofox.convert(model if directory == converted else load_base(base)[0], fox=retrofox.FoxSpec())
            if directory == shaken:
                stirred(what, 0.02)
            what.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    return base, converted, shaken


def smollm2(name: str, work: Path) -> dict[str, Any]:
    """The report of one of the three cases on real weights."""
    base, converted, shaken = make_smollm2(work)
    text = work / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f.read_text(encoding="utf-8") for f in sorted(TEXT.glob("*.txt"))), encoding="utf-8")
    if "bfloat16" in name:
        return verify_serving(converted, against=str(base), data=text, dtype="bfloat16", longest=2048)
    return verify_serving(shaken, data=text)


REAL = ("SmolLM2-135M, gates stirred, float32", "SmolLM2-135M, bfloat16 beside its base")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=out_file, default=HERE / "vllm-cpu.json")
    parser.add_argument("--work", type=Path, default=HERE.parent / "demo-out" / "vllm")
    parser.add_argument("--only", nargs="+", help="names of cases, or beginnings of them")
    parser.add_argument("--fresh", action="store_true", help="run finished cases again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() and not options.fresh else {}
    done: dict[str, Any] = kept.get("cases", {})
    names = [n for n in (*CASES, *REAL) if not options.only or any(n.startswith(o) for o in options.only)]
    for number, name in enumerate(names, 1):
        if done.get(name, {}).get("passed_all"):
            continue
        print(f"[{number}/{len(names)}] {name}", flush=True)
        started = time.perf_counter()
        try:
            done[name] = run(name, options.work)
        except ValueError as error:
            done[name] = {"error": str(error), "passed_all": False}
        done[name]["seconds"] = round(time.perf_counter() - started, 1)
        said = "passed" if done[name]["passed_all"] else f"FAILED: {done[name]}"
        print(f"    {said}, {done[name]['seconds']:.0f} s", flush=True)
        write_json(options.out, {**provenance(), "cases": done})
    failed = [name for name in names if not done[name]["passed_all"]]
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


def run(name: str, work: Path) -> dict[str, Any]:
    """What is kept of one case."""
    if name in REAL:
        report = smollm2(name, work)
    else:
        case = CASES[name]
        out = work / "".join(c if c.isalnum() else "-" for c in name)
        make(case, out)
        report = verify_serving(out, **{**SMALL, "eager": True, **case.options})
    keep = ("model_type", "dtype", "compiled", "tensor_parallel", "vllm", "rounds", "base_rounds", "passed")
    return {**{k: report[k] for k in keep if k in report}, "passed_all": all(report["passed"].values())}


if __name__ == "__main__":
    main()
