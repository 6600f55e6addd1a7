"""The faults of `regrow demo`, in order, each with its ground truth: 8 - 6 - 8 - 6 - 4 ranks, then a hang."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import msgspec

from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.agent.progress import Progress, read_progress
from regrow.errors import OperationalError
from regrow.ids import MeshShape
from regrow.local.cluster import LocalCluster
from regrow.local.launch import Follower
from regrow.local.live import LiveView

FAULTS = ("node", "sdc", "gpu", "hang")
"""In the order in which they are injected."""

LIMIT_SECONDS = 240.0
"""Deadline of each wait: generous, so that a loaded machine is not called a failure."""


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """Ground truth of one fault."""

    kind: str
    node: str
    rank: int = -1
    step: int = 0
    """Completed step at the time of injection."""
    incident: str = ""
    """Id of the incident that the supervisor opened for it."""
    mesh_before: str = ""
    mesh_after: str = ""
    recovered_seconds: float = 0.0
    grown_mesh: str = ""
    grow_pause_seconds: float = 0.0


class Scenario:
    """Injects faults into a running cluster and waits until each is recovered from."""

    def __init__(self, cluster: LocalCluster, follower: Follower, view: LiveView, *, job: str, seed: int) -> None:
        self.injected: list[Injected] = []
        self._cluster = cluster
        self._follower = follower
        self._view = view
        self._job = job
        self._random = random.Random(seed)

    async def run(self, faults: tuple[str, ...]) -> None:
        """All of them, in order.

        Raises:
            OperationalError: a fault was not detected or not recovered from in time.
        """
        steps = {"node": self._lose_node, "sdc": self._flip_bit, "gpu": self._lose_gpu, "hang": self._stop_worker}
        for fault in FAULTS:
            if fault in faults:
                await self._settled()
                self.injected.append(await steps[fault]())

    # --- the faults

    async def _lose_node(self) -> Injected:
        node = self._random.choice(self._members())
        mesh = self._mesh()
        known = self._incident_ids()
        await self._in_mid_step(node)
        step = self._step()
        self._view.note(f"fault: killing node {node} (agent, shim, workers) in the middle of step {step + 1}", "bold red")
        await self._cluster.kill_node(node)
        done = await self._recovered(known, f"the recovery from the loss of node {node}")
        after = self._mesh()
        self._view.note(f"node {node} returns", "bold")
        await self._cluster.start_node(node)
        workers = MeshShape.parse(mesh).world_size
        before = time.monotonic()
        await self._follower.until(
            lambda document: _world(document) == workers and (document.get("step") or 0) > step + 1 and document.get("state") == "running",
            f"the mesh of {workers} workers again",
            LIMIT_SECONDS,
        )
        return self._truth("node", node, done, step, mesh, after, grown_mesh=self._mesh(), grow_pause_seconds=time.monotonic() - before)

    async def _flip_bit(self) -> Injected:
        node = self._random.choice(self._members())
        rank = self._random.choice(self._ranks(node))
        mesh, known, step = self._mesh(), self._incident_ids(), self._step()
        self._view.note(f"fault: flipping one bit in the optimizer state of rank {rank} on {node}", "bold red")
        await self._inject(node, "worker", rank, {"kind": "flip_bit", "where": "optimizer", "when": "rest", "bit": 22})
        done = await self._recovered(known, "the recovery from the flipped bit")
        return self._truth("sdc", node, done, step, mesh, self._mesh(), rank=rank)

    async def _lose_gpu(self) -> Injected:
        node = self._random.choice(self._members())
        mesh, known, step = self._mesh(), self._incident_ids(), self._step()
        self._view.note(f"fault: NVML of {node} reports XID 79 (GPU has fallen off the bus)", "bold red")
        FakeNvml(self._cluster.nvml_state(node)).set_xid(0, 79)
        done = await self._recovered(known, "the recovery from XID 79")
        return self._truth("gpu", node, done, step, mesh, self._mesh())

    async def _stop_worker(self) -> Injected:
        node = self._random.choice(self._members())
        rank = self._random.choice(self._ranks(node))
        mesh, known, step = self._mesh(), self._incident_ids(), self._step()
        self._view.note(f"fault: stopping the worker of rank {rank} on {node} (SIGSTOP)", "bold red")
        await self._inject(node, "stop_worker", rank)
        done = await self._recovered(known, "the recovery from the hang")
        return self._truth("hang", node, done, step, mesh, self._mesh(), rank=rank)

    # --- waiting

    async def _settled(self) -> None:
        """Some steps into a generation, with a committed checkpoint and nothing open."""
        document = self._follower.document
        generation, step = document.get("generation"), document.get("step") or 0

        def ready(now: dict[str, Any]) -> bool:
            advanced = (now.get("step") or 0) >= step + 2 and now.get("generation") == generation
            saved = (now.get("checkpoint") or {}).get("step") is not None
            return now.get("state") == "running" and saved and (advanced or now.get("generation") != generation) and not _open(now)

        await self._follower.until(ready, "a running job with a committed checkpoint", LIMIT_SECONDS)

    async def _recovered(self, known: set[str], what: str) -> dict[str, Any]:
        """The new incident, once it is recovered from."""

        def fresh(document: dict[str, Any]) -> list[dict[str, Any]]:
            return [incident for incident in document.get("incidents", []) if incident["id"] not in known and incident.get("recovered")]

        document = await self._follower.until(lambda now: bool(fresh(now)) and not _open(now), what, LIMIT_SECONDS)
        return fresh(document)[0]

    async def _in_mid_step(self, node: str) -> None:
        """Until a worker of the node has begun a step that it has not applied."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(word.phase == "step" and word.started_step > word.applied_step for word in self._progress(node)):
            if time.monotonic() > deadline:
                raise OperationalError("no worker was seen inside a step", where=f"node {node}")
            await asyncio.sleep(0.01)

    # --- what is there

    def _progress(self, node: str) -> list[Progress]:
        generation = self._follower.document.get("generation")
        path = self._cluster.node_state(node) / "jobs" / self._job / f"g{generation}" / "progress"
        return read_progress(path) if path.exists() else []

    def _members(self) -> list[str]:
        return sorted(node["node"] for node in self._follower.document.get("nodes", []) if node.get("ranks"))

    def _ranks(self, node: str) -> list[int]:
        return next(list(entry["ranks"]) for entry in self._follower.document["nodes"] if entry["node"] == node)

    def _mesh(self) -> str:
        return str(self._follower.document.get("mesh"))

    def _step(self) -> int:
        return int(self._follower.document.get("step") or 0)

    def _incident_ids(self) -> set[str]:
        return {incident["id"] for incident in self._follower.document.get("incidents", [])}

    def _truth(self, kind: str, node: str, incident: dict[str, Any], step: int, before: str, after: str, **more: Any) -> Injected:
        return Injected(
            kind=kind,
            node=node,
            step=step,
            incident=incident["id"],
            mesh_before=before,
            mesh_after=after,
            recovered_seconds=float(incident.get("seconds") or 0.0),
            **more,
        )

    async def _inject(self, node: str, kind: str, rank: int, order: dict[str, Any] | None = None) -> None:
        """Through the agent's local admin socket."""
        reader, writer = await asyncio.open_unix_connection(str(self._cluster.node_state(node) / "agent.sock"))
        try:
            writer.write(json.dumps({"type": "inject", "kind": kind, "rank": rank, "order": order or {}}).encode() + b"\n")
            await writer.drain()
            answer = await asyncio.wait_for(reader.readline(), 10.0)
            if not json.loads(answer).get("done"):
                raise OperationalError(f"the agent did not inject the fault: {answer.decode()}", where=f"node {node}")
        finally:
            writer.close()
            await writer.wait_closed()


def _open(document: dict[str, Any]) -> bool:
    return any(not incident.get("recovered") and not incident.get("closed") for incident in document.get("incidents", []))


def _world(document: dict[str, Any]) -> int:
    mesh = document.get("mesh")
    return MeshShape.parse(str(mesh)).world_size if mesh else 0
