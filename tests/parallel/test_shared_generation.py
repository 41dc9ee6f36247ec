"""`generate` over a context that 2 and 4 processes share gives one process's tokens, and its logits to rounding."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrofox.generation.generate import generate
from retrofox.generation.shared import complete_shared
from retrofox.parallel.decoding import KeyShard
from retrofox.parallel.layout import Degrees

HERE = Path(__file__).parent
ROUNDING = 3e-5  # of the greatest logit: sums in another order
PROMPT = "the fox forgets gate 7 and so on"


def run_checks(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Every case of so many processes, in one launch."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port"]
    done = subprocess.run(
        [*command, str(port), str(HERE / "generation_checks.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, float]]:
    """Name -> figures of every check."""
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


def wrong(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, float]]:
    """The cases whose tokens or logits are others than one process's."""
    cases = {name: x for name, x in figures(done).items() if "different" in x}
    assert len(cases) == 14  # two splits of the processes, 7 cases
    return {name: x for name, x in cases.items() if not (x["different"] == 0 and x["error"] < ROUNDING)}


def test_two_processes_generate_what_one_does(pico_fox_checkpoint, tmp_path):
    wanted = generate(str(pico_fox_checkpoint), [PROMPT], 6, stream=False, ignore_eos=False)
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    command = ["generate", str(pico_fox_checkpoint), "--prompt-file", str(file), "--max-new-tokens", "6"]
    done = run_checks(2, *command, "--context", "2")
    assert wrong(done) == {}
    text = "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("{"))
    assert text.strip() == wanted["texts"][0].strip()  # written by one of them
    assert done.stderr.count("tokens/s") == 1
    # `eval --context`: the largest tensor grows with a process's tokens, never with tokens x vocabulary (2048)
    heads_and_widths = (8 + 4 + 4) * 8
    assert figures(done)["memory of losses"] == {"at_1024": heads_and_widths, "at_2048": heads_and_widths}


@pytest.mark.slow
def test_four_processes_generate_what_one_does():
    assert wrong(run_checks(4)) == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "2 processes share a document, and 1 were launched: torchrun --nproc-per-node 2 -m retrofox generate"),
        ({"num_beams": 2}, "leave out beams"),
        ({"use_cache": False}, "leave out no-cache"),
        ({"evict": -10.0}, "leave out evict"),
        ({"device": "cpu"}, "leave out device"),
    ],
)
def test_what_can_not_be_shared_is_refused_before_loading(monkeypatch, pico_fox_checkpoint, options, reason):
    monkeypatch.setattr("retrofox.generation.generate.open_model", None)
    with pytest.raises(ValueError, match=reason):
        generate(str(pico_fox_checkpoint), [PROMPT], context=2, stream=False, **options)


def test_an_unconverted_model_is_refused_before_loading(monkeypatch, tmp_path):
    monkeypatch.setattr("retrofox.generation.generate.open_model", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="is not converted"):
        generate(str(tmp_path), [PROMPT], context=2, stream=False)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        generate(str(tmp_path), [PROMPT], context=0, stream=False)


def test_prompts_of_several_lengths_are_refused():
    with pytest.raises(ValueError, match=r"prompts of one length, got \[2, 3\] tokens"):
        complete_shared(None, [[1, 2], [1, 2, 3]], 4)


def test_a_shard_holds_no_more_keys_than_its_part():
    # of 4 processes: what one holds of a text is its part of the prompt, and every fourth token after it
    part = [torch.arange(*each) for each in Degrees(1, 4).segments(1, 64)]
    states = torch.zeros(1, 2, 16, 8)
    shard = KeyShard(states, states, torch.zeros(1, 4, 16, dtype=torch.float64), torch.cat(part), room=3)
    for position in (65, 69, 73):
        shard.append(states[:, :, :1], states[:, :, :1], torch.zeros(1, 4, 1, dtype=torch.float64), position)
    assert (shard.length, shard.k.shape[2]) == (19, 19)
    assert shard.positions.tolist() == [*range(8, 16), *range(48, 56), 65, 69, 73]


KERNEL = """
import torch
from retrofox.parallel import decoding
from retrofox.parallel.decoding import KeyShard

random = torch.Generator().manual_seed(0)
q = torch.randn(2, 4, 1, 16, generator=random)
k, v = (torch.randn(2, 2, 300, 16, generator=random) for _ in range(2))
c = -torch.rand(2, 4, 300, generator=random, dtype=torch.float64).cumsum(-1) * 0.2
shard = KeyShard(k, v, c, torch.arange(7, 307), room=5)
now = c[..., -1] - 3.0
kernels, compared = decoding._runs, 0
for window, sink, softcap in ((None, 0, None), (None, 9, 4.0), (280, 0, None)):
    options = {"scale": None, "window": window, "sink": sink, "softcap": softcap}
    assert kernels(q, shard.k, slice(20, 300))
    found = shard.attend(q, now, 320, options)
    decoding._runs = lambda *_: False
    wanted = shard.attend(q, now, 320, options)
    decoding._runs = kernels
    for x, y in zip(found, wanted):
        assert x.dtype == torch.float32
        assert (x - y).abs().max() < 1e-5 * y.abs().max(), (window, sink, softcap)
    compared += 1
print("compared", compared)
"""


def test_the_kernel_and_the_formula_agree():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], capture_output=True, text=True, check=False, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("compared 3")
