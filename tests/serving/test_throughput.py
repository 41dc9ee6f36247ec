"""The throughput benchmark with an engine that takes a known time."""

import json
import sys

import pytest
import vllm_throughput as throughput


def test_the_ratio_is_of_the_medians_of_all_turns(monkeypatch, pico_checkpoint, pico_fox_checkpoint, tmp_path):
    asked = []

    def run(jobs, model):
        (job,) = jobs
        asked.append((model, job))
        slow = 1.0 if model == str(pico_checkpoint) else 1.25
        cold = {0: 99.0, 3: 99.0}  # the first round of each length
        seconds = [cold.get(at, slow * len(asked["prompts"][0]) / 32) for at, asked in enumerate(job.rounds)]
        counts = {"preemptions": 0, "running": 3}
        return [{"cache": {"blocks": 9, "concurrency": 1.5}, "rounds": [{"seconds": s, **counts} for s in seconds]}]

    monkeypatch.setattr(throughput, "run_vllm", run)
    options = f"--lengths 32,64 --requests 3 --tokens 8 --repeats 2 --out {tmp_path / 'a.json'}".split()
    models = [str(pico_fox_checkpoint), "--against", str(pico_checkpoint)]
    monkeypatch.setattr(sys, "argv", ["vllm_throughput.py", *models, *options])
    throughput.main()
    found = json.loads((tmp_path / "a.json").read_text())
    assert [model for model, _ in asked] == [str(pico_checkpoint), str(pico_fox_checkpoint)] * 2
    job = asked[0][1]
    assert [len(wanted["prompts"]) for wanted in job.rounds] == [3] * 6
    assert [len(wanted["prompts"][0]) for wanted in job.rounds] == [32] * 3 + [64] * 3
    assert job.engine["max_model_len"] == 64 + 8
    assert asked[0][1].rounds == asked[1][1].rounds  # base and model get the same prompts
    assert asked[0][1].rounds != asked[2][1].rounds  # and the next turn others: none comes from a cache
    assert [row["ratio"] for row in found["rows"]] == pytest.approx([0.8, 0.8])
    assert [row["base"] for row in found["rows"]] == pytest.approx([3 * 40 / 1.0, 3 * 72 / 2.0])
    assert [len(row["rounds"]["base"]) for row in found["rows"]] == [4, 4]
    assert {(r["running"], r["cache"]["concurrency"]) for row in found["rows"] for r in row["rounds"]["base"]} == {
        (3, 1.5)
    }
