"""How each kind of fault is done to a local cluster, and undone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.chaos import dcgm, namespace
from regrow.chaos.cluster import ChaosCluster
from regrow.chaos.plan import Fault
from regrow.chaos.surroundings import Surroundings
from regrow.errors import OperationalError

_INJECT_SECONDS = 10.0

_ORDERS: dict[str, Callable[[Fault], dict[str, Any]]] = {
    "worker_hang": lambda fault: {"kind": "hang", "phase": fault.phase},
    "worker_raise": lambda _: {"kind": "raise"},
    "worker_slow": lambda fault: {"kind": "slow", "ratio": fault.ratio, "steps": fault.steps},
    "worker_nan": lambda _: {"kind": "nan"},
    "sick_gemm": lambda fault: {"kind": "gemm", "ratio": fault.ratio, "bit": fault.bit, "steps": fault.steps},
    "flip_bit": lambda fault: {"kind": "flip_bit", "where": fault.where, "when": fault.when, "bit": fault.bit},
}
_ADMIN = {
    "worker_kill": "kill_worker",
    "checkpoint_flip": "kill_worker",
    "worker_stop": "stop_worker",
    "agent_kill": "kill_agent",
    "shim_kill": "kill_shim",
    "writer_kill": "kill_writer",
}
_STORAGE = {"disk_full": "shard.write:enospc:0", "disk_eio": "shard.fsync:eio:0", "disk_slow": "shard.write:slow={}:0"}
"""In the words of `ckpt.faults`: every write, sync."""


class Injector:
    """Of one run. What lasts is undone by `heal`."""

    def __init__(self, cluster: ChaosCluster, surroundings: Surroundings) -> None:
        self._cluster = cluster
        self.surroundings = surroundings
        self._programs: list[subprocess.Popen[bytes]] = []
        self._kept: list[asyncio.Task[None]] = []

    def heal(self) -> None:
        """Undo what lasts. Safe to call twice."""
        self.surroundings.heal()
        for weather in self._cluster.weather.values():
            weather.set()
        self._cluster.break_storage("")
        for node in self._cluster.plan.node_names():
            self._cluster.clock(node).shift(0.0)
        namespace.heal()
        for task in self._kept:
            task.cancel()
        self._kept.clear()
        for program in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        self._programs.clear()

    async def inject(self, fault: Fault, node: str, rank: int) -> None:
        """Do it.

        Raises:
            OperationalError: it could not be done, with the reason.
        """
        if fault.kind in _ORDERS:
            await self._ask_agent(node, "worker", rank, order=_ORDERS[fault.kind](fault))
        elif fault.kind in _ADMIN:
            await self._ask_agent(node, _ADMIN[fault.kind], rank, signal=fault.signal)
        elif fault.kind.startswith("nvml_"):
            self._hurt_gpu(fault, FakeNvml(self._cluster.nvml_state(node)))
        elif fault.kind in ("kernel_xid", "kernel_noise"):
            device = FakeNvml(self._cluster.nvml_state(node)).read()["devices"][0]
            self.surroundings.say_in_kernel_log(fault.kind, fault.xid, str(device["pci_bus_id"]))
        elif fault.kind.startswith("net_") and not fault.truth.needs_namespace:
            self._weather(fault, node)
        elif fault.kind.startswith("disk_"):
            self._cluster.break_storage(_STORAGE[fault.kind].format(fault.delay_seconds))
        elif fault.kind == "clock_shift":
            self._cluster.clock(node).shift(fault.shift_seconds)
        elif fault.kind == "dcgm_inject":
            await dcgm.inject(fault.gpu, fault.field, fault.value)
            self._kept.append(asyncio.create_task(dcgm.keep(fault.gpu, fault.field, fault.value), name="regrow-dcgm"))
        elif fault.kind == "command":
            await self._run(fault, node, rank)
        elif fault.truth.needs_namespace:
            await self._break_loopback(fault, node, rank)
        else:
            await self._others()[fault.kind](node)

    def _weather(self, fault: Fault, node: str) -> None:
        weather = self._cluster.weather[node]
        if fault.kind == "net_cut":
            weather.set(cut=True)
        elif fault.kind == "net_one_way":
            weather.set(silent=frozenset(("up",)))
        elif fault.kind == "net_delay":
            weather.set(delay_seconds=fault.delay_seconds)
        else:
            weather.set(rate=fault.rate)

    async def _break_loopback(self, fault: Fault, node: str, rank: int) -> None:
        if fault.kind == "net_loss":
            namespace.lose(fault.ratio)
        elif fault.kind == "net_rate":
            namespace.limit(fault.rate)
        else:
            namespace.cut_off((await self._pids(node, rank))["pid"])

    async def _run(self, fault: Fault, node: str, rank: int) -> None:
        """A program of the plan's author, in a process group of its own."""
        places = {name: str(pid) for name, pid in (await self._pids(node, rank)).items()}
        root = self._cluster.root
        places["rank"] = str(rank)
        places |= {"state": str(self._cluster.node_state(node)), "root": str(root), "checkpoints": str(root / "checkpoints")}
        places["agent"] = str(self._cluster.children[f"agent {node}"].pid or 0)
        try:
            argv = [word.format(**places) for word in fault.argv]
            program = subprocess.Popen(  # noqa: ASYNC220 - nobody waits for it here
                argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except (OSError, KeyError, IndexError, ValueError) as error:
            raise OperationalError(f"cannot run {fault.argv}: {error}", where="kind command", hint="docs/chaos.md has the words") from error
        self._programs.append(program)

    async def _pids(self, node: str, rank: int) -> dict[str, int]:
        told = await self._ask_agent(node, "targets", rank)
        return {name: int(told.get(name, 0)) for name in ("pid", "shim", "writer")}

    def _others(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        return {
            "node_kill": self._cluster.kill_node,
            "preempt": self._preempt,
            "agent_pause": self._pause_agent,
            "supervisor_pause": self._pause_supervisor,
            "etcd_pause": self._pause_etcd,
            "storage_gone": self._hide_storage,
            "supervisor_kill": self._kill_supervisor,
            "etcd_kill": self._kill_etcd,
        }

    def _hurt_gpu(self, fault: Fault, fake: FakeNvml) -> None:
        if fault.kind in ("nvml_xid", "nvml_noise"):
            fake.set_xid(0, fault.xid)
        elif fault.kind == "nvml_lost":
            fake.lose(0, xid=None)
        elif fault.kind == "nvml_ecc":
            fake.set_device(0, ecc_uncorrected_volatile=1)
        elif fault.kind == "nvml_recovery":
            fake.set_device(0, recovery_action=fault.value)
        else:
            fake.hang()

    async def _preempt(self, node: str) -> None:
        agent = self._cluster.children[f"agent {node}"]
        agent.wanted = False
        if agent.pid is not None:
            os.kill(agent.pid, signal.SIGTERM)

    async def _kill_supervisor(self, _node: str) -> None:
        self._cluster.children["supervisor"].kill()

    async def _kill_etcd(self, _node: str) -> None:
        assert self._cluster.etcd is not None
        self._cluster.etcd.send_signal(signal.SIGKILL)

    async def _pause_agent(self, node: str) -> None:
        self._pause(self._cluster.children[f"agent {node}"].pid)

    async def _pause_supervisor(self, _node: str) -> None:
        self._pause(self._cluster.children["supervisor"].pid)

    async def _pause_etcd(self, _node: str) -> None:
        assert self._cluster.etcd is not None
        self._pause(self._cluster.etcd.pid)

    def _pause(self, pid: int | None) -> None:
        if pid is None:
            raise OperationalError("it does not run", where="chaos")
        self.surroundings.pause(pid)

    async def _hide_storage(self, _node: str) -> None:
        self.surroundings.hide_storage()

    async def undo(self, fault: Fault, node: str) -> None:
        """Nodes come back so that the next fault finds a cluster; condemned GPUs stay condemned."""
        if fault.kind == "node_kill":
            await asyncio.sleep(fault.back_after)
            await self._cluster.start_node(node)
        elif fault.kind == "preempt":
            await self._cluster.start_node(node)
        elif fault.kind == "nvml_hang":
            FakeNvml(self._cluster.nvml_state(node)).resume()

    async def _ask_agent(self, node: str, kind: str, rank: int, **more: Any) -> dict[str, Any]:
        line = json.dumps({"type": "inject", "kind": kind, "rank": rank, **more}).encode() + b"\n"
        try:
            async with asyncio.timeout(_INJECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._cluster.node_state(node) / "agent.sock"))
                writer.write(line)
                await writer.drain()
                answer = await reader.readline()
                writer.close()
        except (OSError, TimeoutError) as error:
            raise OperationalError(f"the agent does not answer: {error}", where=f"node {node}") from error
        told: dict[str, Any] = json.loads(answer or b"{}")
        if kind != "kill_agent" and not told.get("done"):
            raise OperationalError(f"not injected: {answer.decode().strip()}", where=f"node {node}")
        return told
