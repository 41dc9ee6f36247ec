"""Long pieces of a step's texts, read by the operator out of a batch or out of pages, against float64."""

import pytest
import torch
from fox_kernels import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox.serving.lanes import gather, plan_lanes, running_sum
from retrofox.serving.prefill import KeyValueRows, Prefill, find_links, placed, plan, run_prefill, run_prefills

PAGE = 16


@pytest.mark.parametrize(
    ("starts", "lengths", "kept", "prefills"),
    [
        ([0, 1, 2], [40, 41], 2, []),
        ([0, 1, 301, 701, 1201, 1701], [9, 300, 400, 800, 500], 1, [
            Prefill(1, (1, 301, 701), 0), Prefill(3, (701, 1201), 300), Prefill(4, (1201, 1701), 0)
        ]),
        ([0, 300, 310, 310, 310], [300, 10, 0, 0], 0, [Prefill(0, (0, 300, 310), 0)]),  # rows of padding
        ([0, 300, 310], [300, 50], 0, [Prefill(0, (0, 300), 0), Prefill(1, (300, 310), 40)]),
    ],
)  # fmt: skip
def test_what_decodes_stays_with_the_engine_and_texts_that_begin_are_read_together(starts, lengths, kept, prefills):
    assert plan(starts, lengths, 256) == (kept, prefills)


@given(new=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_token_is_attended_to_once(new, data):
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    past = [data.draw(st.integers(0, 3)) for _ in new]
    kept, prefills = plan(starts, [a + b for a, b in zip(new, past, strict=True)], 5)
    assert all(n < 5 for n in new[:kept])
    tokens = [
        *range(starts[kept]),
        *(t for prefill in prefills for t in range(*prefill.edges[:: len(prefill.edges) - 1])),
    ]
    assert tokens == list(range(sum(new)))
    for prefill in prefills:
        held = new[prefill.request : prefill.request + len(prefill.edges) - 1]
        assert [b - a for a, b in zip(prefill.edges, prefill.edges[1:], strict=False)] == held
        assert len(held) == 1 or not prefill.past


class Paged:
    """A cache of pages that lie anywhere, and a text's keys, values, gates and queries in float64."""

    def __init__(self, length: int, groups: int, sinks: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        heads, dim = 2, 64
        self.lanes = plan_lanes(groups, dim, torch.float32, lambda width: True)
        self.query = torch.randn(length, heads * groups, dim, generator=draw).double()
        self.key, self.value = torch.randn(2, length, heads, dim, generator=draw).double()
        log_f = -torch.rand(length, heads, groups, generator=draw).double()
        self.log_f = log_f.masked_fill((torch.arange(length) < sinks)[:, None, None], 0.0)
        pages = -(-length // PAGE)
        self.table = torch.randperm(pages + 3, generator=draw)[:pages].int()
        width = self.lanes.width + dim
        self.cache = torch.full((pages + 3, heads, PAGE, 2 * width), 1e3)
        state = self.lanes.value(self.log_f.cumsum(0), torch.float32)
        for t in range(length):
            page, place = int(self.table[t // PAGE]), t % PAGE
            key, value = self.cache[page, :, place].chunk(2, -1)
            key[:, self.lanes.width :], value[:] = self.key[t], torch.cat([state[t], self.value[t].float()], -1)

    def exact(self, **options) -> torch.Tensor:
        states = (x[None] for x in (self.query, self.key, self.value, self.log_f.flatten(1)))
        return reference.forgetting_attention(*states, **options)[0]


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"sink": 0},
        {"sink": 1},
        {"sink": 5},
        {"window": 20, "sink": 0},
        {"window": 37, "sink": 0, "softcap": 5.0},
        {"sink": 2, "horizon": 6.0},
    ],
    ids=str,
)
def test_a_chunk_reads_its_past_out_of_the_pages(groups, options):
    text = Paged(150, groups, options["sink"], seed=groups)
    wanted = text.exact(scale=0.125, **options)
    window = options.get("window")
    options = {"scale": 0.125, "window": window, **options}
    for past, length in ((100, 150), (16, 48), (31, 33), (149, 150)):

        def rows(request: int, first: int, until: int, past=past, length=length) -> KeyValueRows:
            assert (request, until) == (7, length)
            assert first == (0 if window is None else max(0, past - window + 1))
            return gather(text.lanes, text.cache, text.table, first, until)

        query = text.query[past:length].float()
        new = KeyValueRows(*(torch.full((length - past, 1), torch.nan) for _ in range(3)))
        found = torch.empty_like(query)
        run_prefills([Prefill(7, (0, length - past), past)], query, new, rows, found, options, window)
        torch.testing.assert_close(found.double(), wanted[past:length], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"sink": 1}, {"sink": 0, "window": 9}, {"sink": 1, "horizon": 3.0}], ids=str)
def test_texts_that_begin_are_read_in_one_call(options):
    texts = [Paged(length, 3, options["sink"], seed=length) for length in (30, 7, 52)]
    kept, prefills = plan([0, 2, 32, 39, 91], [60, 30, 7, 52], 7)
    assert (kept, len(prefills)) == (1, 1)
    prefill = placed(prefills[0], torch.tensor([0, 2, 32, 39, 91], dtype=torch.int32))
    assert prefill.new == slice(2, 91)
    assert prefill.cu_seqlens is not None
    assert prefill.cu_seqlens.tolist() == [0, 30, 37, 89]
    packed = (torch.cat([getattr(text, name) for text in texts]).float() for name in ("query", "key", "value", "log_f"))
    query, key, value, log_f = packed
    found = torch.empty_like(query)
    run_prefill(prefill, query, KeyValueRows(key, value, log_f.flatten(1)), found, {"scale": 0.125, **options})
    wanted = torch.cat([text.exact(scale=0.125, **options) for text in texts])
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-5)


def test_a_prefix_that_another_request_writes_in_the_same_step_is_found_and_its_sum_goes_on():
    """The second text shares two pages with the first, the third shares them and one of the second's: chained."""
    starts = torch.tensor([0, 40, 60, 64, 65], dtype=torch.int32)
    lengths = torch.tensor([40, 52, 52, 50], dtype=torch.int32)
    table = torch.tensor([[3, 5, 7, 0], [3, 5, 8, 9], [3, 5, 8, 2], [6, 6, 6, 1]], dtype=torch.int32)
    places = [(0, range(40)), (1, range(32, 52)), (2, range(48, 52)), (3, range(49, 50))]
    slots = torch.tensor([int(table[r, t // PAGE]) * PAGE + t % PAGE for r, tokens in places for t in tokens])
    slots = torch.cat([slots, torch.full((3,), -1)])
    links = find_links(starts, lengths, table, slots, PAGE)
    assert links.token.tolist() == [-1, 31, 55, -1]
    assert links.request[1:3].tolist() == [0, 1]
    log_f = -torch.rand(68, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    before = torch.full((4, 2, 3), -7.0).double()
    c, _ = running_sum(log_f, starts, lengths, before, links)
    first = log_f[:40].cumsum(0)
    second = first[31] + log_f[40:60].cumsum(0)
    torch.testing.assert_close(
        c[:65], torch.cat([first, second, second[15] + log_f[60:64].cumsum(0), log_f[64:65] - 7])
    )


def test_a_prompt_that_goes_on_from_one_that_goes_on_from_another_counts_all_of_them():
    """Five requests of two new tokens, each behind the one before: the gates of all add up."""
    log_f = -torch.rand(10, 1, 3, generator=torch.Generator().manual_seed(0)).double()
    starts, lengths = torch.arange(0, 11, 2, dtype=torch.int32), torch.arange(10, 20, 2, dtype=torch.int32)
    before = torch.full((5, 1, 3), -3.0).double()  # of the first: the others' is not written yet
    links = (torch.tensor([-1, 1, 3, 5, 7]), torch.tensor([0, 0, 1, 2, 3]))
    c, _ = running_sum(log_f, starts, lengths, before, links)
    torch.testing.assert_close(c, log_f.cumsum(0) - 3.0)
