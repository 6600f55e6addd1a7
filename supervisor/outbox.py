"""Orders to agents, in the order in which they were decided; starts of thousands in bursts, so that beats are read in between."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import msgspec

from regrow import wire
from regrow.supervisor.beat_server import Connection
from regrow.supervisor.core import actions as a
from regrow.supervisor.core.view import View

log = logging.getLogger("regrow.supervisor.outbox")

_BURST_SECONDS = 0.01
"""Longest time for orders at a stretch: an order to start names all members, and is encrypted for each of them."""

Order = a.StopWorkers | a.AskSave | a.TellRate | a.AskStacks | a.AskReach | a.AskAgain | a.ReleaseNode | a.ClearHealth
Failed = Callable[[], None]


class _Start(wire.Action, frozen=True, kw_only=True, tag="start_generation"):
    """`wire.StartGeneration`, with what all members get alike encoded once."""

    spec: msgspec.Raw
    job_spec: msgspec.Raw
    workers: tuple[wire.WorkerAssignment, ...]
    group_rank: int
    master_address: str


class Outbox:
    """One per term. `failed` gets an action that had no effect: its number, itself and why."""

    def __init__(
        self, connections: Mapping[str, Connection], failed: Callable[[int, a.StartMember | a.StopWorkers | a.ClearHealth, str], None]
    ) -> None:
        self._connections = connections
        self._failed = failed
        self._waiting: deque[tuple[str, msgspec.Struct, Failed]] = deque()
        self._num_waiting: Counter[str] = Counter()
        self._next: asyncio.Handle | None = None
        self._encoded: tuple[wire.GenerationSpec, wire.JobSpec, msgspec.Raw, msgspec.Raw] | None = None

    def stop(self) -> None:
        """What has not gone out will not: the term is over."""
        self._waiting.clear()
        self._num_waiting.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def start(self, seq: int, action: a.StartMember, view: View) -> None:
        """Tell a member to start, soon. Orders to the same node that are given later go out later."""
        job = view.jobs.get(action.job)
        generation = job.generation if job is not None else None
        if job is None or generation is None or generation.number != action.generation:
            return
        spec, job_spec = self._shared(generation.spec, job.spec)
        order = _Start(
            epoch=view.epoch,
            seq=seq,
            spec=spec,
            job_spec=job_spec,
            workers=generation.members[action.node].workers,
            group_rank=action.group_rank,
            master_address=action.master_address,
        )
        self._queue(action.node, order, lambda: self._failed(seq, action, "not connected"))

    def order(self, seq: int, action: Order, view: View) -> None:
        """Send what an action means, at once where nothing waits for the same node."""
        epoch = view.epoch
        match action:
            case a.StopWorkers():
                stop = wire.StopGeneration(
                    epoch=epoch,
                    seq=seq,
                    job=action.job,
                    generation=action.generation,
                    grace_seconds=action.grace_seconds,
                    reason=action.reason,
                )
                self._send(action.node, stop, lambda: self._failed(seq, action, "not connected"))
            case a.AskSave():
                save = wire.RequestSave(
                    epoch=epoch, seq=seq, job=action.job, generation=action.generation, stop_after=action.stop_after, reason=action.reason
                )
                self._send_all(action.nodes, save)
            case a.TellRate():
                rate, tiers = action.failures_per_second, action.tier_rates
                told = wire.SetInterval(
                    epoch=epoch, seq=seq, job=action.job, generation=action.generation, failures_per_second=rate, tier_rates=tiers
                )
                self._send_all(action.nodes, told)
            case a.AskStacks():
                self._send_all(action.nodes, wire.CollectStacks(job=action.job, generation=action.generation))
            case a.AskReach() | a.AskAgain():
                self._ask_reach(action, view)
            case a.ReleaseNode():
                self._send_all((action.node,), wire.ReleaseNode(epoch=epoch, seq=seq, reason=action.reason))
            case a.ClearHealth():
                clear = wire.ClearHealth(epoch=epoch, seq=seq, by="operator")
                self._send(action.node, clear, lambda: self._failed(seq, action, "not connected"))
            case _:
                assert_never(action)

    def _ask_reach(self, action: a.AskReach | a.AskAgain, view: View) -> None:
        if isinstance(action, a.AskAgain):
            known = {action.node: view.nodes[action.node].peer_address}
            self._send_all(action.witnesses, wire.ProbePeers(job="", generation=0, peers=known))
            return
        for node, peers in action.peers.items():
            known = {peer: view.nodes[peer].peer_address for peer in peers if peer in view.nodes}
            self._send_all((node,), wire.ProbePeers(job=action.job, generation=action.generation, peers=known))

    def _shared(self, spec: wire.GenerationSpec, job_spec: wire.JobSpec) -> tuple[msgspec.Raw, msgspec.Raw]:
        known = self._encoded
        if known is None or known[0] is not spec or known[1] is not job_spec:
            known = self._encoded = (spec, job_spec, msgspec.Raw(msgspec.json.encode(spec)), msgspec.Raw(msgspec.json.encode(job_spec)))
        return known[2:]

    def _send_all(self, nodes: Sequence[str], message: msgspec.Struct) -> None:
        for node in nodes:
            self._send(node, message, lambda node=node: log.info("node=%s does not get %s: not connected", node, type(message).__name__))

    def _send(self, node: str, message: msgspec.Struct, failed: Failed) -> None:
        if self._num_waiting[node]:
            self._queue(node, message, failed)
        elif not self._out(node, message):
            failed()

    def _queue(self, node: str, message: msgspec.Struct, failed: Failed) -> None:
        self._waiting.append((node, message, failed))
        self._num_waiting[node] += 1
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._burst)

    def _burst(self) -> None:
        """Some of what waits; the rest when the loop has read what came meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _BURST_SECONDS
        while self._waiting:
            node, message, failed = self._waiting.popleft()
            self._num_waiting[node] -= 1
            if not self._num_waiting[node]:
                del self._num_waiting[node]
            if not self._out(node, message):
                failed()
            if loop.time() >= until:
                break
        self._next = loop.call_soon(self._burst) if self._waiting else None

    def _out(self, node: str, message: msgspec.Struct) -> bool:
        connection = self._connections.get(node)
        return connection is not None and connection.send(message)
