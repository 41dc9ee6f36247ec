"""The plug-in under vLLM itself: `make test-vllm` runs these in an environment of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import retrofox
from retrofox.serving.engines import Engines
from retrofox.serving.verify import Sizes, verify_serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
# What `vllm serve` runs; the `vllm` command of the build for CPUs looks for a distribution named vllm and stops.
SERVE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
WIDE = {"head_dim": 64, "hidden_size": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def served(tmp_path_factory, pico_llama, stir, pico_tokenizer) -> Path:
    """A converted tiny Llama of heads that vLLM has kernels for."""
    out = tmp_path_factory.mktemp("served") / "fox"
    model = stir(retrofox.convert(pico_llama(**WIDE), fox=retrofox.FoxSpec(half_life=(5.0, 500.0))))
    model.save_pretrained(out)
    pico_tokenizer.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def paged_engines():
    """vLLM in a process that serves on a CPU as on a GPU."""
    with Engines(program=(sys.executable, str(Path(__file__).parent / "served_as_on_a_gpu.py"))) as engines:
        yield engines


@pytest.mark.parametrize(
    ("window", "spec"),
    [
        (None, {"half_life": (5.0, 500.0), "sink_tokens": 1}),
        (None, {"half_life": (5.0, 500.0), "sink_tokens": 5, "rope": "drop"}),
        (100, {"half_life": (5.0, 500.0)}),
        (None, {"half_life": (5.0, 500.0), "gate_heads": "kv"}),
        (None, {"half_life": (5.0, 50.0), "gate_heads": "kv", "horizon": 4.0}),
    ],
    ids=["a sink", "five sinks", "window", "gates of kv heads", "a horizon"],
)
def test_what_a_gpu_serves_is_what_retrofox_computes(paged_engines, tmp_path, stir, window, spec):
    """Chunks with a past, texts that begin together, short pieces, prefix hits also within one step, preemption."""
    from transformers import MistralConfig, MistralForCausalLM

    config: dict[str, Any] = {
        **WIDE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 300,
    }
    config |= {"intermediate_size": 64, "sliding_window": window, "initializer_range": 0.1}
    fox = retrofox.FoxSpec(**spec)
    torch.manual_seed(0)
    stir(retrofox.convert(MistralForCausalLM(MistralConfig(**config)), fox=fox)).save_pretrained(tmp_path / "fox")
    sizes = Sizes(requests=4, longest=300, tokens=4)
    report = verify_serving(tmp_path / "fox", sizes=sizes, engines=paged_engines, eager=True, show=False)
    assert all(report["passed"].values()), json.dumps(report["rounds"])


CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
for name, (model, options) in json.load(sys.stdin).items():
    try:
        EngineArgs(model=model, max_model_len=512, **options).create_engine_config()
        said = "served"
    except Exception as error:
        said = str(error)
    print("SAID", json.dumps([name, said]), flush=True)
"""
REFUSED = {
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, "a fp8 cache would round the gates' sums away"),
    "float16": ({"dtype": "float16"}, "add --dtype bfloat16"),
    "adapters": ({"enable_lora": True}, "`retrofox merge` them first"),
    "ranks": ({"tensor_parallel_size": 3}, "heads"),  # vLLM's own line comes first
    "shifts": ({}, "k-shift needs each token's unshifted predecessor"),
    "horizon": ({}, "horizon 8 is served on NVIDIA GPUs only"),
}


@pytest.fixture(scope="module")
def said(served, tmp_path_factory, pico_llama) -> dict[str, str]:
    """What vLLM says of each configuration that it is to refuse, all asked in one process."""
    models = {"shifts": {"pro": ("k-shift",)}, "horizon": {"horizon": 8.0}}
    for name, spec in models.items():
        models[name] = tmp_path_factory.mktemp(name) / "fox"
        retrofox.convert(pico_llama(**WIDE), fox=retrofox.FoxSpec(**spec)).save_pretrained(models[name])
    asked = {name: (str(models.get(name, served)), options) for name, (options, _) in REFUSED.items()}
    asked["nothing wrong"] = (str(served), {})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", CONFIGURE]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", REFUSED)
def test_vllm_says_in_a_line_what_is_refused(said, name):
    lines = [line for line in said[name].splitlines() if REFUSED[name][1] in line]
    assert len(lines) == 1, said[name]
    if name != "ranks":
        assert "retrofox can't serve" in lines[0]


def test_what_is_not_refused_is_configured(said):
    assert said["nothing wrong"] == "served"


def test_vllm_serve_answers_as_retrofox_does(served, pico_tokenizer):
    """The server of `vllm serve OUT` and an OpenAI client's request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [
        sys.executable,
        *SERVE,
        str(served),
        "--dtype",
        "float32",  # what a random model would say next hangs on the last bits
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "fox",
    ]
    prompt = "the fox forgets the gate, and"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        try:
            answer = ask(
                port, {"model": "fox", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            )
        finally:
            server.terminate()
            server.communicate(timeout=60)
    model: Any = retrofox.load(served).eval()
    ids = pico_tokenizer(prompt, return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=1)
    assert answer["choices"][0]["text"] == pico_tokenizer.decode(wanted[0, ids.shape[1] :])


def ask(port: int, body: dict) -> dict:
    """Waits for the server, at most ten minutes, and asks it once."""
    address = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{address}/health").close()
            break
        except OSError:
            time.sleep(2)
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
