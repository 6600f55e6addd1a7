"""How many nodes one leader bears, and what aggregators change: costs measured here, the queue simulated with them.

    .venv/bin/python benchmarks/aggregators.py [--quick] --json

Measured, in CPU time of this process so that a busy machine matters less: a beat on the real beat server (TLS, one connection a
node, clients in a child process), a node's reports of a step, the same beat and reports as one of many in a frame, a greeting (handshake,
hello, welcome), a connection that was given up before it was taken, a look of the failure detector, and the turns of the decision core
(simulated recoveries). No aggregator exists: the table says from which size on one is needed. The costs go into
`regrow simulate --leader --costs FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from regrow.supervisor.metrics import Metrics
from regrow.supervisor.sim import constants, leader_answer, models
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.leader_costs import Costs
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed
from regrow.supervisor.sim.world import World, policy_of
from regrow.supervisor.steps import Steps

_RANKS = 8
_GROUP = 64
_JOB = "train"


def beat(node: int, seq: int) -> wire.Beat:
    """A beat of a node with eight ranks that train."""
    first = node * _RANKS
    words = tuple(
        wire.RankProgress(rank=rank, started_step=seq + 1, applied_step=seq, phase="step", age_seconds=0.4)
        for rank in range(first, first + _RANKS)
    )
    return wire.Beat(seq=seq, generation=1, progress=words, memory_ratio=0.5)


def reports(node: int, step: int) -> wire.NodeSteps:
    """What a node says of a step."""
    first = node * _RANKS
    each = tuple(
        wire.StepReport(
            generation=1, rank=rank, step=step, loss=1.0 if rank == 0 else None, samples=step, step_seconds=1.0, compute_seconds=0.9
        )
        for rank in range(first, first + _RANKS)
    )
    return wire.NodeSteps(job=_JOB, generation=1, step=step, reports=each)


def hello(node: int) -> wire.Hello:
    """The greeting of a stub."""
    return wire.Hello(
        cluster="scale", node=f"n{node}", incarnation="1", address="127.0.0.1", peer_address="127.0.0.1:1", slots=_RANKS,
        health=wire.HealthVerdict(state="healthy"), boot_id="b",
    )  # fmt: skip


class Tables:
    """What the leader does with a beat and with reports: the failure detector, progress words, steps, step times of ranks."""

    def __init__(self, nodes: int = 0, wanted: int = 0) -> None:
        self.came = asyncio.Event()
        """`wanted` lines were noted; set anew by `expect`."""
        self._wanted = wanted
        self.num_lines = 0
        self.silence = Silence(silence_seconds=2.0, look_seconds=0.1)
        self.stall = Stall(job=_JOB, generation=1, changed_at=0.0)
        self.steps = Steps(_JOB, 1, {f"n{node}": tuple(range(node * _RANKS, (node + 1) * _RANKS)) for node in range(nodes)})
        self.metrics = Metrics()

    def expect(self, wanted: int) -> None:
        """Wait for so many lines from here on."""
        self.num_lines, self._wanted = 0, wanted
        self.came.clear()

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Welcome | wire.Refused:  # noqa: ARG002
        """A stub comes."""
        self.silence.connected(hello.node, time.monotonic())
        return wire.Welcome(epoch=1, leader="s", beat_seconds=0.5)

    def said(self, connection: Connection, message: Any) -> None:
        """A line."""
        self.note(connection.node, message)

    def note(self, node: str, message: Any) -> None:
        """Into the tables, as `supervisor.service` and `supervisor.term` do it."""
        now = time.monotonic()
        self.metrics.said(node, message)
        self.num_lines += 1
        self.silence.heard(node, now)
        if isinstance(message, wire.Beat):
            self.stall.words(message.progress, now)
            self.steps.words(node, message.progress, now)
        else:
            self.stall.moved(now)
            self.steps.reported(node, message, now)
        if self.num_lines == self._wanted:
            self.came.set()

    def closed(self, connection: Connection, reason: str) -> None:  # noqa: ARG002
        """A stub goes."""
        self.silence.disconnected(connection.node)


async def client(port: int, authority: str, nodes: int, rounds: int) -> None:
    """The child: connects all; then, each time it is told to, sends that many beats a node, or reports of steps, evenly over the time."""
    tls = ssl.create_default_context(cafile=authority)
    links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for node in range(nodes):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.write(wire.encode(hello(node)))
        await reader.readline()
        links.append((reader, writer))
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    while (order := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) in ("beats", "reports"):
        for seq in range(rounds):
            for node, (_, writer) in enumerate(links):
                writer.write(wire.encode(beat(node, seq) if order == "beats" else reports(node, seq + 1)))
                await asyncio.sleep(0)
                if node % 8 == 7:
                    await asyncio.sleep(0.002)  # a line is one wake-up of the server, as it is from nodes that do not know each other
        for _, writer in links:
            await writer.drain()


async def connected(folder: Path, *, nodes: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a greeting, a beat, a node's reports of a step, and a connection that was given up."""
    certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    tables = Tables(nodes)
    server = BeatServer(tables, tls=context)
    await server.start("127.0.0.1", 0)
    words = (sys.executable, __file__, "--client", str(server.port), str(folder / "ca.pem"), str(nodes), str(rounds))
    began = time.process_time()
    child = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    await child.stdout.readline()
    found = {"greeting": (time.process_time() - began) / nodes}
    for name, order in (("beat", b"beats\n"), ("report", b"reports\n")):
        tables.expect(nodes * rounds)
        began = time.process_time()
        child.stdin.write(order)
        await tables.came.wait()
        found[name] = (time.process_time() - began) / tables.num_lines
    child.stdin.write(b"end\n")
    await child.wait()
    found["abandoned"] = await abandoned(server, nodes)
    await server.stop()
    return found


async def abandoned(server: BeatServer, number: int) -> float:
    """CPU seconds of taking a connection whose other end is gone. Opening and closing it here counts, too."""
    before = server.num_conversations
    began = time.process_time()
    for _ in range(number):
        with socket.create_connection(("127.0.0.1", server.port)):
            pass
    while server.num_conversations < before + number:  # noqa: ASYNC110  # it counts, and tells nobody
        await asyncio.sleep(0.02)
    return (time.process_time() - began) / number


def folded(make: Callable[[int, int], Any], decode: Callable[[bytes], Any], repeats: int) -> float:
    """CPU seconds of one line among `_GROUP` in a frame: decoding and tables."""
    tables = Tables(_GROUP)
    for node in range(_GROUP):
        tables.silence.connected(f"n{node}", 0.0)
    names = [f"n{node}" for node in range(_GROUP)]
    frames = [msgspec.json.encode([make(node, seq) for node in range(_GROUP)]) for seq in range(1, repeats + 1)]
    began = time.process_time()
    for frame in frames:
        for node, message in zip(names, decode(frame), strict=True):
            tables.note(node, message)
    return (time.process_time() - began) / (repeats * _GROUP)


def look(nodes: int, repeats: int = 200) -> float:
    """CPU seconds of one look of the failure detector at nodes that are all heard."""
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    for node in range(nodes):
        silence.connected(f"n{node}", 0.0)
    began = time.process_time()
    for _ in range(repeats):
        silence.look(1.0)
    return (time.process_time() - began) / repeats


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
        port, authority, nodes, rounds = options.client
        asyncio.run(client(int(port), authority, int(nodes), int(rounds)))
        return
    nodes, rounds = (128, 40) if options.quick else (512, 60)
    with tempfile.TemporaryDirectory(prefix="regrow-aggregators-") as folder:
        network = asyncio.run(connected(Path(folder), nodes=nodes, rounds=rounds))
    size, repeats = (1024, 100) if options.quick else (2048, 500)
    core = turns(size)
    costs = Costs(
        **network,
        word=folded(beat, msgspec.json.Decoder(list[wire.Beat]).decode, repeats),
        report_word=folded(reports, msgspec.json.Decoder(list[wire.NodeSteps]).decode, repeats),
        look=look(size) * 1000.0 / size,
        step_turn=core["step"] * 1000.0 / size,
        worst_turn=core["worst"] * 1000.0 / size,
    )
    answer = leader_answer.answer(leader_answer.Request(costs=costs, group=_GROUP))
    document = {
        "figures": {
            "largest_nodes": answer["largest_nodes"]["all"],
            "largest_nodes_with_aggregators": answer["largest_nodes_with_aggregators"]["all"],
        },
        "limits": answer["limits"],
        "samples": answer | {"connections": nodes, "core_nodes": size},
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load_average": list(os.getloadavg())},
    }
    sys.stdout.write((json.dumps(document) if options.json else json.dumps(document, indent=2)) + "\n")


if __name__ == "__main__":
    main()
