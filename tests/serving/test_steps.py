"""Steps of a server as on a GPU, with neither GPU nor vLLM: its mixin over a backend in torch, kernels interpreted."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fox_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed here")

HEADS, GROUPS, DIM, PAGE, SCALE = 2, 3, 64, 16, 0.125
TEXTS = (60, 45, 70, 30)
STEPS = {
    "texts begin, long and short": (20, 3, 30, 0),
    "a chunk, a text that begins, decoding": (20, 1, 1, 25),
    "all decode": (1, 1, 1, 1),
    "chunks and a short piece": (19, 40, 38, 4),
}
NAMES = ("", ".config", ".model_executor", ".model_executor.layers", ".model_executor.layers.attention", ".v1")


class Native:
    """A backend: writes rows and attends to all that its metadata names, lanes and all, in float64."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        rows = torch.cat([key, value], -1)
        kv_cache[slots // PAGE, :, slots % PAGE] = rows

    def forward(self, layer, query, key, value, kv_cache, batch, output):
        for request, length in enumerate(batch.seq_lens.tolist()):
            begin, end = batch.query_start_loc[request : request + 2].tolist()
            pages = batch.block_table[request, : -(-length // PAGE)].long()
            k, v = kv_cache[pages].transpose(1, 2).flatten(0, 1)[:length].double().chunk(2, -1)
            q = query[begin:end].double().unflatten(1, (HEADS, GROUPS))
            position = torch.arange(length)
            hidden = position[None] > position[length - (end - begin) :, None]
            scores = (torch.einsum("ihgd,jhd->hgij", q, k) * SCALE).masked_fill(hidden, -1e30)
            output[begin:end] = torch.einsum("hgij,jhd->ihgd", scores.softmax(-1), v).flatten(1, 2).to(output.dtype)
        return output


def serve() -> dict:
    """Readings of each step, and how far each text's outputs are from float64 in the end."""
    for name in (*NAMES, ".v1.attention", ".v1.attention.backend"):
        module: Any = types.ModuleType(f"vllm{name}")
        module.get_current_vllm_config = module.Attention = module.AttentionCGSupport = None
        sys.modules[f"vllm{name}"] = module
    from retrofox.serving import lane_kernels, prompts, vllm_attention
    from retrofox.serving.lanes import plan_lanes

    class Impl(vllm_attention.FoxImpl, Native):
        def _fuses(self, layer, states):
            return True

        def _gathered(self, layer, kv_cache, batch, reading):
            length = reading.past + reading.new.stop - reading.new.start
            return lane_kernels.gather(self.lanes, kv_cache, batch.block_table[reading.request], 0, length)

    torch.manual_seed(0)
    impl = Impl()
    impl.lanes = plan_lanes(GROUPS, DIM, torch.bfloat16, lambda width: True)
    impl.scale, width = SCALE, impl.lanes.width
    impl.options = {"scale": SCALE, "window": None, "sink": 1, "softcap": None, "prune": None}
    cache = torch.zeros(40, HEADS, PAGE, 2 * (width + DIM)).bfloat16()
    table = torch.randperm(40).reshape(4, 10).int()
    queries = [torch.randn(n, HEADS * GROUPS, DIM).bfloat16() for n in TEXTS]
    keys, values = ([torch.randn(n, HEADS, DIM).bfloat16() for n in TEXTS] for _ in range(2))
    gates = [-torch.rand(n, HEADS, GROUPS) * 0.2 for n in TEXTS]
    done, outputs, readings = [0] * len(TEXTS), [[] for _ in TEXTS], {}
    for name, new in STEPS.items():
        order = [text for _, text in sorted((n, text) for text, n in enumerate(new) if n)]
        spans = [range(done[text], done[text] + new[text]) for text in order]
        starts = [0, *torch.tensor([len(span) for span in spans]).cumsum(0).tolist()]
        slots = [
            int(table[text, t // PAGE]) * PAGE + t % PAGE for text, span in zip(order, spans, strict=True) for t in span
        ]

        def batched(of, order=order, spans=spans):
            return torch.cat([of[text][span.start : span.stop] for text, span in zip(order, spans, strict=True)])

        decays = torch.cat([torch.tensor(span) >= 1 for span in spans])
        key = torch.cat([impl.lanes.incoming(batched(gates), decays, torch.bfloat16), batched(keys)], -1)
        query, value = (torch.nn.functional.pad(batched(of), (width, 0)) for of in (queries, values))
        batch = SimpleNamespace(
            query_start_loc=torch.tensor(starts).int(),
            seq_lens=torch.tensor([span.stop for span in spans]).int(),
            block_table=table[order],
            slot_mapping=torch.tensor(slots),
            max_query_len=max(new),
        )
        where = batch.query_start_loc, batch.seq_lens, batch.block_table
        kept, found = prompts.plan(starts, batch.seq_lens.tolist(), 16)
        first = (where[0][: kept + 1], where[1][:kept], where[2][:kept])
        rest = SimpleNamespace(query_start_loc=first[0], seq_lens=first[1], block_table=first[2])
        links = None if max(new) == 1 else prompts.find_links(*where, batch.slot_mapping, PAGE)
        placed = [prompts.placed(reading, batch.query_start_loc) for reading in found]
        batch.fox = vllm_attention.Step(links, placed, rest if found and kept else None)
        output = torch.zeros_like(query)
        impl.forward(None, query, key, value, cache, batch, output)
        for text, begin, end in zip(order, starts[:-1], starts[1:], strict=True):
            outputs[text].append(output[begin:end, :, width:].double())
            done[text] += end - begin
        readings[name] = [kept, [[reading.past, len(reading.edges) - 1] for reading in found]]
    assert done == list(TEXTS)
    errors = []
    for number, made in enumerate(outputs):
        q, k, v, log_f = (x[number].double()[None] for x in (queries, keys, values, gates))
        exact = reference.forgetting_attention(q, k, v, log_f.flatten(2), scale=SCALE, sink=1)[0]
        errors.append(float((torch.cat(made) - exact).abs().max()))
    return {"readings": readings, "errors": errors}


def test_steps_of_all_kinds_give_forgetting_attention():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    runner = Path(__file__).parents[1] / "kernels" / "interpreted.py"
    done = subprocess.run([sys.executable, str(runner), __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["readings"] == {
        "texts begin, long and short": [1, [[0, 2]]],
        "a chunk, a text that begins, decoding": [2, [[20, 1], [0, 1]]],
        "all decode": [4, []],
        "chunks and a short piece": [1, [[41, 1], [32, 1], [5, 1]]],
    }
    assert max(found["errors"]) < 2**-6  # outputs up to 3 in bfloat16


if __name__ == "__main__":
    print(json.dumps(serve()))
