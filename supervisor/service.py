"""The supervisor process: composition root. Campaigns, leads, steps down, campaigns again; serves the API all the while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from regrow import security, wire
from regrow.clock import SystemClock
from regrow.errors import ConfigurationError, OperationalError
from regrow.store.base import Operation, Store, StoreError
from regrow.store.election import Leadership, campaign
from regrow.store.open import open_store
from regrow.supervisor import adoption, loading, orders, recent, upgrade
from regrow.supervisor.actuators.config import ActuatorConfig
from regrow.supervisor.actuators.group import Actuators
from regrow.supervisor.actuators.loop import Tenure
from regrow.supervisor.api import Routes
from regrow.supervisor.archive import Archive
from regrow.supervisor.auth import Guard, Identity, Tokens
from regrow.supervisor.beat_server import BeatServer, Connection
from regrow.supervisor.config import SupervisorConfig, parse_address
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import View
from regrow.supervisor.http_server import ApiServer
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys
from regrow.supervisor.metrics import Metrics
from regrow.supervisor.orders import Order
from regrow.supervisor.term import Term, raise_epoch

log = logging.getLogger("regrow.supervisor")

_METRICS_SECONDS = 0.25
_RETRY_SECONDS = 0.5
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  # compared, not bound


class Supervisor:
    """One process. Leads or stands by."""

    def __init__(
        self,
        config: SupervisorConfig,
        policy: Policy,
        *,
        actuators: ActuatorConfig | None = None,
        store: Store | None = None,
        on_serving: Callable[[str], None] = lambda _status: None,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        clock = SystemClock()
        self._anchor = clock.wall() - clock.monotonic()
        self._clock = clock
        self.config = config
        self._on_serving = on_serving
        self._on_leaving = on_leaving
        self.policy = policy
        self.name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.incarnation = os.urandom(8).hex()
        self.keys = Keys(config.cluster)
        self.metrics = Metrics(policy)
        self.actuators = Actuators(actuators or ActuatorConfig())
        self.term: Term | None = None
        self.journal = Journal(Path(config.state) / "journal.sqlite" if config.state else None)
        self._archive: Archive | None = None
        self.store: Store | None = store
        self._owns_store = store is None
        tls = _tls(config, clients_show=True)
        self.beats = BeatServer(self, tls=tls.listening if tls is not None else None, welcomes=self._leads)
        https = _tls(config, clients_show=False) if config.http_tls else None
        self.api = ApiServer(self._guarded(), tls=https.listening if https is not None else None)
        self._stop = asyncio.Event()
        self._leadership: Leadership | None = None
        self._metrics_at = 0.0
        self._raise_to = 0

    def now(self) -> float:
        """Seconds since 1970 by this process's monotonic clock: comparable within the process, readable by people."""
        return self._anchor + self._clock.monotonic()

    def stop(self) -> None:
        """Resign and end."""
        self._stop.set()
        self.metrics.stopping()
        if self.term is not None:
            self.term.end("stopped")

    async def run(self) -> None:
        """Until `stop`.

        Raises:
            ConfigurationError: an address is taken, the state folder cannot be used.
        """
        self._prepare_state()
        self.store = self.store or open_store(self.config.store)
        host, port = parse_address(self.config.beat, "--beat")
        await self.beats.start(host, port)
        try:
            await self.api.start(*parse_address(self.config.http, "--http"))
            self._announce()
            self._on_serving(f"supervisor {self.name}")
            await self._lead_again_and_again()
        finally:
            self._on_leaving()
            self._retract()
            self.journal.close()
            if self._archive is not None:
                self._archive.close()
            await self.beats.stop()
            await self.api.stop()
            if self._owns_store:
                await self.store.close()

    def _prepare_state(self) -> None:
        try:
            Path(self.config.state).mkdir(parents=True, exist_ok=True)
            self.journal.open()
            if self.config.archive:
                path = Path(self.config.state) / "journal.sqlite"
                self._archive = Archive(self.config.archive, path, cluster=self.config.cluster, supervisor=self.name)
                self.journal.archived = self._archive.wake
                self._archive.start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot be used: {error.strerror}", where=f"--state {self.config.state}", hint="give a folder that this user may write"
            ) from error

    def _guarded(self) -> Guard:
        tokens = Tokens(Path(self.config.tokens)) if self.config.tokens else None
        own = tuple(name for name in (self.config.advertise, socket.gethostname()) if name)
        return Guard(Routes(self).app(), tokens, self._audit, self._clock.monotonic, own_hosts=own)

    def _audit(self, who: Identity | None, host: str, method: str, path: str, status: int) -> None:
        """Every order of an operator, served or denied, is in the journal with who gave it."""
        name, role = (who.name, who.role) if who is not None else ("", "")
        text = f"{name or 'nobody'} ({role or 'denied'}, {host}) {method} {path[:200]}: {status}"
        data = {"by": name, "role": role, "host": host, "method": method, "path": path[:200], "status": status}
        epoch = self.term.view.epoch if self.term is not None else 0
        self.journal.write(epoch=epoch, at=self.now(), kind="operator", text=text, data=data)

    @property
    def beat_address(self) -> str:
        """host:port for agents."""
        return f"{self._advertised()}:{self.beats.port}"

    @property
    def http_address(self) -> str:
        """host:port of the API; with TLS its whole URL."""
        bound = parse_address(self.config.http, "--http")[0]
        host = self._advertised() if bound in _ANYWHERE else bound
        return f"{'https://' if self.config.http_tls else ''}{f'[{host}]' if ':' in host else host}:{self.api.port}"

    def _advertised(self) -> str:
        host = self.config.advertise or parse_address(self.config.beat, "--beat")[0]
        return socket.gethostname() if host in _ANYWHERE else host

    def _announce(self) -> None:
        """<state>/supervisor.json: where this process can be reached."""
        path = Path(self.config.state) / "supervisor.json"
        text = json.dumps({"http": self.http_address, "beat": self.beat_address, "pid": os.getpid(), "name": self.name})
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
        log.info("beat=%s http=%s state=%s", self.beat_address, self.http_address, self.config.state)

    def _retract(self) -> None:
        """An orderly end leaves no address behind; after a crash the file stays and its pid is dead."""
        path = Path(self.config.state) / "supervisor.json"
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
                path.unlink()

    # --- leading

    async def _lead_again_and_again(self) -> None:
        while not self._stop.is_set():
            leadership = await self._campaign()
            if leadership is None:
                return
            try:
                await self._lead(leadership)
            except StoreError as error:
                log.warning("the term ends: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                self.term = None
                self.metrics.leading(epoch=0, leads=False, store_up=not leadership.ended.is_set())
                with contextlib.suppress(StoreError):
                    await leadership.resign()

    async def _campaign(self) -> Leadership | None:
        assert self.store is not None
        record = self._record(0)
        work = asyncio.create_task(campaign(self.store, self.keys.leader, record, ttl=self.config.ttl))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
        if work.cancelled():
            return None
        leadership = work.result()
        if self._stop.is_set():
            await leadership.resign()
            return None
        return leadership

    def _record(self, epoch: int) -> bytes:
        return msgspec.json.encode(
            wire.LeaderRecord(
                supervisor=f"{self.name}/{self.incarnation}", epoch=epoch, beat_address=self.beat_address, http_address=self.http_address
            )
        )

    async def _lead(self, leadership: Leadership) -> None:
        """Take an epoch, load, publish, decide until the term ends."""
        assert self.store is not None
        await upgrade.admit(self.store, self.keys, leadership.comparison)
        epoch = await raise_epoch(self.store, self.keys, leadership.comparison, self._raise_to)
        loaded = await loading.load(self.store, self.keys, self.now())
        term = Term(
            config=self.config,
            policy=self.policy,
            store=self.store,
            keys=self.keys,
            journal=self.journal,
            comparison=leadership.comparison,
            epoch=epoch,
            name=self.name,
            now=self.now,
            on_turn=self._after_turn,
            raise_epoch=self._higher_epoch,
        )
        term.effects.generation_revisions = dict(loaded.generation_revisions)
        term.effects.recent.begin(loaded.told)
        recent.tell(self.journal, loaded.told)
        self.term = term
        if self._stop.is_set():  # it was told to stop while it took over
            term.end("stopped")
        watcher = asyncio.create_task(self._until_deposed(leadership, term))
        jobs = tuple(event for event in loaded.events if isinstance(event, e.JobLoaded))
        begin = tuple(event for event in loaded.events if not isinstance(event, e.JobLoaded)) if self.config.adopt else loaded.events
        running = asyncio.create_task(term.run(begin))
        rebuilding = asyncio.create_task(self._rebuild(term, jobs))
        self._begin_actuators(term, leadership, epoch)
        try:
            await leadership.publish(self._record(epoch))
            log.info("leading epoch=%d jobs=%d", epoch, len(jobs))
            await running
        finally:
            term.end("over")
            watcher.cancel()
            rebuilding.cancel()
            await asyncio.gather(watcher, running, rebuilding, self.actuators.end(), return_exceptions=True)
            await term.effects.stop(drain_seconds=2.0 if self._stop.is_set() and leadership.holds else 0.0)
            log.info("the term of epoch %d is over: %s", epoch, term.reason)

    def _begin_actuators(self, term: Term, leadership: Leadership, epoch: int) -> None:
        """They look at the view once agents had time to say what hardware they have."""
        assert self.store is not None

        def look() -> View | None:
            since = term.view.term_at
            return term.view if since is not None and self.now() >= since + self.policy.takeover_seconds else None

        self.actuators.begin(
            Tenure(
                store=self.store,
                keys=self.keys,
                journal=self.journal,
                comparison=leadership.comparison,
                epoch=epoch,
                now=self.now,
                look=look,
                holds=lambda: leadership.holds and not term.ended.is_set(),
            )
        )

    async def _rebuild(self, term: Term, jobs: tuple[e.JobLoaded, ...]) -> None:
        """Bring the store up to what agents run (only with --adopt) and to what is durable. A failure ends the term: the next
        one tries again."""
        assert self.store is not None
        try:
            if self.config.adopt:
                await adoption.adopt(term, self.store, self.keys, jobs, limit_seconds=self.policy.takeover_seconds)
            for job in jobs:
                await adoption.record_pending(term, self.store, self.keys, job)
        except (OperationalError, OSError) as error:
            log.warning("not rebuilt: %s", error)
            if self.config.adopt:
                term.end("the store was not rebuilt")

    async def _until_deposed(self, leadership: Leadership, term: Term) -> None:
        await leadership.ended.wait()
        term.end(f"deposed: {leadership.reason}")

    def _higher_epoch(self, seen: int) -> None:
        """An agent has seen a higher epoch: end this term and take one above."""
        self._raise_to = max(self._raise_to, seen)
        if self.term is not None:
            self.term.end(f"an agent has seen epoch {seen}")

    def _after_turn(self, term: Term, seconds: float, events: tuple[e.Event, ...]) -> None:
        self.metrics.turn(seconds)
        for event in events:
            if isinstance(event, e.StepsCompleted):
                self.metrics.step(event.job, event.step_seconds)
        now = self.now()
        if now - self._metrics_at >= _METRICS_SECONDS:
            self._metrics_at = now
            self.refresh_metrics(term)

    def refresh_metrics(self, term: Term | None = None) -> None:
        """Bring the metrics up to the view."""
        current = term or self.term
        if current is not None:
            self.metrics.leading(epoch=current.view.epoch, leads=current.ready, store_up=current.view.store_up)
            self.metrics.view(current.view, self.now(), self.actuators.counts())

    # --- agents

    def _leads(self) -> bool:
        return self.term is not None and self.term.leads

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Welcome | wire.Refused:
        """An agent wants in."""
        if self.term is None:
            return wire.Refused(reason="this supervisor does not lead now", leading=False)
        return self.term.greeted(hello, connection)

    def said(self, connection: Connection, message: Any) -> None:
        """A line of an agent."""
        if self.term is None:
            connection.close()
            return
        self.metrics.said(connection.node, message)
        self.term.said(connection, message)

    def closed(self, connection: Connection, reason: str) -> None:
        """A connection is gone."""
        if self.term is not None:
            self.term.closed(connection, reason)

    # --- operators

    async def submit(self, spec: wire.JobSpec) -> None:
        """Write a job and take it up. The same job again is fine; one that ended goes on.

        Raises:
            ConfigurationError: another job of this name runs.
            StoreError: the store did not take it.
        """
        from regrow.supervisor.submit import submit

        assert self.term is not None
        assert self.store is not None
        await submit(self.term, self.store, self.keys, spec, self.now())

    def post(self, event: e.Event) -> None:
        """A fact for the next turn."""
        assert self.term is not None
        self.term.post(event)

    async def give(self, operations: Sequence[Operation], order: Order) -> None:
        """An operator's order: the change of the store with its entry for the journal, then the fact.

        Raises:
            StoreError: the store did not take it, or this term is over.
        """
        assert self.term is not None
        assert self.store is not None
        await orders.give(self.term, self.store, self.keys, operations, order)


def _tls(config: SupervisorConfig, *, clients_show: bool) -> security.Tls | None:
    if not config.tls_certificate:
        return None
    files = security.Files(config.tls_certificate, config.tls_key, config.tls_client_ca)
    return security.Tls(files, "server", clients_show=clients_show)
