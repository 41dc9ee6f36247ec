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

import retrofox

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


def configured(directory: Path, *options: str) -> str:
    """What vLLM's command line says of a configuration that it is to refuse."""
    command = [sys.executable, *SERVE, str(directory), "--max-model-len", "512", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-cache-dtype", "fp8"], "a fp8 cache would round the gates' lanes away"),
        (["--dtype", "float16"], "add --dtype bfloat16"),
        (["--enable-lora"], "`retrofox merge` them first"),
    ],
)
def test_vllm_says_in_a_line_what_is_refused(served, options, said):
    log = configured(served, *options)
    lines = [line for line in log.splitlines() if "retrofox can't serve" in line]
    assert lines, log[-3000:]
    assert all(said in line for line in lines)


def test_shifts_are_refused_by_vllm(tmp_path, pico_llama, stir):
    model = retrofox.convert(pico_llama(**WIDE), fox=retrofox.FoxSpec(pro=("k-shift",), half_life=(5.0, 500.0)))
    model.save_pretrained(tmp_path / "fox")
    assert "k-shift needs each token's unshifted predecessor" in configured(tmp_path / "fox")


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
