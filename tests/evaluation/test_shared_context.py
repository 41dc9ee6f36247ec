"""`retrofox eval --context N`: processes that share documents report one process's losses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from retrofox.evaluation.evaluate import evaluate


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"the fox forgets gate {number} and so on, " * (9 + number))
    return folder


def test_two_processes_report_one_processs_losses(texts, pico_fox_checkpoint, tmp_path):
    wanted = evaluate(str(pico_fox_checkpoint), data=str(texts), length=99, progress=False)  # 99: it doesn't divide
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command += ["-m", "retrofox", "eval", str(pico_fox_checkpoint), "--data", str(texts), "--length", "99"]
    done = subprocess.run(
        [*command, "--context", "2", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("wrote ") == 1  # by one of them
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert [line["key"] for line in found["lines"]] == ["model", "open", "shuffled"]
    for ours, theirs in zip(found["buckets"], wanted["buckets"], strict=True):
        for key in ("model", "open", "shuffled"):
            assert ours["loss"][key]["mean"] == pytest.approx(theirs["loss"][key]["mean"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "2 processes share a document, and 1 were launched"),
        ({"tasks": ["piqa"], "limit": 1}, "leave out tasks"),
        ({"against": "elsewhere", "baselines": ["pi:4"]}, "leave out against, baselines"),
        ({"device": "cpu"}, "leave out device"),
    ],
)
def test_what_one_process_runs_alone_is_refused(texts, pico_fox_checkpoint, options, reason):
    with pytest.raises(ValueError, match=reason):
        evaluate(str(pico_fox_checkpoint), data=str(texts), length=64, context=2, progress=False, **options)
