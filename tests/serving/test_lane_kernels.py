"""The two kernels that make lanes on a GPU against lanes.py: in Triton's interpreter, on a GPU by `pytest -m gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from retrofox.serving.lanes import plan_lanes, running_sum

SHAPES = {
    "decoding, 3 heads a group": {"new": [1, 1, 1], "past": [40, 0, 17], "groups": 3},
    "chunks": {"new": [5, 300, 1, 33], "past": [0, 64, 31, 32], "groups": 4},
    "8 heads a group": {"new": [20, 1], "past": [7, 90], "groups": 8},
    "one head a group, padded": {"new": [3, 0, 2], "past": [10, 0, 0], "groups": 1, "padding": 4},
    "steep": {"new": [600], "past": [100], "groups": 2, "size": 8.0},
}


def differences(new, past, groups, padding=0, size=0.1, device="cpu"):
    """Largest differences of c, of logits made of key and query lanes, and of the state that values keep."""
    from retrofox.serving.lane_kernels import query_lanes, write_lanes

    torch.manual_seed(0)
    heads, dim, page, scale = 2, 64, 32, 0.125
    lanes = plan_lanes(groups, dim, torch.bfloat16, lambda width: True)
    width, tokens = lanes.width + dim, sum(new) + padding
    log_f = -torch.rand(tokens, heads, groups, device=device) * size
    decays = torch.arange(tokens, device=device) > 1
    key = torch.cat(
        [lanes.incoming(log_f, decays, torch.bfloat16), torch.randn(tokens, heads, dim, device=device).bfloat16()], -1
    )
    value = torch.randn(tokens, heads, width, device=device).bfloat16()
    value[..., : lanes.width] = 0
    query = torch.randn(tokens, heads * groups, width, device=device).bfloat16()
    query[..., : lanes.width] = 0
    cache = torch.randn(9, heads, page, 2 * width, device=device).bfloat16()
    table = torch.randint(4, 9, (len(new), 20), device=device, dtype=torch.int32)
    before = -torch.rand(len(new), heads, groups, device=device).double() * 50
    for request, length in enumerate(past):
        if length:
            table[request, (length - 1) // page] = request
            cache[request, :, (length - 1) % page, width : width + lanes.width] = lanes.value(
                before[request][None], torch.bfloat16
            )[0]
            before[request] = lanes.state(cache[request, :, (length - 1) % page, width : width + lanes.width])
    start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], device=device, dtype=torch.int32)
    lengths = (torch.tensor(new) + torch.tensor(past)).to(device=device, dtype=torch.int32)
    terms, flag = lanes.outgoing(key[..., : lanes.width])
    wanted = running_sum(terms, start, lengths, before)
    rest = key[..., lanes.width :].clone()
    c = write_lanes(lanes, key, value, cache, start, lengths, table, scale)
    query_lanes(lanes, query, c, scale)
    real = slice(0, sum(new))
    assert torch.equal(key[..., lanes.width :], rest)
    k, q = key[real, :, : lanes.width].double(), query[real, :, : lanes.width].double().unflatten(1, (heads, groups))
    logits = torch.einsum("ihgw,jhw->hgij", q, k) * scale
    exact_k = lanes.key(wanted, flag, scale, torch.bfloat16)[real].double()
    exact_q = lanes.query(wanted, scale, torch.bfloat16)[real].double()
    exact = torch.einsum("ihgw,jhw->hgij", exact_q, exact_k) * scale
    return {
        "c": float((c - wanted)[real].abs().max()),
        "logits": float((logits - exact).abs().max()),
        "state": float((lanes.state(value[real]) - wanted[real]).abs().max()),
        "largest": float(wanted[real].abs().max()),
    }


def check(found):
    assert found["c"] <= 1e-9
    assert found["logits"] <= 2e-6 * max(1.0, found["largest"])
    assert found["state"] <= 1e-8 * max(1.0, found["largest"])


@pytest.fixture(scope="module")
def interpreted():
    """`differences` of every shape, from this file run as a program with Triton's interpreter on."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    runner = Path(__file__).parents[1] / "kernels" / "interpreted.py"
    done = subprocess.run([sys.executable, str(runner), __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_make_the_lanes_in_the_interpreter(interpreted, name):
    check(interpreted[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_make_the_lanes_on_a_gpu(name):
    check(differences(**SHAPES[name], device="cuda"))


if __name__ == "__main__":
    print(json.dumps({name: differences(**shape) for name, shape in SHAPES.items()}))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_both_kernels_compile_without_a_gpu(arch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retrofox.serving import lane_kernels

    bf16, i32 = ("key", "value", "cache", "query"), ("query_start", "seq_lens", "block_table")
    types = (
        dict.fromkeys(bf16, "*bf16") | dict.fromkeys(i32, "*i32") | {"c_out": "*fp64", "c": "*fp64", "scale": "fp32"}
    )
    wide = {"GROUPS": 8, "PADDED": 8, "TERMS": 3, "STATE": 5, "WIDTH": 144, "PAGE": 16, "LANES": 32}
    narrow = {"GROUPS": 3, "PADDED": 4, "TERMS": 3, "STATE": 5, "WIDTH": 80, "PAGE": 16, "LANES": 16}
    for kernel, block in ((lane_kernels._write_kernel, 256), (lane_kernels._query_kernel, 16)):
        for sizes in (wide, narrow):
            constants = {name: value for name, value in (sizes | {"BLOCK": block}).items() if name in kernel.arg_names}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
            }
            source = ASTSource(kernel, signature, constants, {})
            assert triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"]
