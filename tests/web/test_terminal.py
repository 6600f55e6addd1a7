"""What the terminal shows: tables of 80 columns, colours only where they belong, a live view, completion."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from scene import form
from stub_agent import eventually

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A suite that was started in the background of a shell ignores it, and so would all that it starts."""

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def regrow(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "regrow", *arguments]
    where = {**os.environ, **environment}
    return await asyncio.to_thread(lambda: subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False, env=where))


class Terminal:
    """A command on a real pseudo-terminal."""

    def __init__(self, *arguments: str, folder: Path | None = None, **environment: str) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        where = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "regrow", *arguments], stdin=slave, stdout=slave, stderr=slave, env=where, cwd=folder
        )
        os.close(slave)
        os.set_blocking(self._master, False)

    def shown(self, word: str) -> bool:
        with contextlib.suppress(OSError):  # nothing yet; or the other end is closed
            self.text += os.read(self._master, 65_536).decode()
        return word in CONTROL.sub("", self.text)

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(20)
        os.close(self._master)
        return code


async def test_plain_tables_fit_80_columns(cluster: Any) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1, loss=1.5)
    await cluster.agents["n2"].die()
    await cluster.generation(2)
    url = f"http://{cluster.leader.http_address}"
    shown = await asyncio.gather(
        regrow("status", "--supervisor", url),
        regrow("job", "show", "train", "--supervisor", url),
        regrow("node", "show", "n1", "--supervisor", url),
        regrow("status", "--json", "--supervisor", url),
    )
    for done in shown[:3]:
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
    status, job, node, document = shown
    assert "3 nodes: 2 member, 1 gone" in status.stdout
    assert re.search(r"^train +\w+ +2 ", status.stdout, re.MULTILINE)
    assert "incident train-g1: node_lost n2 (infrastructure)" in job.stdout
    assert re.search(r"^n1 +member +2-3", job.stdout, re.MULTILINE)
    assert re.search(r"1 +GPU-n1-1 +train rank 3", node.stdout)
    assert len(json.loads(document.stdout)["nodes"]) == 3


async def test_status_is_live_on_a_terminal(cluster: Any) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    url = f"http://{cluster.leader.http_address}"
    terminal = Terminal("status", "--every", "0.3", "--supervisor", url)
    await eventually(lambda: terminal.shown("2 nodes: 2 member"), "first picture")
    assert "\x1b[32m" in terminal.text
    await cluster.agents["n1"].die()
    await eventually(lambda: terminal.shown("1 gone"), "the change is drawn")
    assert await asyncio.to_thread(terminal.close) == 0


async def test_no_color_is_honoured(cluster: Any) -> None:
    await form(cluster, "n0")
    url = f"http://{cluster.leader.http_address}"
    terminal = Terminal("status", "--once", "--supervisor", url, NO_COLOR="1")
    await eventually(lambda: terminal.shown("1 nodes: 1 member"), "shown")
    assert not re.search(r"\x1b\[3\d", terminal.text)
    await asyncio.to_thread(terminal.process.wait, 20)
    terminal.close()


async def test_events_follow_and_names_are_completed(cluster: Any) -> None:
    await form(cluster, "n0", "n1")
    url = f"http://{cluster.leader.http_address}"
    terminal = Terminal("events", "--follow", "--supervisor", url)
    await eventually(lambda: terminal.shown("record_generation job=train"), "what was")
    await cluster.step(1)
    await eventually(lambda: terminal.shown("step 1 completed"), "what comes")
    assert await asyncio.to_thread(terminal.close) == 0
    asked = {"_REGROW_COMPLETE": "complete_bash", "COMP_WORDS": "regrow node show n", "COMP_CWORD": "3", "REGROW_SUPERVISOR": url}
    script = str(Path(sys.executable).with_name("regrow"))
    done = await asyncio.to_thread(
        lambda: subprocess.run([script], capture_output=True, text=True, check=False, env={**os.environ, **asked})
    )
    assert done.stdout.split() == ["n0", "n1"]


def told(folder: Path, http: str) -> None:
    """Write where the supervisor is, as one of a local run does."""
    path = folder / "runs" / "x" / "supervisor" / "supervisor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"http": http, "pid": os.getpid()}))


async def test_both_views_follow_the_leader(cluster: Any, tmp_path: Path) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    told(tmp_path, cluster.leader.http_address)
    status = Terminal("status", "--every", "0.3", folder=tmp_path)
    events = Terminal("events", "--follow", "--brief", "--limit", "30", folder=tmp_path)
    await eventually(lambda: status.shown("supervisor s0, epoch 1"), "the first leader's picture")
    await eventually(lambda: events.shown("generation_recorded job=train"), "what was")
    assert "digests_reported" not in events.text
    first = cluster.leader
    await cluster.supervisor()
    first.stop()
    second = await eventually(lambda: cluster.leader is not None and cluster.leader is not first and cluster.leader, "the next leader")
    told(tmp_path, second.http_address)
    await eventually(lambda: status.shown("supervisor s1, epoch 2"), "the next leader's picture")
    await eventually(lambda: events.shown("asking again"), "it says that the connection ended")
    await eventually(lambda: events.shown("leader_started") and events.text.count("leader_started") >= 2, "the next leader's journal")
    await eventually(lambda: len(second.term.view.nodes) == 2, "both nodes are there")
    await cluster.agents["n1"].die()
    await eventually(lambda: events.shown("node_disconnected node=n1"), "what comes")
    assert CONTROL.sub("", events.text).count("generation_recorded job=train generation=1") == 1, "nothing comes twice"
    assert await asyncio.to_thread(status.close) == 0
    assert await asyncio.to_thread(events.close) == 0


async def test_status_says_what_is_saved_and_what_broke(cluster: Any) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    cluster.agents["n0"].committed(1)
    await eventually(lambda: 1 in cluster.job().checkpoints, "committed")
    await cluster.agents["n2"].die()
    await cluster.generation(2)
    await cluster.step(2)
    done = await regrow("status", "--supervisor", f"http://{cluster.leader.http_address}")
    assert re.search(r"1, \d+\.\d s", done.stdout), done.stdout
    assert re.search(r"train: newest incident \d\d:\d\d:\d\d node lost n2, recovered by shrink in", done.stdout), done.stdout
    assert re.search(r"^n2 +gone +2 +- +gone for \d", done.stdout, re.MULTILINE), done.stdout


async def test_status_without_a_supervisor() -> None:
    done = await regrow("status", "--supervisor", "http://127.0.0.1:9", "--json")
    assert done.returncode == 1
    assert "does not answer" in json.loads(done.stdout)["error"]["what"]
