"""The benchmark of decoding with a horizon, without a GPU: a stand-in for the kernels, and the file it writes."""

import json
import sys
from pathlib import Path

import torch
from fox_kernels.reference import forgetting_attention

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import decode_layers  # pyright: ignore[reportMissingImports]

RECORDED = Path(__file__).parent.parent / "benchmarks" / "decode-layers.json"


def from_sums(q, k, v, c_hi, c_lo, length, *, first, horizon):
    """`decode_at` by the definition, from the cached sums in place of the gates."""
    n = int(length) + 1
    c = (c_hi.double() + c_lo)[:, :, :n].mT / decode_layers.LOG2_E
    log_f = torch.cat((c[:, :1], c.diff(dim=1)), 1)
    assert (first is None) == (horizon is None)
    q, k, v = (x[:, :n].double() for x in (q, k, v))
    o = forgetting_attention(q, k, v, log_f, horizon=horizon)
    assert isinstance(o, torch.Tensor)
    return o.bfloat16()


def test_a_run_writes_the_fields_of_the_file_on_record(tmp_path, monkeypatch):
    for name, value in {"LENGTHS": (256, 1024), "MOST_LAYERS": 2, "decode_at": from_sums}.items():
        monkeypatch.setattr(decode_layers, name, value)
    monkeypatch.setattr(decode_layers, "graph_us", lambda work: (work(), 3.0)[1])
    decode_layers.main(["--out", str(tmp_path / "out.json")], device="cpu")
    written = json.loads((tmp_path / "out.json").read_text())
    recorded = json.loads(RECORDED.read_text())
    assert set(written) == set(recorded) - {"note", "before"}
    assert len(written["rows"]) == 8
    for row in written["rows"]:
        assert list(row) == list(recorded["rows"][0])
        assert 1e-3 < row["error"] < 2e-3  # rounding o to bfloat16
