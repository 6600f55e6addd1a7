"""A whole cluster on hosts of its own: three with etcd and a supervisor each, the others with an agent each.

Host names: c0 c1 c2 (control), a0 a1 ... (agents). Etcd and supervisors speak over the management network, workers over the data network.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.launcher import TEST_MARK
from tests.e2e.network import DATA, MANAGEMENT, Network

from regrow import wire
from regrow.agent.progress import read_progress
from regrow.processes import marked, stat_fields
from regrow.store.binary import find_etcd

LIMIT_SECONDS = 90.0
"""One generous deadline for every wait."""

_HTTP, _BEAT, _CLIENT, _PEER = 7071, 7070, 2379, 2380
_QUICK = {
    "REGROW_SUPERVISOR_BEAT_SECONDS": "0.2",
    "REGROW_SUPERVISOR_SILENCE_SECONDS": "1.0",
    "REGROW_POLICY_RECONNECT_SECONDS": "2.0",
    "REGROW_POLICY_JOIN_SECONDS": "20",
    "REGROW_POLICY_TAKEOVER_SECONDS": "3",
    "REGROW_POLICY_PHASE_SECONDS": "90",
    "REGROW_POLICY_START_SECONDS": "40",
    "REGROW_POLICY_HANG_FIRST_STEP_SECONDS": "12",
    "REGROW_POLICY_GROWTH_COOLDOWN_SECONDS": "1",
    "REGROW_POLICY_REACH_AGAIN_SECONDS": "1",
    "REGROW_POLICY_BURN_IN_SECONDS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Time constants scaled down."""


class Site:
    """Starts, breaks and watches it."""

    def __init__(self, folder: Path, *, agents: int) -> None:
        self.folder = folder
        self.control = ["c0", "c1", "c2"]
        self.agents = [f"a{index}" for index in range(agents)]
        self.network = Network([*self.control, *self.agents])
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # --- life

    def start(self) -> None:
        """Make the hosts and start everything; the agents come up by themselves."""
        self.network.start()
        for host in self.control:
            self.start_etcd(host)
        for host in self.control:
            self.start_supervisor(host)
        for host in self.agents:
            self.start_agent(host)
        self.until(lambda: len(self.connected()) == len(self.agents), "all agents connected")

    def stop(self) -> None:
        """Kill what is left and remove the hosts."""
        for pid in marked(TEST_MARK, str(self.folder)):
            _kill(pid)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.network.stop()

    def start_etcd(self, host: str) -> None:
        """(Again) with the data that it has."""
        peers = ",".join(f"{name}=http://{self.network.address(name, MANAGEMENT)}:{_PEER}" for name in self.control)
        own = self.network.address(host, MANAGEMENT)
        flags = {
            "name": host,
            "data-dir": str(self.folder / host / "etcd"),
            "listen-client-urls": f"http://{own}:{_CLIENT}",
            "advertise-client-urls": f"http://{own}:{_CLIENT}",
            "listen-peer-urls": f"http://{own}:{_PEER}",
            "initial-advertise-peer-urls": f"http://{own}:{_PEER}",
            "initial-cluster": peers,
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "log-level": "warn",
        }
        self._start(f"etcd {host}", host, str(find_etcd()), *(f"--{name}={value}" for name, value in flags.items()))

    def start_supervisor(self, host: str) -> None:
        """(Again) in the same state folder."""
        own = self.network.address(host, MANAGEMENT)
        address = ("--beat", f"{own}:{_BEAT}", "--http", f"127.0.0.1:{_HTTP}", "--name", host, "--ttl", "2")
        state = ("--store", self._store(), "--state", str(self.folder / host / "supervisor"))
        self._start(f"supervisor {host}", host, sys.executable, "-m", "regrow", "supervisor", *state, *address)

    def start_agent(self, host: str) -> None:
        """(Again) in the same state folder."""
        state = ("--node", host, "--store", self._store(), "--state", str(self.folder / host), "--slots", "1")
        rest = (
            "--address",
            self.network.address(host, DATA),
            "--orphan-seconds",
            "20",
            "--preflight-seconds",
            "0",
            "--health-seconds",
            "0",
        )
        self._start(f"agent {host}", host, sys.executable, "-m", "regrow", "agent", *state, *rest, "--kernel-log", "")

    def submit(self, script: Path, *arguments: str) -> None:
        """The job `toy` on all agents."""
        spec = wire.JobSpec(
            job="toy",
            argv=(str(script), *arguments),
            cwd=str(self.folder),
            max_nodes=len(self.agents),
            global_batch=8,
            checkpoint=wire.CheckpointPolicy(path=str(self.folder / "checkpoints"), max_interval_seconds=3.0),
            hang_seconds=8.0,
        )
        self.until(lambda: self.ask(self.leader() or self.control[0], "/v1/jobs", msgspec.json.encode(spec)), "the job accepted")

    def _store(self) -> str:
        return "etcd://" + ",".join(f"{self.network.address(name, MANAGEMENT)}:{_CLIENT}" for name in self.control)

    def _start(self, name: str, host: str, *argv: str) -> None:
        (self.folder / host).mkdir(exist_ok=True)
        if name in self._processes:
            self._processes[name].wait()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("REGROW_")}
        environment |= _QUICK | {TEST_MARK: str(self.folder)}
        with (self.folder / f"{name.replace(' ', '-')}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self.network.inside(host, *argv), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    # --- faults

    def kill(self, name: str) -> None:
        """SIGKILL one process: 'etcd c0', 'supervisor c1', 'agent a2'."""
        self._processes[name].kill()
        self._processes[name].wait()

    def lose_power(self, host: str) -> None:
        """The host is gone without a word: first nothing leaves it any more, then all its processes die."""
        self.network.cut(host)
        for pid in self.network.pids(host):
            _kill(pid)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To one process."""
        self._processes[name].send_signal(number)

    # --- watching

    def until(self, condition: Callable[[], Any], what: str, *, limit_seconds: float = LIMIT_SECONDS) -> Any:
        """Poll until the condition gives something true; fail with the logs otherwise."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"did not see {what} within {limit_seconds} s\n{self.story()}")

    def ask(self, host: str, path: str, posted: bytes | None = None) -> dict[str, Any]:
        """A document of the supervisor on this host; empty when it does not answer or does not lead."""
        request = urllib.request.Request(f"http://127.0.0.1:{_HTTP}{path}", data=posted, headers={"content-type": "application/json"})

        def get() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    return json.load(answer)
            except (OSError, ValueError, urllib.error.URLError):
                return {}

        return self.network.call(host, get)

    def leader(self) -> str:
        """Host of the supervisor that says it leads with the highest epoch; empty: none does."""
        found = [(health.get("epoch", 0), host) for host in self.control if (health := self.ask(host, "/healthz")).get("leading")]
        return max(found)[1] if found else ""

    def get(self, path: str) -> dict[str, Any]:
        """A document of the leader."""
        host = self.leader()
        return self.ask(host, path) if host else {}

    def connected(self) -> list[str]:
        """Nodes that the leader can hear."""
        return [node["node"] for node in self.get("/v1/status").get("nodes", []) if node["connected"]]

    def job(self) -> dict[str, Any]:
        """The job's document; empty when no leader gives it now."""
        return self.get("/v1/jobs/toy")

    def current(self) -> dict[str, Any]:
        """The job's document, as soon as a leader gives it."""
        return self.until(self.job, "the job's document")

    def committed(self) -> int:
        """Step of the newest committed checkpoint that the leader knows."""
        return (self.job().get("checkpoint") or {}).get("step") or 0

    def etcdctl(self, *words: str) -> list[str]:
        """A command line of etcd's own client that asks all members."""
        ends = self._store().removeprefix("etcd://")
        return self.network.inside(self.control[0], "env", "ETCDCTL_API=3", "etcdctl", "--endpoints", ends, *words)

    def revision(self) -> int:
        """Of the store: how often anything was ever written."""
        done = subprocess.run(self.etcdctl("endpoint", "status", "-w", "json"), capture_output=True, timeout=60, check=True)
        return max(item["Status"]["header"]["revision"] for item in json.loads(done.stdout))

    def workers(self) -> dict[str, list[tuple[int, int]]]:
        """{host: [(generation, pid)]} of all training processes that live, by the words that they publish: one that changed its
        generation in place counts for the last."""
        found: dict[str, list[tuple[int, int]]] = {}
        for host in self.agents:
            there, newest = set(self.network.pids(host)), dict[int, int]()
            for path in sorted(self.folder.glob(f"{host}/jobs/toy/g*/progress")):
                number = int(path.parent.name[1:])
                for word in read_progress(path):
                    if word.pid in there and stat_fields(word.pid)[0] != "Z":
                        newest[word.pid] = max(number, newest.get(word.pid, 0))
            if newest:
                found[host] = sorted((number, pid) for pid, number in newest.items())
        return found

    def left(self) -> list[int]:
        """Processes of this test that live."""
        return marked(TEST_MARK, str(self.folder))

    def story(self) -> str:
        """Ends of all logs, for a failed test."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("a*/jobs/*/g*/rank*.out")])
        texts = [f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-2500:]}" for path in logs]
        return "\n".join(texts)[-30000:]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
