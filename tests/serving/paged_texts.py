"""The kernels over pages against float64; `everything` is the differences of all cases."""

import math
from types import SimpleNamespace

import torch
from fox_kernels import reference

from retrofox.serving import paged_attention
from retrofox.serving.lanes import running_sum
from retrofox.serving.paged_attention import KEYS
from retrofox.serving.paged_rows import Paged, gather, write
from retrofox.serving.prefill import Links, owners

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
    # the second one's token fills the page behind which the first begins; the third one's page before is its own
    "a page that fills in the same step": {
        "new": [1, 1, 1], "past": [48, 47, 32], "groups": 3, "token": [1, -1, -1], "writer": [1, 0, 0], "by_pages": True
    },
}  # fmt: skip
HEADS, PAGE, SCALE = 2, 16, 0.125
PROGRAMS = paged_attention.PROGRAMS


class Texts:
    """Requests whose past lies in pages of a cache, with new tokens to write: everything in float64, too."""

    def __init__(self, new, past, groups, dim=64, padding=0, size=0.1, device="cpu", token=(), writer=(),
                 dtype=torch.bfloat16, by_pages=False, spread=1.0, least=0.0):  # fmt: skip
        torch.manual_seed(0)
        self.paged, self.groups, self.dim, self.device = Paged(groups, dim, dtype), groups, dim, device
        tokens, pages = sum(new) + padding, 12
        self.past, self.new = past, new
        longest = max(-(-(a + b) // PAGE) for a, b in zip(past, new, strict=True))
        blocks = len(new) * longest + 1
        self.table = torch.full((len(new), max(longest, pages)), 0, dtype=torch.int32)
        order = 1 + torch.randperm(blocks - 1)
        for request in range(len(new)):
            self.table[request, :longest] = order[request * longest : (request + 1) * longest]
        linked = {r: w for r, (t, w) in enumerate(zip(token, writer, strict=True)) if t >= 0} if by_pages else {}
        for request, other in linked.items():
            shared = past[request] // PAGE
            self.table[request, :shared] = self.table[other, :shared]
        rows = torch.randn(blocks, PAGE, HEADS, 2 * (dim + self.paged.extra)).to(dtype)
        self.cache = rows.to(device).transpose(1, 2)  # heads beside each other in memory, as vLLM lays them out
        size = size * torch.logspace(0, math.log10(spread), HEADS * groups).view(HEADS, groups)
        self.log_f = -least - torch.rand(tokens, HEADS, groups) * size
        self.key, self.value = (torch.randn(tokens, HEADS, dim).to(dtype) for _ in range(2))
        self.c_past = [(-least - torch.rand(n, HEADS, groups).double() * size).cumsum(0) for n in past]
        for request, length in enumerate(past):
            if request in linked:  # the row that is being written holds anything
                before = self.c_past[linked[request]]
                self.c_past[request] = torch.cat([before, torch.full_like(before[:1], -99.0)])
            for t in range(length):
                self._row(request, t)[1][:] = torch.cat(self._two(self.c_past[request][t]), -1).to(device)
        last = [c[-1] if len(c) else torch.zeros(HEADS, groups).double() for c in self.c_past]
        links = None if not token else Links(torch.tensor(token), torch.tensor(writer))
        self.links = None if by_pages else links  # by pages the kernel finds them itself
        self.start = torch.tensor([0, *new]).cumsum(0).int()
        self.lengths = (torch.tensor(new) + torch.tensor(past)).int()
        self.c, _ = running_sum(self.log_f.double(), self.start, self.lengths, torch.stack(last), links)
        slots = [
            int(self.table[request, t // PAGE]) * PAGE + t % PAGE
            for request, (a, b) in enumerate(zip(past, new, strict=True))
            for t in range(a, a + b)
        ]
        self.batch = SimpleNamespace(
            query_start_loc=self.start.to(device),
            seq_lens=self.lengths.to(device),
            block_table=self.table.to(device),
            slot_mapping=torch.tensor([*slots, *[-1] * padding]).to(device),
            max_query_len=max(new),
        )

    @staticmethod
    def _two(c):
        high = c.float()
        return high, (c - high).float()

    def _row(self, request, t):
        """(the bfloat16 numbers, c's float32 numbers (HEADS, 2 G)) of a token's rows, views."""
        page = int(self.table[request, t // PAGE])
        row = self.cache[page, :, t % PAGE]
        first = 2 * self.dim // self.paged.per_float
        return row, self.cache.view(torch.float32)[page, :, t % PAGE, first : first + 2 * self.groups]

    def write(self):
        key, value, log_f = (x.to(self.device) for x in (self.key, self.value, self.log_f.flatten(1)))
        links = None if self.links is None else Links(*(x.to(self.device) for x in self.links))
        write(self.paged, key, value, log_f, self.cache, self.batch, links)

    def poison(self, horizon, sink):
        """NaN into the keys and values of blocks that no query of a kv head sees; returns how many tokens."""
        dead = 0
        for request, length in enumerate(self.past):
            c = self.text(request)[2]
            for block in range(-(-sink // KEYS), length // KEYS):
                fall = c[length] - c[(block + 1) * KEYS - 1]  # of the first query, which sees the most
                for head in (fall <= -horizon).all(-1).nonzero()[:, 0].tolist():
                    for t in range(block * KEYS, (block + 1) * KEYS):
                        self._row(request, t)[0][head, : 2 * self.dim] = math.nan
                    dead += KEYS
        return dead

    def poison_beyond(self, reach, sink):
        """NaN into all rows, c too, that are beyond the reach of a request's first query; returns how many."""
        dead = 0
        for request, length in enumerate(self.past):
            for t in range(sink, length + 1 - reach):
                self._row(request, t)[0][:] = math.nan
                dead += 1
        return dead

    def text(self, request):
        """Keys, values (S, HEADS, D) and c (S, HEADS, G) float64 of a request: its pages' and its new tokens'."""
        begin, end = self.start[request : request + 2].tolist()
        old = [self._row(request, t)[0].cpu() for t in range(self.past[request])]
        old = torch.stack(old) if old else torch.zeros(0, HEADS, 2 * (self.dim + self.paged.extra))
        key = torch.cat([old[..., : self.dim], self.key[begin:end]])
        value = torch.cat([old[..., self.dim : 2 * self.dim], self.value[begin:end]])
        return key.double(), value.double(), torch.cat([self.c_past[request], self.c[begin:end]])


def written(**shape):
    """Largest differences of what `write` leaves in the pages."""
    texts = Texts(**shape)
    texts.write()
    errors = {"rows": 0.0, "c": 0.0, "largest": float(texts.c.abs().max())}
    for request, (length, new) in enumerate(zip(texts.past, texts.new, strict=True)):
        begin = int(texts.start[request])
        for i in range(new):
            row, floats = (x.cpu() for x in texts._row(request, length + i))
            wanted = torch.cat([texts.key[begin + i], texts.value[begin + i]], -1)
            errors["rows"] = max(errors["rows"], float((row[:, : 2 * texts.dim] - wanted).abs().max()))
            c = floats[:, : texts.groups].double() + floats[:, texts.groups :].double()
            errors["c"] = max(errors["c"], float((c - texts.c[begin + i]).abs().max()))
    return errors


def attended(window=None, sink=0, softcap=None, horizon=None, programs=None, reach=None, **shape):
    """Largest difference of the output from float64, what padding got, and how many tokens' keys were NaN."""
    dtype = shape.pop("dtype", torch.float32)  # of bfloat16 the interpreter has no product
    texts = Texts(dtype=dtype, **shape)
    texts.write()
    tokens, padding = sum(texts.new), len(texts.key) - sum(texts.new)
    query = torch.randn(tokens + padding, HEADS * texts.groups, texts.dim).to(dtype)
    output = torch.full_like(query, 7.0).to(texts.device)
    options = {"scale": SCALE, "window": window, "sink": sink, "softcap": softcap, "horizon": horizon}
    read = [texts.text(request) for request in range(len(texts.past))]
    poisoned = 0 if horizon is None else texts.poison(horizon, sink)
    poisoned += 0 if reach is None else texts.poison_beyond(reach, sink)
    single = max(texts.new) == 1
    batch = texts.batch
    if single and padding:  # as a CUDA graph has it: requests without a token, whose pages nobody may read
        batch = SimpleNamespace(**vars(batch))
        more = batch.query_start_loc[-1:].expand(padding)
        batch.query_start_loc = torch.cat([batch.query_start_loc, more])
        batch.seq_lens = torch.cat([batch.seq_lens, more * 0])
        batch.block_table = torch.cat([batch.block_table, batch.block_table[:1].expand(padding, -1) * 0 - 1])
    taken = tokens + padding if single else tokens
    owner = None if single else owners(texts.start.tolist()).to(texts.device)
    paged_attention.PROGRAMS = programs or PROGRAMS
    paged_attention.attend(
        texts.paged, query[:taken].to(texts.device), texts.cache, batch, output[:taken], options, owner, reach
    )
    output, error = output.cpu(), 0.0
    for request, length in enumerate(texts.past):
        begin, end = texts.start[request : request + 2].tolist()
        key, value, c = read[request]
        log_f = torch.diff(c, dim=0, prepend=c[:1]).flatten(1)
        q = torch.zeros(len(key), HEADS * texts.groups, texts.dim).double()
        q[length:] = query[begin:end].double()
        exact = reference.forgetting_attention(q[None], key[None], value[None], log_f[None], **options)
        assert isinstance(exact, torch.Tensor)
        difference = (output[begin:end].double() - exact[0, length:]).abs().nan_to_num(math.inf)
        error = max(error, float(difference.max())) if end > begin else error
    rest = output[tokens:taken]
    return {"error": error, "padding": float(rest.abs().max()) if len(rest) else 0.0, "poisoned": poisoned}


NEAR = {"horizon": 2.0, "least": math.log(2) / 8, "size": 0.01, "reach": 25}
ATTENDED = {
    "decoding": {"new": [1, 1, 1], "past": [40, 0, 177], "groups": 3},
    "one part, padded": {"new": [1, 1], "past": [140, 33], "groups": 3, "programs": 1, "padding": 2},
    "many parts": {"new": [1, 1], "past": [600, 5], "groups": 4, "programs": 64, "padding": 1},
    "short pieces": {"new": [1, 3, 5], "past": [60, 0, 131], "groups": 3, "programs": 8},
    "sinks": {"new": [1, 4, 2], "past": [200, 0, 1], "groups": 2, "sink": 3, "size": 1.0},
    "a window": {"new": [1, 1, 3], "past": [300, 10, 90], "groups": 2, "window": 50},
    "softcap": {"new": [1, 2], "past": [70, 80], "groups": 2, "softcap": 5.0},
    "one head a group, 80 channels": {"new": [1, 1], "past": [70, 9], "groups": 1, "dim": 80},
    "8 heads a group, 128 channels": {"new": [1, 2], "past": [66, 20], "groups": 8, "dim": 128},
    "17 heads a group, more than a product's least rows": {"new": [1], "past": [70], "groups": 17},
    # heads' gates differ up to a hundredfold: those of the first kv head see all, of the last few keys
    "a horizon, decoding": {
        "new": [1, 1, 1, 1], "past": [700, 0, 40, 300], "groups": 3, "horizon": 8.0, "size": 0.01, "spread": 100.0
    },
    "a horizon, one part, padded": {
        "new": [1, 1], "past": [400, 130], "groups": 2, "horizon": 3.0, "programs": 1, "padding": 2
    },
    "a horizon, short pieces, sinks": {
        "new": [1, 3, 5], "past": [500, 0, 331], "groups": 3, "horizon": 8.0, "size": 0.2, "sink": 3, "programs": 16
    },
    "a horizon of many sinks": {"new": [2], "past": [400], "groups": 2, "horizon": 2.0, "size": 0.2, "sink": 70},
    "a horizon within a window": {"new": [1, 2], "past": [300, 90], "groups": 2, "window": 150, "horizon": 4.0},
    "a window within a horizon": {"new": [1], "past": [300], "groups": 2, "window": 20, "horizon": 4.0},
    "a horizon, softcap": {"new": [1, 2], "past": [270, 80], "groups": 2, "softcap": 5.0, "horizon": 4.0},
    "a horizon of the own key only": {"new": [1], "past": [200], "groups": 1, "size": 60.0, "horizon": 1e-3},
    "a horizon found in two steps": {"new": [1], "past": [4300], "groups": 1, "size": 0.02, "horizon": 8.0},
    "a reach, decoding": {"new": [1, 1, 1], "past": [300, 20, 90], "groups": 3, **NEAR},
    "a reach, short pieces, sinks": {"new": [1, 3, 5], "past": [200, 0, 131], "groups": 3, "sink": 20, **NEAR},
    "a reach, softcap, one part": {"new": [2], "past": [270], "groups": 2, "softcap": 5.0, "programs": 1, **NEAR},
}  # fmt: skip
PAST = {
    "groups of 3": (3, 64, 0, 77),
    "8 heads, wide": (8, 128, 0, 40),
    "from the middle": (4, 64, 37, 150),
    "sinks, from the middle": (4, 64, 37, 150, 3),
    "sinks, from among them": (3, 64, 2, 40, 5),
}


def gathered(groups, dim, first, length, sinks=0, device="cpu"):
    """Largest differences of keys, values and log f from those in the pages; rows that aren't asked for are NaN."""
    texts = Texts([1], [length], groups, dim, device=device)
    key, value, c = texts.text(0)
    sinks = min(sinks, first)
    texts.poison_beyond(length + 1 - first, sinks)
    found = gather(texts.paged, texts.cache, texts.batch.block_table[0], first, length, sinks)
    log_f = torch.diff(c[first:length], dim=0, prepend=c[first : first + 1]).flatten(1)
    log_f = torch.cat([torch.zeros_like(log_f[:sinks]), log_f])
    wanted = {"key": key, "value": value}
    wanted = {name: torch.cat([x[:sinks], x[first:length]]) for name, x in wanted.items()} | {"log_f": log_f}
    return {name: float((getattr(found, name).cpu().double() - wanted[name]).abs().max()) for name in wanted}


def everything(device="cpu"):
    return {
        "write": {name: written(**shape, device=device) for name, shape in SHAPES.items()},
        "attend": {name: attended(**shape, device=device) for name, shape in ATTENDED.items()},
        "gather": {name: gathered(*shape, device=device) for name, shape in PAST.items()},
    }


in_interpreter = everything
