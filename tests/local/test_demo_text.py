"""What `regrow demo` prints at its end, where no terminal is: whole lines, and a table that fits 80 columns."""

from __future__ import annotations

import pytest

from regrow.cli import demo

PHASES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step")


def test_the_end_of_a_demo_is_whole_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    incident = {"kind": "unhealthy", "node": "n1", "phases": dict.fromkeys(PHASES, 12.34), "seconds": 98.76}
    long = {"ok": True, "name": "twin: rng", "detail": "drew as the twin did, " * 9 + "[0 of them] repeated"}
    demo._print({"incidents": [incident], "checks": [long, {**long, "ok": False}], "summary": "45 steps, " * 20, "report": "/r"})
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    table = lines[1:3]
    assert all(len(line) <= 80 for line in table)
    assert table[0].split() == ["fault", "node", "detect", "decide", "fence", "stop", "start", "rendez.", "restore", "1st", "step", "total"]
    assert table[1].split() == ["unhealthy", "n1", *["12.34"] * len(PHASES), "98.76"]
    assert lines[3:] == [f"holds  twin: rng: {long['detail']}", f"FAILS  twin: rng: {long['detail']}", "45 steps, " * 20, "report: /r"]
