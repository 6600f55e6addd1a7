"""How many nodes one leader bears, and what aggregators change: costs measured here, the queue simulated with them.

    .venv/bin/python benchmarks/aggregators.py [--quick] --json

Measured, in CPU time of this process so that a busy machine matters less: a beat on the real beat server (TLS, one connection a
node, clients in a child process), the same beat as one of many in a frame, a greeting (handshake, hello, welcome), and the turns of
the decision core at growing sizes (simulated recoveries). No aggregator exists: the table says from which size on one is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import ssl
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from stubs.bench import certificates

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.beat_server import BeatServer, Connection
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import Turn, turn
from regrow.supervisor.core.view import View
from regrow.supervisor.detector import Silence, Stall
from regrow.supervisor.sim import constants, models
from regrow.supervisor.sim.control_plane import DETECTION_SECONDS, FORMING_SECONDS, MOST_CORES, Costs, Load, largest, simulate
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed
from regrow.supervisor.sim.world import World, policy_of

_RANKS = 8
_NODES = (512, 1024, 2048, 4096, 8192, 16_384)
_GROUP = 64


def beat(node: int, seq: int) -> wire.Beat:
    """A beat of a node with eight ranks that train."""
    first = node * _RANKS
    words = tuple(
        wire.RankProgress(rank=rank, started_step=seq + 1, applied_step=seq, phase="step", age_seconds=0.4)
        for rank in range(first, first + _RANKS)
    )
    return wire.Beat(seq=seq, generation=1, progress=words, memory_ratio=0.5)


def hello(node: int) -> wire.Hello:
    """The greeting of a stub."""
    return wire.Hello(
        cluster="scale", node=f"n{node}", incarnation="1", address="127.0.0.1", peer_address="127.0.0.1:1", slots=_RANKS,
        health=wire.HealthVerdict(state="healthy"), boot_id="b",
    )  # fmt: skip


class Tables:
    """What the leader does with a beat: the failure detector and the progress words."""

    def __init__(self, wanted: int = 0) -> None:
        self.all_came = asyncio.Event()
        """`wanted` beats were noted."""
        self._wanted = wanted
        self.num_beats = 0
        self.num_greeted = 0
        self.silence = Silence(silence_seconds=2.0, look_seconds=0.1)
        self.stall = Stall(job="train", generation=1, changed_at=0.0)

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Welcome | wire.Refused:  # noqa: ARG002
        """A stub comes."""
        self.num_greeted += 1
        self.silence.connected(hello.node, time.monotonic())
        return wire.Welcome(epoch=1, leader="s", beat_seconds=0.5)

    def said(self, connection: Connection, message: Any) -> None:
        """A beat."""
        self.note(connection.node, message)

    def note(self, node: str, message: wire.Beat) -> None:
        """Into the tables."""
        now = time.monotonic()
        self.num_beats += 1
        self.silence.heard(node, now)
        self.stall.words(message.progress, now)
        if self.num_beats == self._wanted:
            self.all_came.set()

    def closed(self, connection: Connection, reason: str) -> None:  # noqa: ARG002
        """A stub goes."""
        self.silence.disconnected(connection.node)


async def client(port: int, authority: str, nodes: int, beats: int) -> None:
    """The child: connects all, then sends `beats` beats a node, evenly over the time."""
    tls = ssl.create_default_context(cafile=authority)
    links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for node in range(nodes):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.write(wire.encode(hello(node)))
        await reader.readline()
        links.append((reader, writer))
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for seq in range(beats):
        for node, (_, writer) in enumerate(links):
            writer.write(wire.encode(beat(node, seq)))
            await asyncio.sleep(0)
            if node % 8 == 7:
                await asyncio.sleep(0.002)  # a beat is one wake-up of the server, as it is from nodes that do not know each other
    for _, writer in links:
        await writer.drain()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def connected(folder: Path, *, nodes: int, beats: int) -> dict[str, float]:
    """CPU seconds of a greeting and of a beat."""
    certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    tables = Tables(nodes * beats)
    server = BeatServer(tables, tls=context)
    await server.start("127.0.0.1", 0)
    words = (sys.executable, __file__, "--client", str(server.port), str(folder / "ca.pem"), str(nodes), str(beats))
    began = time.process_time()
    child = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    await child.stdout.readline()
    greeting = (time.process_time() - began) / nodes
    began = time.process_time()
    child.stdin.write(b"go\n")
    await tables.all_came.wait()
    spent = (time.process_time() - began) / tables.num_beats
    child.stdin.write(b"end\n")
    await child.wait()
    await server.stop()
    return {"beat": spent, "greeting": greeting}


def folded(repeats: int) -> float:
    """CPU seconds of one beat among `_GROUP` in a frame: decoding and tables."""
    tables = Tables()
    for node in range(_GROUP):
        tables.silence.connected(f"n{node}", 0.0)
    names = [f"n{node}" for node in range(_GROUP)]
    decoder = msgspec.json.Decoder(list[wire.Beat])
    frames = [msgspec.json.encode([beat(node, seq) for node in range(_GROUP)]) for seq in range(repeats)]
    began = time.process_time()
    for frame in frames:
        for node, message in zip(names, decoder.decode(frame), strict=True):
            tables.note(node, message)
    return (time.process_time() - began) / (repeats * _GROUP)


def turns(nodes: int) -> dict[str, float]:
    """CPU seconds of the core's turns: the longest while hosts are lost and come back, and that after a completed step (median)."""
    took: list[float] = []

    def timed(view: View, events: tuple[e.Event, ...], policy: Policy, now: float) -> Turn:
        began = time.process_time()
        result = turn(view, events, policy, now)
        took.append(time.process_time() - began)
        return result

    setup = Setup(constants=constants.load(), nodes=nodes, days=0.25, mesh=MeshShape(dp=nodes))
    losses = tuple(Fault(at=5000.0 * number, kind="host", nodes=(number,), seconds=1000.0, component="host") for number in (1, 2, 3))
    worlds: list[World] = []
    run_seed(setup, models.build(setup), lambda _rng: losses, 1, decide=timed, prepare=worlds.append)
    worst = max(took[len(took) // 4 :])
    view, now, policy = worlds[0].leader.view, worlds[0].now, policy_of(setup)
    generation = view.jobs[models.JOB].generation
    assert generation is not None
    took.clear()
    for step in range(1, 41):
        done = e.StepsCompleted(
            at=now + step, job=models.JOB, generation=generation.number, step=view.jobs[models.JOB].frontier + 1, step_seconds=1.0
        )
        view = timed(view, (done,), policy, now + step).view
    return {"worst": worst, "step": statistics.median(took)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        port, authority, nodes, beats = options.client
        asyncio.run(client(int(port), authority, int(nodes), int(beats)))
        return
    nodes, beats = (128, 40) if options.quick else (512, 60)
    with tempfile.TemporaryDirectory(prefix="regrow-aggregators-") as folder:
        network = asyncio.run(connected(Path(folder), nodes=nodes, beats=beats))
    size = 1024 if options.quick else 2048
    core = turns(size)
    costs = Costs(
        beat=network["beat"],
        word=folded(200 if options.quick else 1000),
        greeting=network["greeting"],
        step_turn=core["step"] * 1000.0 / size,
        worst_turn=core["worst"] * 1000.0 / size,
    )
    sizes = {str(group): {aim: largest(costs, aim, group=group) for aim in ("cpu", "greeting", "detection")} for group in (1, _GROUP)}
    rows = [msgspec.to_builtins(simulate(costs, Load(nodes=number, group=group))) for group in (1, _GROUP) for number in _NODES]
    document = {
        "figures": {
            "largest_nodes": min(sizes["1"].values()),
            "largest_nodes_with_aggregators": min(sizes[str(_GROUP)].values()),
        },
        "limits": {"cores": MOST_CORES, "detection_seconds": DETECTION_SECONDS, "greeting_seconds": FORMING_SECONDS},
        "samples": {
            "costs_seconds": msgspec.to_builtins(costs), "largest_by_aim": sizes, "group": _GROUP,
            "rows": rows, "connections": nodes, "core_nodes": size,
        },
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load_average": list(os.getloadavg())},
    }  # fmt: skip
    sys.stdout.write((json.dumps(document) if options.json else json.dumps(document, indent=2)) + "\n")


if __name__ == "__main__":
    main()
