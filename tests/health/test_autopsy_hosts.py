"""`regrow autopsy --hosts`: the same command on several hosts, judged together. The way there is a program of the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from regrow.agent.health.autopsy import Autopsy, JobReport
from regrow.agent.health.autopsy_verdict import RankView, judge
from regrow.agent.health.stackview import Frame, Stack, stack_of

BIN = Path(sys.executable).parent
WAITING = stack_of([Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 1), Frame("train", "/t.py", 2)])
SLEEPING = stack_of([Frame("load", "/t.py", 6)])

_WAY = """
import pathlib, sys
host, *command = sys.argv[1:]
assert "autopsy" in command and "--json" in command, command
if host == "dead":
    sys.stderr.write("ssh: connect to host dead port 22: No route to host\\n")
    sys.exit(255)
print(pathlib.Path(__file__).with_name(host + ".json").read_text())
sys.exit(1)
"""


def answer(*ranks: tuple[int, Stack]) -> bytes:
    views = tuple(RankView(rank=rank, pid=100 + rank, state="S", stack=stack) for rank, stack in ranks)
    report = JobReport(job="llama at n0:29500", world_size=4, verdict=judge(views, world_size=4), ranks=views, groups=())
    return msgspec.json.encode(Autopsy(jobs=(report,), seconds=2.0))


def autopsy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "regrow", "autopsy", *arguments], capture_output=True, text=True, timeout=60, check=False)


def way(tmp_path: Path, **answers: bytes) -> str:
    (tmp_path / "way.py").write_text(_WAY)
    for host, data in answers.items():
        (tmp_path / f"{host}.json").write_bytes(data)
    return f"{sys.executable} {tmp_path / 'way.py'} {{host}}"


def test_the_odd_rank_is_on_another_host(tmp_path: Path) -> None:
    """Seen from n0 alone nobody is odd; together rank 3 is."""
    via = way(tmp_path, n0=answer((0, WAITING), (1, WAITING)), n1=answer((2, WAITING), (3, SLEEPING)))
    alone: dict[str, Any] = json.loads(autopsy("--hosts", "n0", "--via", via, "--json").stdout)
    assert alone["jobs"][0]["verdict"]["cause"] == "remote"
    done = autopsy("--hosts", "n0,n1", "--via", via, "--json")
    verdict = json.loads(done.stdout)["jobs"][0]["verdict"]
    assert done.returncode == 1
    assert (verdict["status"], verdict["ranks"]) == ("hung", [3])


def test_a_host_that_does_not_answer_is_told_and_does_not_stop_the_others(tmp_path: Path) -> None:
    via = way(tmp_path, n1=answer((2, WAITING), (3, SLEEPING)))
    done = autopsy("--hosts", "dead,n1", "--via", via)
    assert done.returncode == 1
    assert "dead: " in done.stderr
    assert "No route to host" in done.stderr
    assert "rank 3" in done.stdout


def test_no_answer_at_all_and_words_that_cannot_be(tmp_path: Path) -> None:
    via = way(tmp_path)
    for arguments, code, words in (
        (["--hosts", "dead", "--via", via], 1, "no host gave an answer"),
        (["--hosts", ""], 2, "names no host"),
        (["--hosts", "a", "--via", "ssh"], 2, "has no {host}"),
        (["--hosts", "a,-oProxyCommand=x", "--via", via], 2, "is no host name"),
        (["--slurm", "12;reboot"], 2, "is no job number"),
        (["--hosts", "a", "--slurm", "12"], 2, "either --hosts or --slurm"),
        (["--ras", "28028"], 2, "is no address"),
    ):
        done = autopsy(*arguments)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
