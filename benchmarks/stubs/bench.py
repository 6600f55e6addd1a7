"""The processes of benchmarks/scale.py and what is done to them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from stubs.judge import Judge

from regrow import wire
from regrow.ids import MeshShape
from regrow.store.embedded import EmbeddedCluster, EtcdOptions

CLUSTER = "scale"
JOB = "train"
_WAIT_SECONDS = 150.0
_STEP_SECONDS = 2.0
_PEERS = 4
_PEER_SECONDS = 0.5
"""From a loss to the errors of its peers' workers."""
_QUIET_SECONDS = 4.0
_CONFIG = '[supervisor]\ncluster = "{cluster}"\ntls_certificate = "{folder}/server.pem"\ntls_key = "{folder}/server.key"\n'
_EXTENSIONS = "[server]\nsubjectAltName = IP:127.0.0.1\nextendedKeyUsage = serverAuth\n"


def certificates(folder: Path) -> None:
    """ca.pem, and server.pem with its key, for 127.0.0.1."""
    (folder / "extensions").write_text(_EXTENSIONS)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=regrow scale")
    openssl("req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=supervisor")
    signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-extensions", "server")
    openssl("x509", "-req", "-in", "server.csr", *signer, "-out", "server.pem")


class StubProcess:
    """One process with many stub agents."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._turn = asyncio.Lock()

    async def do(self, what: str, **more: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
            await self.process.stdin.drain()
            line = await asyncio.wait_for(self.process.stdout.readline(), _WAIT_SECONDS)
        if not line:
            raise RuntimeError(f"a stub process ended with {self.process.returncode}")
        return json.loads(line)


class Bench:
    """etcd, a supervisor and stubs."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.etcd = EmbeddedCluster(folder / "etcd", options=EtcdOptions(heartbeat_milliseconds=250, election_milliseconds=2500))
        self.stubs: list[StubProcess] = []
        self.supervisor: asyncio.subprocess.Process | None = None
        self.judge = Judge(folder / "supervisor" / "journal.sqlite")
        self.step = 0
        self._halted = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

    # --- life

    async def start(self) -> None:
        """Start everything; nobody is connected yet."""
        certificates(self.folder)
        await self.etcd.start()
        config = self.folder / "supervisor.toml"
        config.write_text(_CONFIG.format(cluster=CLUSTER, folder=self.folder))
        state = self.folder / "supervisor"
        program = ("-m", "cProfile", "-o", str(self.folder / "supervisor.prof"), "-m") if self.options.profile else ("-m",)
        with (self.folder / "supervisor.log").open("wb") as output:
            self.supervisor = await asyncio.create_subprocess_exec(
                sys.executable, *program, "regrow", "supervisor", "--store", self.etcd.url, "--state", str(state), "--config", str(config),
                stdout=output, stderr=output,
            )  # fmt: skip
        await self.until(self._leading, "the supervisor leads")
        share = -(-self.options.nodes // self.options.processes)
        script = str(Path(__file__).with_name("agents.py"))
        for first in range(0, self.options.nodes, share):
            count = min(share, self.options.nodes - first)
            words = ("--store", self.etcd.url, "--cluster", CLUSTER, "--ca", str(self.folder / "ca.pem"), "--leases")
            sizes = ("--first", str(first), "--count", str(count), "--slots", str(self.options.gpus_per_node))
            process = await asyncio.create_subprocess_exec(
                sys.executable, script, *words, *sizes, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=wire.MAX_MESSAGE_BYTES
            )
            self.stubs.append(StubProcess(process))

    async def stop(self) -> None:
        """End everything that was started."""
        if self._stepper is not None:
            self._stepper.cancel()
        processes = [stub.process for stub in self.stubs] + ([self.supervisor] if self.supervisor is not None else [])
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                await asyncio.wait_for(process.wait(), 15.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        await self.etcd.stop()

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll, with one generous deadline."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.1)
        raise RuntimeError(f"not within {_WAIT_SECONDS:.0f} s: {what}; see {self.folder}/supervisor.log")

    # --- asking

    def _http(self, path: str, body: bytes | None = None) -> Any:
        address = json.loads((self.folder / "supervisor" / "supervisor.json").read_text())["http"]
        request = urllib.request.Request(f"http://{address}{path}", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_WAIT_SECONDS) as answer:
            return json.loads(answer.read())

    def _leading(self) -> bool:
        if self.supervisor is not None and self.supervisor.returncode is not None:
            raise RuntimeError(f"the supervisor ended: {(self.folder / 'supervisor.log').read_text()[-2000:]}")
        try:
            return bool(self._http("/healthz")["leading"])
        except OSError:
            return False

    async def all(self, what: str, **more: Any) -> list[dict[str, Any]]:
        """The same command to every stub process."""
        return list(await asyncio.gather(*(stub.do(what, **more) for stub in self.stubs)))

    async def running(self, generation_above: int) -> dict[str, Any] | None:
        """The newest generation when all its members run it."""
        states = await self.all("state")
        newest = max(states, key=lambda state: state["generation"])
        number = newest["generation"]
        if number <= generation_above or sum(state["running"].get(str(number), 0) for state in states) < newest["members"]:
            return None
        return newest | {"last_order_at": max(state["last_order_at"] for state in states)}

    # --- phases

    async def connect(self) -> float:
        """All stubs greet. Seconds until the last was welcomed."""
        began = time.monotonic()
        await self.all("connect")

        async def everybody() -> bool:
            return sum(state["welcomed"] for state in await self.all("state")) == self.options.nodes

        await self.until(everybody, f"{self.options.nodes} stubs are welcomed")
        return time.monotonic() - began

    async def form(self) -> float:
        """Submit a job of all nodes. Seconds until the last member got its order."""
        world = self.options.nodes * self.options.gpus_per_node
        spec = wire.JobSpec(
            job=JOB,
            argv=("train.py",),
            nproc_per_node=self.options.gpus_per_node,
            min_nodes=1,
            max_nodes=self.options.nodes,
            mesh=MeshShape(dp=self.options.nodes, tp=self.options.gpus_per_node),
            global_batch=world,
            checkpoint=wire.CheckpointPolicy(path="/checkpoints"),
        )
        began = time.time()
        await asyncio.to_thread(self._http, "/v1/jobs", msgspec.json.encode(spec))
        state = await self.until(lambda: self.running(0), "the first generation runs")
        self.step = state["restored"]
        self._stepper = asyncio.create_task(self._train())
        return state["last_order_at"] - began

    async def _train(self) -> None:
        """A step every two seconds; a committed checkpoint every fifth."""
        self._halted.clear()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._halted.wait(), _STEP_SECONDS)
            if self._halted.is_set():
                return
            self.step += 1
            await self.all("step", step=self.step)
            if self.step % 5 == 0:
                await self.all("commit", step=self.step)

    async def usage(self, seconds: float) -> dict[str, Any]:
        """CPU and memory over a window."""
        groups = {
            "supervisor": [self.supervisor.pid] if self.supervisor is not None else [],
            "etcd": [member.pid for member in self.etcd.members if member.pid],
            "stubs": [stub.process.pid for stub in self.stubs],
        }
        before = {name: _cpu(pids) for name, pids in groups.items()}
        began = time.monotonic()
        await asyncio.sleep(seconds)
        wall = time.monotonic() - began
        return {
            name: {"cores": (_cpu(pids) - before[name]) / wall, "memory_bytes": sum(psutil.Process(pid).memory_info().rss for pid in pids)}
            for name, pids in groups.items()
        }

    async def train(self, seconds: float) -> dict[str, Any]:
        """Steady training."""
        since = time.time()
        used = await self.usage(seconds)
        return used | self._unwanted(since)

    def _unwanted(self, since: float) -> dict[str, int]:
        """What was held against nodes that are all there."""
        return {"false_losses": len(self.judge.generations(since)), "suspects": self.judge.count("node_silent", since)}

    async def pauses(self, number: int, *, seconds: float) -> dict[str, Any]:
        """Stub processes stand still, one after the other: an eighth of the nodes is silent each time."""
        since = time.time()
        for stub in self.stubs[:number]:
            stub.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            stub.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(_QUIET_SECONDS)
        paused = min(number, len(self.stubs)) * -(-self.options.nodes // len(self.stubs))
        return {"node_pauses": paused, "seconds": seconds, **self._unwanted(since)}

    async def packet_loss(self, seconds: float) -> dict[str, Any]:
        """One packet in a hundred of the beat connections is dropped, in both directions."""
        address = json.loads((self.folder / "supervisor" / "supervisor.json").read_text())["beat"]
        port = address.rpartition(":")[2]
        drop = "numgen random mod 100 < 1 counter drop"
        rules = (
            "table inet regrow_scale {\nchain drops {\ntype filter hook input priority 0;\n"
            f"tcp dport {port} {drop}\ntcp sport {port} {drop}\n}}\n}}\n"
        )
        since = time.time()
        await asyncio.to_thread(_nft, "-f", "-", text=rules)
        try:
            await asyncio.sleep(seconds)
            listed = await asyncio.to_thread(_nft, "list", "table", "inet", "regrow_scale")
        finally:
            await asyncio.to_thread(_nft, "delete", "table", "inet", "regrow_scale")
        dropped = sum(int(line.split("packets")[1].split()[0]) for line in listed.splitlines() if "packets" in line)
        await asyncio.sleep(_QUIET_SECONDS)
        return {"seconds": seconds, "packets_dropped": dropped, **self._unwanted(since)}

    async def lose(self, number: int, *, silent: bool, rng: random.Random) -> dict[str, Any]:
        """Hosts are lost, their peers' workers fail; until the next generation runs. Then the hosts come back."""
        assert self._stepper is not None
        self._halted.set()
        await self._stepper
        before = (await self.until(lambda: self.running(0), "a generation runs"))["generation"]
        names = [f"node{index:05d}" for index in range(self.options.nodes)]
        chosen = rng.sample(names, number)
        peers = rng.sample([name for name in names if name not in chosen], _PEERS)
        lost_at: dict[str, float] = {}
        for answer in await self.all("lose", nodes=chosen, silent=silent):
            lost_at |= answer["at"]
        await asyncio.sleep(_PEER_SECONDS)
        await self.all("peers", nodes=peers)
        state = await self.until(lambda: self.running(before), "the next generation runs")
        self.step = state["restored"]
        self._stepper = asyncio.create_task(self._train())
        await self.until(lambda: len(self.judge.detections(lost_at)) == number, "all losses are in the journal")
        first = min(lost_at.values())
        result = {
            "hosts": number,
            "silent": silent,
            "detection_seconds": sorted(self.judge.detections(lost_at).values()),
            "decided_seconds": [at - first for at in self.judge.generations(first)],
            "members_after": state["members"],
            "running_seconds": state["last_order_at"] - first,
        }
        await self.all("return", nodes=chosen)
        await asyncio.sleep(_QUIET_SECONDS)
        return result

    def whole_run(self) -> dict[str, Any]:
        """Counts over everything."""
        found = self.judge.rows(("action_failed",), 0.0)
        return {"failed_transactions": sum(1 for *_, body in found if "record" in json.dumps(body)), "failed_actions": len(found)}


def _cpu(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def _nft(*words: str, text: str = "") -> str:
    return subprocess.run(["nft", *words], input=text, check=True, capture_output=True, text=True).stdout
