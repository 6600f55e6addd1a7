"""The agent's part in checkpoints: writer -> this agent -> committing agent -> record and store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from regrow import wire
from regrow.agent.buddies import Buddies
from regrow.agent.cleaning import Cleaner
from regrow.agent.commits import Committer
from regrow.agent.config import AgentSettings
from regrow.agent.layout import NodePaths
from regrow.agent.mirror import Mirror
from regrow.agent.peer import PairHandler, PeerClient, PeerServer, Report, Settled
from regrow.agent.registry import Keys
from regrow.agent.writerlink import WriterLink
from regrow.ckpt.manifest import Record
from regrow.errors import OperationalError
from regrow.store.base import Store

_log = logging.getLogger("regrow.agent.checkpoints")

_FIND_SECONDS = 3.0
MAX_EARLY = 256
"""Reports kept of generations that have not begun here."""


class Checkpoints:
    """Routes reports of durable shards to the committing agent of their generation, and is that agent when it is named."""

    def __init__(
        self,
        settings: AgentSettings,
        paths: NodePaths,
        store: Store,
        keys: Keys,
        *,
        report: Callable[[wire.CheckpointChanged], None],
        pair: PairHandler | None = None,
    ) -> None:
        self._node = settings.node
        self._store = store
        self._keys = keys
        self._report = report
        self._server = PeerServer(settings.address, settings.peer_port, self._from_peer, pair=pair, tls=settings.tls("server"))
        self._tls = settings.tls("client")
        self.buddies = Buddies(settings, store, keys, send=self._to_writer)
        self._link = WriterLink(
            paths.writer_socket,
            settings.state,
            settings.node,
            self._from_writer,
            on_connected=self.buddies.connected,
            on_other=self.buddies.heard,
        )
        self.mirror = Mirror()
        self._spec: wire.GenerationSpec | None = None
        self._client: PeerClient | None = None
        self._committer: Committer | None = None
        self._work: asyncio.Task[None] | None = None
        self._early: list[Report] = []
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def peer_address(self) -> str:
        """host:port for reports of other nodes."""
        return self._server.address

    @property
    def copies_address(self) -> str:
        """host:port where writers of other nodes reach this node's; empty: not at all."""
        port = self.buddies.port
        host, _, _ = self._server.address.rpartition(":")
        return f"{host}:{port}" if port else ""

    @property
    def writer_pid(self) -> int:
        """Pid of the checkpoint writer; 0: none."""
        return self._link.pid

    def _to_writer(self, message: msgspec.Struct) -> None:
        self._link.send(message)

    async def start(self, *, preferred_port: int = 0) -> None:
        """Bind the peer port; a restarted agent takes the one that its peers know."""
        await self._server.start(preferred_port=preferred_port)

    async def run(self) -> None:
        """Keep a writer running until cancelled."""
        await self._link.run()

    async def close(self, *, stop_writer: bool) -> None:
        """End this agent's part; with `stop_writer` the writer finishes what it writes, then ends."""
        if stop_writer:
            self._link.stop()
            await self._link.reap(6.0)
        await self.buddies.close()
        await self.mirror.close()
        await self._end_generation(self._client, self._work)
        await self._server.close()

    def stop_writer(self) -> None:
        """Tell the writer to end."""
        self._link.stop()

    def begin(self, spec: wire.GenerationSpec, policy: wire.CheckpointPolicy) -> None:
        """A generation starts here, or is adopted: reports go where its record says."""
        if self._spec is not None and (self._spec.job, self._spec.generation) == (spec.job, spec.generation):
            return
        previous = asyncio.create_task(self._end_generation(self._client, self._work))
        self._ending.add(previous)
        previous.add_done_callback(self._ending.discard)
        self._spec, self._client, self._committer, self._work = spec, None, None, None
        self.buddies.begin(spec, policy)
        if spec.committing_node == self._node:
            cleaner = Cleaner(spec, policy, self._store, self._keys)
            self.mirror.begin(policy)

            async def after_commit(record: Record, directory: str) -> None:
                self.mirror.committed()
                await cleaner.clean(record, directory)

            self._committer = Committer(spec, self._store, self._keys, report=self._report, settle=self._settle, after_commit=after_commit)
            self._work = asyncio.create_task(self._commit(self._committer), name="regrow-committer")
        elif spec.commit_address:
            self._client = PeerClient(spec.commit_address, self._settled, find=lambda: self._find(spec.committing_node), tls=self._tls)
        early, self._early = self._early, []
        for report in early:
            self._from_writer(report)

    async def _find(self, node: str) -> str:
        """Where a node's peer port is by its record in the store; empty when that cannot be told."""
        try:
            item = await self._store.get(self._keys.node(node), timeout=_FIND_SECONDS)
            return msgspec.json.decode(item.value, type=wire.NodeRecord).peer_address if item is not None else ""
        except (OperationalError, msgspec.DecodeError):
            return ""

    async def _commit(self, committer: Committer) -> None:
        try:
            await committer.remember_fence()
            await committer.run()
        except Exception:
            _log.exception("committing for generation %d ended: this is a bug", committer.spec.generation)
            raise

    async def _end_generation(self, client: PeerClient | None, work: asyncio.Task[None] | None) -> None:
        """End what an earlier generation left. Its parts are given: by the time this runs, ours are those of the next."""
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if client is not None:
            await client.close()

    # --- the way of a report -------------------------------------------------------------------------------------

    def _from_writer(self, report: Report) -> None:
        spec = self._spec
        if spec is None or (report.job == spec.job and report.generation > spec.generation):
            self._keep_early(report)
            return
        if (report.job, report.generation) != (spec.job, spec.generation):
            _log.info("report of step %d of generation %d is too late", report.step, report.generation)
            self._link.acknowledge(report.job, report.generation, report.step)
            return
        if self._committer is not None:
            settled = self._committer.add(report)
            if settled is not None:
                self._settled(settled)
        elif self._client is not None:
            self._client.report(report)
        else:
            _log.warning("generation %d names no committing agent: step %d stays uncommitted", spec.generation, report.step)

    def _keep_early(self, report: Report) -> None:
        """It was faster than the start or adoption of its generation here."""
        self._early = [*self._early, report][-MAX_EARLY:]

    async def _from_peer(self, report: Report) -> Settled | None:
        committer = self._committer
        if committer is None or (committer.spec.job, committer.spec.generation) != (report.job, report.generation):
            newer = self._spec is not None and self._spec.job == report.job and self._spec.generation > report.generation
            if not newer:
                self._keep_early(report)
                return None
            return Settled(
                job=report.job, generation=report.generation, step=report.step, outcome="refused", reason="a later generation has started"
            )
        return committer.add(report)

    def _settle(self, settled: Settled) -> None:
        """Our committer knows the fate of a step."""
        self._server.settle(settled)
        self._settled(settled)

    def _settled(self, settled: Settled) -> None:
        self._link.acknowledge(settled.job, settled.generation, settled.step)
