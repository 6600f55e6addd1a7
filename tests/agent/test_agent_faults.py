"""The agent daemon when things go wrong around it: hung shim, hung leader, unkillable worker, cut lifeline, bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.agent.harness import until
from tests.agent.leader import AgentProcess, StubLeader
from tests.agent.scene import SLEEP, Scene, pids_of

from regrow import wire
from regrow.agent.config import AgentSettings, check
from regrow.agent.roster import process_state
from regrow.errors import ConfigurationError
from regrow.store.base import Store

TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
failed = libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, PTRACE_O_TRACEEXIT)
print("failed" if failed else "seized", flush=True)
time.sleep(600)
"""


async def test_a_worker_that_never_goes_away_makes_the_node_unusable(scene: Scene) -> None:
    agent = await scene.agent("--kill-seconds", "1")
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    pid = pids_of(agent, 1)[1]
    # It is stopped on its way out, with all that it has open, and no signal moves it: like a thread that is stuck in a driver.
    tracer = await asyncio.create_subprocess_exec(sys.executable, "-c", TRACER, str(pid), stdout=subprocess.PIPE)
    assert tracer.stdout is not None
    if (await tracer.stdout.readline()) != b"seized\n":
        tracer.kill()
        await tracer.wait()
        pytest.skip("no ptrace here")
    scene.leader.start_generation(2, scene.script(SLEEP))
    refused = await scene.leader.next(wire.StartRefused)
    assert refused.node_unusable
    assert f"pid {pid}" in refused.reason
    assert (await scene.leader.next(wire.HealthChanged)).verdict.action == "reboot"
    assert await agent.wait() == 1
    assert not scene.output(2, 0)
    fences = json.loads((agent.state / "agent.json").read_text(encoding="utf-8"))
    assert "host needs recycling" in fences["unusable"]
    tracer.kill()
    await tracer.wait()
    await scene.agent()  # the process is gone now: the same boot may be used again


async def test_a_hung_shim_is_killed_with_its_workers(scene: Scene) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    pids = pids_of(agent, 1)
    shim = psutil.Process(pids[0]).ppid()
    os.kill(shim, signal.SIGSTOP)
    scene.leader.start_generation(2, scene.script(SLEEP))
    await scene.up(2)
    assert all(process_state(pid) in ("", "Z") for pid in pids)
    assert scene.leader.all(wire.WorkersExited) == []


async def test_a_hung_leader_is_left_for_the_next_one(scene: Scene, store: Store) -> None:
    await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    old, scene.leader = scene.leader, StubLeader(store, scene.cluster, epoch=2)
    await scene.leader.start()
    hello = await scene.leader.next(wire.Hello)
    assert hello.running is not None
    assert hello.running.generation == 1
    old.order(wire.StopGeneration(epoch=1, seq=99, job="toy", generation=1))
    scene.leader.order(wire.CollectStacks(job="toy", generation=1))
    assert (await scene.leader.next(wire.Output)).kind == "stacks"
    await old.stop()


async def test_a_cut_lifeline_takes_the_whole_node(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With agent, shim and worker stopped by SIGSTOP: the kernel continues the daemons."""
    read, write = os.pipe()
    monkeypatch.setenv("REGROW_LIFELINE", str(read))
    agent = AgentProcess(scene.folder / "n0", scene.url, scene.cluster)
    agent.pass_fds = (read,)
    scene.agents.append(agent)
    await agent.start()
    await scene.leader.next(wire.Hello)
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    pids = pids_of(agent, 1)
    writer = int((await agent.admin(kind="kill_writer"))["pid"])
    await until(lambda: process_state(writer) in ("", "Z"))
    daemons = await agent.admin(kind="targets")
    stopped = [agent.pid, int(daemons["shim"]), *pids]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    os.close(read)
    os.close(write)
    await until(lambda: all(process_state(pid) in ("", "Z") for pid in stopped), 10)
    await agent.wait()


def _regrow(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regrow", "agent", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


GOOD: dict[str, Any] = {"node": "n0", "store": "etcd://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"store": ""}, "no store is given"),
        ({"state": Path()}, "no state folder is given"),
        ({"state": Path("/dev/null/s")}, "cannot be written"),
        ({"node": "Bad Name"}, "is not usable"),
        ({"slots": 0}, "0 slots"),
        ({"address": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
        ({"metrics": "203.0.113.7:0"}, "cannot listen on 203.0.113.7"),
        ({"metrics": "nowhere"}, "is not host:port"),
        ({"kill_seconds": 0.0}, "not above 0"),
        ({"peer_port": 70_000}, "is no port"),
        ({"state": Path("/tmp") / ("x" * 90)}, "is too long"),
    ],
)
def test_bad_settings_are_found_before_any_side_effect(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        check(AgentSettings(**({"state": tmp_path / "s"} | GOOD | changes)))
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_with_2(tmp_path: Path) -> None:
    ended = _regrow("--state", str(tmp_path / "s"), "--store", "mysql://x", "--json")
    assert ended.returncode == 2
    assert "unknown scheme" in ended.stderr
    assert json.loads(ended.stdout)["error"]["kind"] == "ConfigurationError"
    assert list(tmp_path.iterdir()) == []


def test_unknown_keys_of_the_file_are_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("[agent]\nslotz = 2\n", encoding="utf-8")
    ended = _regrow("--config", str(file))
    assert ended.returncode == 2
    assert "did you mean 'slots'" in ended.stderr


def test_explain_says_what_won(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("[agent]\nslots = 2\nnode = 'a'\nstore = 'etcd://h:1'\n", encoding="utf-8")
    ended = _regrow("--config", str(file), "--node", "c", "--explain", "--json", env={"REGROW_AGENT_SLOTS": "3"})
    story = json.loads(ended.stdout)
    assert story["node"] == {"value": "c", "source": "flag --node"}
    assert story["slots"] == {"value": "3", "source": "environment REGROW_AGENT_SLOTS"}
    assert story["store"] == {"value": "etcd://h:1", "source": f"file {file}"}
    assert story["address"]["source"] == "default"


async def test_a_second_agent_in_the_same_folder_and_a_taken_port_are_refused(scene: Scene) -> None:
    agent = await scene.agent()
    flags = agent.command[agent.command.index("--node") :]
    ended = await asyncio.to_thread(_regrow, *flags)
    assert ended.returncode == 2
    assert f"another agent runs in this folder (pid {agent.pid})" in ended.stderr
    facts = json.loads((agent.state / "agent-run.json").read_text(encoding="utf-8"))
    port = int(facts["peer"].rsplit(":", 1)[1])
    other = AgentSettings(state=scene.folder / "n1", node="n1", store=scene.url)
    for taken in ({"peer_port": port}, {"metrics": facts["metrics"]}):
        with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            check(dataclasses.replace(other, **taken))
    assert not (scene.folder / "n1").exists()


async def test_nonsense_on_the_socket_is_logged_and_passed_over(scene: Scene) -> None:
    agent = await scene.agent()
    reader, writer = await asyncio.open_unix_connection(str(agent.state / "agent.sock"))
    writer.write(b"hello\n" + b'{"type":"dance"}\n' + msgspec.json.encode({"type": "inject", "kind": "dance"}) + b"\n")
    answer = json.loads(await reader.readline())
    writer.close()
    assert not answer["done"]
    assert "of unknown kind dance" in agent.log()


async def test_a_socket_that_was_deleted_is_bound_anew(scene: Scene) -> None:
    """Gone, and then with a stranger's file in its place; who was connected stays so."""
    agent = await scene.agent()
    path = agent.state / "agent.sock"
    reader, writer = await asyncio.open_unix_connection(str(path))
    for strange in (False, True):
        path.unlink()
        if strange:
            path.write_text("not a socket", encoding="utf-8")
        await until(lambda: path.is_socket() and path.stat().st_mode & 0o777 == 0o600)
        assert not (await agent.admin(kind="dance"))["done"], "somebody answers"
    writer.write(msgspec.json.encode({"type": "inject", "kind": "dance"}) + b"\n")
    assert not json.loads(await reader.readline())["done"]
    writer.close()
    assert agent.log().count("was gone: bound anew") == 2


async def test_worker_lines_become_reports_and_orders_reach_workers(scene: Scene) -> None:
    await scene.agent()
    script = scene.script(
        "import json, os, socket\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(os.environ['REGROW_SOCKET'])\n"
        "rank = int(os.environ['RANK'])\n"
        "def say(**m): s.sendall(json.dumps({'generation': 1, 'rank': rank, **m}).encode() + b'\\n')\n"
        "say(type='worker_hello', job='toy', pid=os.getpid())\n"
        "say(type='worker_phase', phase='rendezvous', seconds=0.5)\n"
        "say(type='step', step=1, loss=2.5)\n"
        "print('up', flush=True)\n"
        "line = s.makefile().readline()\n"
        "print(line, flush=True)\n"
        "say(type='save', step=2, outcome='snapshot', stall_seconds=0.1)\n"
        "say(type='worker_phase', phase='finished', step=2)\n"
    )
    scene.leader.start_generation(1, script)
    steps = await scene.leader.next(wire.NodeSteps)
    assert (steps.step, [report.loss for report in steps.reports]) == (1, [2.5, 2.5])
    assert (await scene.leader.phase(1, "rendezvous")).seconds == 0.5
    await scene.up(1)
    scene.leader.order(wire.RequestSave(epoch=1, seq=50, job="toy", generation=1, stop_after=True))
    saved = await scene.leader.next(wire.CheckpointChanged)
    assert (saved.step, saved.state) == (2, "snapshot")
    assert (await scene.leader.phase(1, "finished")).step == 2
    exits = [found for _ in (0, 1) for told in scene.leader.all(wire.WorkersExited) for found in told.exits]
    await scene.leader.next(wire.WorkersExited, lambda said: said.exits[0].rank == 1)
    assert all(found.declared_end for found in exits)
    assert '"stop_after_save":true' in scene.output(1, 0)
