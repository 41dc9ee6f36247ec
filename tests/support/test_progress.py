"""Progress of long work where no terminal draws a bar: a line a minute."""

from __future__ import annotations

import pytest

from retrofox.conversion.report import copying
from retrofox.support import report


@pytest.fixture
def now(monkeypatch):
    """A list of one time in seconds, which bars take for the clock's."""
    time = [0.0]
    init = report.Progress.__init__
    monkeypatch.setattr(
        report.Progress, "__init__", lambda self, *a, **options: init(self, *a, get_time=lambda: time[0], **options)
    )
    return time


def test_a_pipe_is_told_the_time_left_once_a_minute(now, capsys):
    with report.progress_bar("tokens", True) as bar:
        task = bar.add_task("model", total=4000)
        for now[0] in (30, 59, 90, 100):
            bar.advance(task, 300)
    assert capsys.readouterr().err == "model: 900 of 4,000 tokens, 1 min 30 s so far, about 5 min 10 s left\n"


def test_copies_count_from_their_first_bytes(now, capsys):
    with copying() as feed:
        for now[0], done in ((100, 10), (130, 2000), (170, 4000)):
            feed(done * 10**6, 16000 * 10**6)
    assert capsys.readouterr().err == ("copying weights: 2,000 of 16,000 MB, 30 s so far, about 3 min 30 s left\n")


def test_what_is_to_be_quiet_is(now, capsys):
    with report.progress_bar("tokens", False) as bar:
        task = bar.add_task("model", total=4)
        now[0] = 1000
        bar.advance(task, 1)
    assert capsys.readouterr().err == ""
