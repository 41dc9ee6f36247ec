"""Steps of a server as on a GPU, with neither GPU nor vLLM: its mixins over a bare backend, kernels interpreted."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fox_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed here")

HEADS, GROUPS, DIM, PAGE, SCALE = 2, 3, 64, 16, 0.125
HIDDEN, HALF_LIFE = 48, 4.0
STEPS = {
    "texts begin, long and short": (20, 3, 30, 0),
    "a chunk, a text that begins, decoding": (20, 1, 1, 25),
    "all decode": (1, 1, 1, 1),
    "chunks and a short piece": (19, 40, 38, 4),
}


class Backend:
    """A backend's builder of metadata, as bare as one can be: what came in, for `forward`."""

    device, reorder_batch_threshold = torch.device("cpu"), 1

    def __init__(self, kv_cache_spec, vllm_config):
        self.kv_cache_spec, self.vllm_config = kv_cache_spec, vllm_config

    def build(self, common_prefix_len, common, fast_build):
        return SimpleNamespace(**vars(common), block_table=common.block_table_tensor)


@torch.no_grad()
def serve(device: str = "cpu", times: int = 1, layers: int = 2, horizon: float | None = None) -> dict:
    """Readings of each step, and how far each text's outputs are from float64 in the end, over all layers."""
    from retrofox.serving import paged_attention, paged_rows, prefill

    builder: Any = type("Builder", (prefill.StepBuilder, Backend), {"paged": True, "every": False})
    prefill.LONG = 16 * times
    builder.device = torch.device(device)
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    spec = SimpleNamespace(head_size=DIM + 8, block_size=PAGE)
    build = builder(spec, config).build

    torch.manual_seed(0)
    impl: Any = paged_attention.PagedImpl()
    impl.layout = paged_rows.Paged(GROUPS, DIM)
    impl.options = {"scale": SCALE, "window": None, "sink": 1, "softcap": None, "horizon": horizon}
    bounds = None if horizon is None else torch.full((HEADS * GROUPS,), math.log(2) / HALF_LIFE, device=device)
    impl.reach = reach = None if horizon is None else math.ceil(horizon * HALF_LIFE / math.log(2)) + 1
    steps = {name: [n if n <= 4 else n * times for n in new] for name, new in STEPS.items()}
    texts = [sum(new) for new in zip(*steps.values(), strict=True)]
    pages = 10 * times
    table = torch.randperm(4 * pages).reshape(4, pages).int()
    shape = (layers, 4 * pages, HEADS, PAGE, 2 * (DIM + impl.layout.extra))
    caches = torch.zeros(shape).half().to(device).unbind()  # one allocation, as vLLM's; the interpreter lacks bfloat16
    drawn = []
    for _ in range(layers):
        queries = [torch.randn(n, HEADS * GROUPS, DIM).half() for n in texts]
        keys, values = ([torch.randn(n, HEADS, DIM).half() for n in texts] for _ in range(2))
        drawn.append((queries, keys, values, [torch.randn(n, HIDDEN).half() for n in texts]))
    weights, biases = 0.1 * torch.randn(layers, HEADS * GROUPS, HIDDEN), 2 + torch.rand(layers, HEADS * GROUPS)
    gates: list[Any] = [
        SimpleNamespace(weight=w.to(device), bias=b.to(device), bounds=bounds)
        for w, b in zip(weights, biases, strict=True)
    ]
    done, outputs, prefills = [0] * len(texts), [[[] for _ in texts] for _ in range(layers)], {}
    for name, new in steps.items():
        order = [text for _, text in sorted((n, text) for text, n in enumerate(new) if n)]
        spans = [range(done[text], done[text] + new[text]) for text in order]
        starts = [0, *torch.tensor([len(span) for span in spans]).cumsum(0).tolist()]
        slots = [
            int(table[text, t // PAGE]) * PAGE + t % PAGE for text, span in zip(order, spans, strict=True) for t in span
        ]

        def batched(of, order=order, spans=spans):
            return torch.cat([of[text][span.start : span.stop] for text, span in zip(order, spans, strict=True)])

        lengths = torch.tensor([span.stop for span in spans]).int()
        batch = build(
            0,
            SimpleNamespace(
                num_reqs=len(order),
                query_start_loc=torch.tensor(starts).int().to(device),
                query_start_loc_cpu=torch.tensor(starts).int(),
                seq_lens=lengths.to(device),
                seq_lens_cpu_upper_bound=lengths,
                block_table_tensor=table[order].to(device),
                slot_mapping=torch.tensor(slots).to(device),
                max_query_len=max(new),
            ),
        )
        for cache, impl.gate, inputs, made in zip(caches, gates, drawn, outputs, strict=True):
            query, key, value, states = (batched(of).to(device) for of in inputs)
            if layers > 1:  # in one allocation, as a model without RoPE has them
                query, key, value = torch.cat([query, key, value], 1).split([HEADS * GROUPS, HEADS, HEADS], 1)
            output = torch.zeros_like(query)
            impl.forward(None, query, key, value, cache, batch, output, states)
            for text, begin, end in zip(order, starts[:-1], starts[1:], strict=True):
                made[text].append(output[begin:end].cpu().double())
        for text, span in zip(order, spans, strict=True):
            done[text] = span.stop
            for t in range(1, 0 if reach is None else span.stop + 1 - reach):  # out of reach of what comes, not sinks
                for cache in caches:
                    cache[table[text, t // PAGE], :, t % PAGE] = math.nan
        step = batch.fox
        owners = None if step.owner is None else step.owner.tolist()
        prefills[name] = [step.tokens, owners, [[prefill.past, len(prefill.edges) - 1] for prefill in step.prefills]]
    assert done == texts
    errors = []
    for inputs, weight, bias, layer in zip(drawn, weights, biases, outputs, strict=True):
        for number, made in enumerate(layer):
            q, k, v, states = (x[number].double()[None] for x in inputs)
            log_f = torch.nn.functional.logsigmoid(states @ weight.double().T + bias.double())
            log_f -= 0 if bounds is None else bounds.cpu().double()
            exact = reference.forgetting_attention(q, k, v, log_f, scale=SCALE, sink=1, horizon=horizon)[0]
            errors.append(float((torch.cat(made) - exact).abs().max()))
    return {"prefills": prefills, "errors": errors}


def in_interpreter() -> dict[str, dict]:
    return {str(horizon): serve(horizon=horizon) for horizon in (None, 3.0)}


@pytest.mark.parametrize("horizon", ["None", "3.0"])
def test_steps_of_all_kinds_give_forgetting_attention(horizon, report):
    found = report[horizon]
    assert found["prefills"] == {
        "texts begin, long and short": [3, [0, 0, 0], [[0, 2]]],
        "a chunk, a text that begins, decoding": [2, None, [[20, 1], [0, 1]]],
        "all decode": [4, None, []],
        "chunks and a short piece": [4, [0, 0, 0, 0], [[41, 1], [32, 1], [5, 1]]],
    }
    assert all(error < 2**-6 for error in found["errors"])  # outputs up to 3 in float16


@pytest.mark.gpu
def test_two_layers_on_a_gpu(monkeypatch):
    monkeypatch.setattr("retrofox.serving.prefill.LONG", 16)  # and back, as `serve` sets it
    found = serve("cuda", times=8)
    assert len(found["errors"]) == 8
    assert all(error < 2**-6 for error in found["errors"])
