"""The kernels of lanes against lanes.py and prompts.py: in Triton's interpreter, and on a GPU by `pytest -m gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from retrofox.serving import prompts
from retrofox.serving.lanes import plan_lanes, running_sum
from retrofox.serving.prompts import Links

SHAPES = {
    "decoding, 3 heads a group": {"new": [1, 1, 1], "past": [40, 0, 17], "groups": 3},
    "chunks": {"new": [5, 300, 1, 33], "past": [0, 64, 31, 32], "groups": 4},
    "8 heads a group": {"new": [20, 1], "past": [7, 90], "groups": 8},
    "one head a group, padded": {"new": [3, 0, 2], "past": [10, 0, 0], "groups": 1, "padding": 4},
    "steep": {"new": [600], "past": [100], "groups": 2, "size": 8.0},
    "longer than a program's": {"new": [1, 1200], "past": [9, 33], "groups": 3},
    # the second goes on from the first one's token 9, the third from the second one's last, the fourth from itself
    "prefixes of the same step": {
        "new": [40, 8, 3, 2], "past": [70, 80, 96, 5], "groups": 3, "token": [-1, 9, 47, -1], "writer": [0, 0, 1, 0]
    },
}  # fmt: skip


def differences(new, past, groups, padding=0, size=0.1, device="cpu", token=None, writer=None):
    """Largest differences of log f, of logits made of key and query lanes, and of the state that values keep."""
    from retrofox.serving.lane_kernels import write_lanes

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
    links = None if token is None else Links(torch.tensor(token).to(device), torch.tensor(writer).to(device))
    terms, flag = lanes.outgoing(key[..., : lanes.width])
    wanted = running_sum(terms, start, lengths, before, links)
    rest = key[..., lanes.width :].clone()
    batch = SimpleNamespace(query_start_loc=start, seq_lens=lengths, block_table=table, max_query_len=max(new))
    found = write_lanes(lanes, query, key, value, cache, batch, scale, links)
    real = slice(0, sum(new))
    assert (found is None) == (max(new) == 1)
    assert torch.equal(key[..., lanes.width :], rest)
    k, q = key[real, :, : lanes.width].double(), query[real, :, : lanes.width].double().unflatten(1, (heads, groups))
    logits = torch.einsum("ihgw,jhw->hgij", q, k) * scale
    exact_k = lanes.key(wanted, flag, scale, torch.bfloat16)[real].double()
    exact_q = lanes.query(wanted, scale, torch.bfloat16)[real].double()
    exact = torch.einsum("ihgw,jhw->hgij", exact_q, exact_k) * scale
    return {
        "log_f": 0.0 if found is None else float((found - terms.flatten(1))[real].abs().max()),
        "logits": float((logits - exact).abs().max()),
        "state": float((lanes.state(value[real]) - wanted[real]).abs().max()),
        "largest": float(wanted[real].abs().max()),
    }


def check(found):
    assert found["log_f"] == 0.0
    assert found["logits"] <= 2e-6 * max(1.0, found["largest"])
    assert found["state"] <= 1e-8 * max(1.0, found["largest"])


PAST = {"groups of 3": (3, 64, 0, 77), "8 heads, wide": (8, 128, 0, 40), "from the middle": (4, 64, 37, 150)}


def gathered(groups, dim, first, length, device="cpu"):
    """Largest differences of keys, values and log f from those that torch copies."""
    from retrofox.serving.lane_kernels import gather

    torch.manual_seed(0)
    lanes, heads, page = plan_lanes(groups, dim, torch.bfloat16, lambda width: True), 2, 16
    width = lanes.width + dim
    cache = torch.randn(12, heads, page, 2 * width, device=device).bfloat16()
    c = -torch.rand(12, page, heads, groups, device=device).double().cumsum(1)
    cache[..., width : width + lanes.width] = (
        lanes.value(c.flatten(0, 1), torch.bfloat16).unflatten(0, (12, page)).transpose(1, 2)
    )
    pages = torch.randperm(12, device=device, dtype=torch.int32)
    keys, values = cache.chunk(2, -1)
    wanted = prompts.gather(lanes, keys, values, pages, first, length)
    found = gather(lanes, cache, pages, first, length)
    return {name: float((getattr(found, name) - getattr(wanted, name)).abs().max()) for name in wanted._fields}


def everything(device="cpu"):
    return {
        "lanes": {name: differences(**shape, device=device) for name, shape in SHAPES.items()},
        "gather": {name: gathered(*shape, device=device) for name, shape in PAST.items()},
    }


@pytest.fixture(scope="module")
def interpreted():
    """`everything`, from this file run as a program with Triton's interpreter on."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    runner = Path(__file__).parents[1] / "kernels" / "interpreted.py"
    done = subprocess.run([sys.executable, str(runner), __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_make_the_lanes_in_the_interpreter(interpreted, name):
    check(interpreted["lanes"][name])


@pytest.mark.parametrize("name", PAST)
def test_the_kernel_copies_a_past_in_the_interpreter(interpreted, name):
    assert set(interpreted["gather"][name].values()) == {0.0}


@pytest.mark.gpu
def test_the_kernels_make_the_lanes_and_copy_a_past_on_a_gpu():
    found = everything("cuda")
    for differences in found["lanes"].values():
        check(differences)
    assert all(set(differences.values()) == {0.0} for differences in found["gather"].values())


if __name__ == "__main__":
    print(json.dumps(everything()))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_all_kernels_compile_without_a_gpu(arch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retrofox.serving import lane_kernels as kernels

    types = dict.fromkeys(("key", "value", "cache", "query"), "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("query_start", "seq_lens", "block_table", "pages"), "*i32")
    types |= dict.fromkeys(("source", "source_request"), "*i64") | {"log_f": "*fp32", "sums": "*fp64"}
    wide = {"GROUPS": 8, "PADDED": 8, "TERMS": 3, "STATE": 4, "WIDTH": 160, "PAGE": 16, "LANES": 32, "DIM": 128}
    narrow = {"GROUPS": 3, "PADDED": 4, "TERMS": 3, "STATE": 4, "WIDTH": 80, "PAGE": 16, "LANES": 16, "DIM": 64}
    single = {"SINGLE": True, "BLOCK": 16} | dict.fromkeys(("source", "source_request", "log_f", "sums"))
    several = {"SINGLE": False, "BLOCK": 128, "CHUNK": 512}
    for kernel, how in (
        (kernels._log_f_kernel, several),
        (kernels._lanes_kernel, several),
        (kernels._lanes_kernel, several | {"source": None, "source_request": None}),
        (kernels._lanes_kernel, single | {"CHUNK": 512}),
        (kernels._gather_kernel, {"BLOCK": 32}),
    ):
        for sizes in (wide, narrow):
            given = sizes | {"CHANNELS": sizes["DIM"]} | how
            constants = {name: value for name, value in given.items() if name in kernel.arg_names}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
            }
            source = ASTSource(kernel, signature, constants, {})
            assert triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"]
