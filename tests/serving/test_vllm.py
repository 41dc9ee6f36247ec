"""The plug-in under vLLM itself: `make test-vllm` runs these in an environment of its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import retrofox
from retrofox.serving import engines, verify
from retrofox.serving.verify import verify_serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
# What `vllm serve` runs; the `vllm` command of the build for CPUs looks for a distribution named vllm and stops.
SERVE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
REACH = {"half_life": (5.0, 500.0), "max_half_life": 8.0, "horizon": 2.0}  # of 25 tokens
WIDE = {"head_dim": 64, "hidden_size": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def served(tmp_path_factory, pico_llama, stir, saved) -> Path:
    """A converted tiny Llama of heads that vLLM has kernels for."""
    model = stir(retrofox.convert(pico_llama(**WIDE), fox=retrofox.FoxSpec(half_life=(5.0, 500.0))))
    return saved(model, tmp_path_factory.mktemp("served") / "fox")


@pytest.mark.parametrize(
    ("window", "spec"),
    [
        (None, {"half_life": (5.0, 500.0), "sink_tokens": 1}),
        (None, {"half_life": (5.0, 500.0), "sink_tokens": 5, "rope": "drop"}),
        (100, {"half_life": (5.0, 500.0)}),
        (None, {"half_life": (5.0, 500.0), "gate_heads": "kv"}),
        (None, {"half_life": (5.0, 50.0), "gate_heads": "kv", "horizon": 4.0}),
        (None, {"gate_heads": "kv", "sink_tokens": 40, "open_heads": ((1, 0),), **REACH}),
    ],
    ids=["a sink", "five sinks", "window", "gates of kv heads", "a horizon", "reaches"],
)
def test_what_a_gpu_serves_is_what_retrofox_computes(monkeypatch, tmp_path, stir, window, spec):
    """Chunks with a past, texts that begin together, short pieces, prefix hits also within one step, preemption.

    Blocks that a layer with a reach gave back, as all that no request holds, are NaN.
    """
    from transformers import MistralConfig, MistralForCausalLM

    layers = 3 if "open_heads" in spec else 1
    config: dict[str, Any] = {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    config |= {"vocab_size": 300, "intermediate_size": 64, "sliding_window": window, "initializer_range": 0.1}
    fox = retrofox.FoxSpec(**spec)
    torch.manual_seed(0)
    stir(retrofox.convert(MistralForCausalLM(MistralConfig(**config)), fox=fox)).save_pretrained(tmp_path / "fox")
    monkeypatch.setattr(engines, "PROGRAM", (sys.executable, str(Path(__file__).parent / "served_as_on_a_gpu.py")))
    plan = verify.make_jobs

    def in_small_blocks(*arguments: Any) -> Any:
        plenty, tight = plan(*arguments)
        plenty.engine |= {"block_size": 32, "num_gpu_blocks_override": 300}
        tight.engine["num_gpu_blocks_override"] *= layers  # a text has blocks in three groups of layers
        return [plenty, tight]

    monkeypatch.setattr(verify, "make_jobs", in_small_blocks)
    report = verify_serving(tmp_path / "fox", requests=4, longest=300, tokens=4, eager=True)
    assert all(report["passed"].values()), json.dumps(report["rounds"])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


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
    command = [sys.executable, "-c", CONFIGURE]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=environment())
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


@pytest.fixture(scope="module")
def client(served, tmp_path_factory) -> Iterator[Any]:
    """An OpenAI client's completions and chat of `vllm serve OUT`."""
    import openai

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *SERVE, str(served), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "fox", "--enable-prompt-tokens-details"]
    command += ["--dtype", "float32"]  # what a random model would say next hangs on the last bits
    log = tmp_path_factory.mktemp("log") / "log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment()) as server:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(2)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
                yield client
        finally:
            server.terminate()
            server.wait(60)


PROMPT = "the fox forgets the gate, and"
GREEDY = {"model": "fox", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


def continued(served: Path, tokenizer: Any, prompt: str) -> str:
    """What retrofox says after a prompt."""
    model: Any = retrofox.load(served).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 1}  # the prompt of a chat has token 1
    made = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, **options)
    return tokenizer.decode(made[0, ids.shape[1] :]).rstrip("\N{REPLACEMENT CHARACTER}")  # vLLM waits for all its bytes


def test_a_completion_whole_streamed_and_stopped_is_retrofoxs(client, served, pico_tokenizer):
    text = continued(served, pico_tokenizer, PROMPT)
    assert client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text == text
    pieces = [piece.choices[0].text for piece in client.completions.create(prompt=PROMPT, stream=True, **GREEDY)]
    assert len(pieces) > 1
    assert "".join(pieces) == text
    stopped = client.completions.create(prompt=PROMPT, stop=[text[3:6]], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[3:6])], "stop")


def test_a_chat_is_retrofoxs(client, served, pico_tokenizer):
    messages = [{"role": "user", "content": "who forgets?"}]
    prompt = pico_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content
    assert answer == continued(served, pico_tokenizer, prompt)


@torch.no_grad()
def test_log_probabilities_of_several_answers_are_retrofoxs(client, served):
    options = {"logprobs": 1, "n": 3, "temperature": 1.0, "seed": 1}
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(prompt=PROMPT, **GREEDY | options | {"extra_body": extra})
    model: Any = retrofox.load(served).eval()
    assert len({choice.text for choice in answer.choices}) == 3
    for choice in answer.choices:
        prompt, made = choice.prompt_token_ids, choice.token_ids
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), wanted, atol=1e-3, rtol=0)


def test_a_prompt_whose_beginning_another_request_had_is_answered_from_the_cache(client, served, pico_tokenizer):
    beginning = "the fox forgets the gate, and " * 30
    for ending, cached in (("it sleeps", 0), ("it runs", 128)):
        answer = client.completions.create(prompt=beginning + ending, **GREEDY)
        assert answer.usage.prompt_tokens_details.cached_tokens >= cached
        assert answer.choices[0].text == continued(served, pico_tokenizer, beginning + ending)
