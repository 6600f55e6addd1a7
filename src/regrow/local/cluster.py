"""The cluster of `regrow run --local N` and `regrow demo`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Self

from regrow.errors import ConfigurationError, OperationalError
from regrow.local.api import SupervisorClient
from regrow.local.children import Child, Recipe
from regrow.processes import MARK, kill_marked, marked
from regrow.store.embedded import EmbeddedEtcd

MAX_SOCKET_PATH = 60
"""Longest state folder for which Unix sockets below it stay under the kernel's limit of 107 bytes."""


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """What a local cluster consists of."""

    root: Path
    """Folder of the run: etcd/, supervisor/, nodes/<node>/, checkpoints/."""
    nodes: int
    slots: int
    """Workers per node."""
    cluster: str = "local"
    fake_nvml: bool = False
    """Give every agent a fake NVML with `slots` GPUs, driven by nodes/<node>/nvml.json."""
    supervisor_flags: tuple[str, ...] = ()
    agent_flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def node_names(self) -> list[str]:
        """n0, n1, ..."""
        return [f"n{index}" for index in range(self.nodes)]


class LocalCluster:
    """Starts the parts, restarts those that die, and takes all with it when it ends, however it ends."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.root = plan.root.absolute()
        self.short_root = _short(self.root)
        self.children: dict[str, Child] = {}
        self.api = SupervisorClient(self.supervisor_address)
        self._keepers: list[asyncio.Task[None]] = []
        self._lifeline: tuple[int, int] | None = None
        self._lock: IO[str] | None = None
        self._store_url = ""
        self.etcd: EmbeddedEtcd | None = None

    # --- where things are

    def node_state(self, node: str) -> Path:
        """State folder of a node, by a path short enough for Unix sockets."""
        return self.short_root / "nodes" / node

    def nvml_state(self, node: str) -> Path:
        """State file of the node's fake NVML."""
        return self.root / "nodes" / node / "nvml.json"

    def supervisor_address(self) -> str | None:
        """http://host:port of the supervisor, when it has said so."""
        try:
            return "http://" + json.loads((self.root / "supervisor" / "supervisor.json").read_text(encoding="utf-8"))["http"]
        except (OSError, ValueError, KeyError):
            return None

    # --- life

    async def start(self) -> None:
        """Start everything; returns when the supervisor leads and answers.

        Raises:
            ConfigurationError: the folder is in use or not writable, etcd is missing.
            OperationalError: a part did not come up.
        """
        self._claim()
        for node in self.plan.node_names():
            leftovers = kill_marked(MARK, str(self.node_state(node)))
            if leftovers:
                raise OperationalError(f"processes of an earlier run cannot be killed: {leftovers}", where=f"node {node}")
        self._lifeline = os.pipe()
        self._store_url = await self._start_store()
        await self._start_child(self._supervisor_recipe())
        await asyncio.gather(*(self.start_node(node) for node in self.plan.node_names()))
        await self._until_leading()
        await self._until_joined()

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop agents (their workers with them), the supervisor, the store; then make sure that nothing is left."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        agents = [child for name, child in self.children.items() if name.startswith("agent ")]
        await asyncio.gather(*(agent.stop(grace_seconds) for agent in agents))
        if "supervisor" in self.children:
            await self.children["supervisor"].stop(grace_seconds)
        if self.etcd is not None:
            await self.etcd.stop(grace_seconds)
        await self.api.close()
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        loop = asyncio.get_running_loop()
        for node in self.plan.node_names():
            await loop.run_in_executor(None, kill_marked, MARK, str(self.node_state(node)))
        if self._lock is not None:
            if self.short_root != self.root:
                self.short_root.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(1.0)
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    # --- nodes

    async def start_node(self, node: str) -> None:
        """Start a node's agent (new incarnation, same state folder)."""
        name = f"agent {node}"
        if name in self.children:
            await self.children[name].start()
        else:
            await self._start_child(self._agent_recipe(node))

    async def kill_node(self, node: str) -> None:
        """SIGKILL the agent, the shim, the workers and the writer of a node, as when the host loses power."""
        agent = self.children[f"agent {node}"]
        agent.wanted = False
        agent.kill()
        loop = asyncio.get_running_loop()
        left = await loop.run_in_executor(None, kill_marked, MARK, str(self.node_state(node)))
        if left:
            raise OperationalError(f"processes {left} cannot be killed", where=f"node {node}")

    def node_pids(self, node: str) -> list[int]:
        """All live processes of a node."""
        return marked(MARK, str(self.node_state(node)))

    # --- parts

    def _claim(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / "lock").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"cannot be used as run folder: {error.strerror}", where=str(self.root), hint="give another one by --run-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(
                "is in use by another `regrow run`", where=str(self.root), hint="wait for it, stop it, or give another --job name"
            ) from error
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        if self.short_root != self.root:
            link_short(self.short_root, self.root)

    async def _start_child(self, recipe: Recipe) -> Child:
        assert self._lifeline is not None
        child = self.children[recipe.name] = Child(recipe, self._lifeline[0])
        await child.start()
        self._keepers.append(asyncio.create_task(child.keep()))
        return child

    def _environment(self, mark: Path) -> dict[str, str]:
        return {"PYTHONUNBUFFERED": "1", "REGROW_AGENT_PREFLIGHT_SECONDS": "0", MARK: str(mark), **dict(self.plan.env)}

    async def _start_store(self) -> str:
        self.etcd = EmbeddedEtcd(self.root / "etcd")
        await self.etcd.start()
        self._keepers.append(asyncio.create_task(self.etcd.supervise()))
        return self.etcd.url

    def _supervisor_recipe(self) -> Recipe:
        state = self.root / "supervisor"
        with contextlib.suppress(FileNotFoundError):
            (state / "supervisor.json").unlink()
        argv = (
            *(sys.executable, "-m", "regrow", "supervisor", "--cluster", self.plan.cluster, "--store", self._store_url),
            *("--state", str(state), "--beat", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *self.plan.supervisor_flags,
        )
        return Recipe("supervisor", argv, self.root / "supervisor.log", self._environment(state))

    def _agent_recipe(self, node: str) -> Recipe:
        state = self.node_state(node)
        argv = (
            *(sys.executable, "-m", "regrow", "agent", "--node", node, "--cluster", self.plan.cluster, "--store", self._store_url),
            *("--state", str(state), "--slots", str(self.plan.slots), "--address", "127.0.0.1"),
            *(("--fake-nvml", str(self.nvml_state(node))) if self.plan.fake_nvml else ()),
            *self.plan.agent_flags,
        )
        return Recipe(f"agent {node}", argv, self.root / "nodes" / f"{node}.log", self._environment(state))

    async def _until_leading(self, limit_seconds: float = 60.0) -> None:
        deadline = time.monotonic() + limit_seconds
        while self.supervisor_address() is None:
            self._complain_about_deaths()
            if time.monotonic() > deadline:
                raise OperationalError(
                    "the supervisor did not start in time", where=str(self.root / "supervisor.log"), hint="read this log"
                )
            await asyncio.sleep(0.05)
        await self.api.get("/v1/status")

    async def _until_joined(self, limit_seconds: float = 60.0) -> None:
        """All agents of this machine are connected: a job that starts now gets all of them."""
        deadline = time.monotonic() + limit_seconds
        wanted = set(self.plan.node_names())
        while wanted - {node["node"] for node in (await self.api.get("/v1/nodes"))["nodes"] if node.get("connected")}:
            self._complain_about_deaths()
            if time.monotonic() > deadline:
                raise OperationalError("an agent did not connect in time", where=str(self.root / "nodes"), hint="read the logs there")
            await asyncio.sleep(0.05)

    def _complain_about_deaths(self) -> None:
        for name, child in self.children.items():
            if child.num_starts > 3:
                tail = _tail(child.recipe.log)
                raise OperationalError(
                    f"{name} keeps ending with status {child.exit_code}: {tail}", where=str(child.recipe.log), hint="read this log"
                )


def _tail(path: Path, limit: int = 600) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-limit:].strip()
    except OSError:
        return ""


def _short(root: Path) -> Path:
    """A path of the same folder that leaves room for socket names: a symlink in the temp folder when needed."""
    if len(str(root)) <= MAX_SOCKET_PATH:
        return root
    return Path(tempfile.gettempdir()) / f"regrow-{os.getuid()}-{hashlib.sha256(str(root).encode()).hexdigest()[:10]}"


def link_short(short: Path, root: Path) -> None:
    """Make the short path; take away those of run folders that are gone (a killed launcher could not)."""
    for other in short.parent.glob(f"regrow-{os.getuid()}-*"):
        if other.is_symlink() and not other.exists():
            other.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        short.symlink_to(root)
    if short.resolve() != root.resolve():
        short.unlink()
        short.symlink_to(root)
