"""REST, server-sent events and /metrics, inside the supervisor's own loop. Bad input is a 4xx with a hint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from regrow import wire
from regrow.errors import ConfigurationError, OperationalError, RegrowError
from regrow.store.base import Delete, Put, Store
from regrow.supervisor import discovery, documents, openapi
from regrow.supervisor.core import events as e
from regrow.supervisor.core.view import JobView, View
from regrow.supervisor.effects import Cordon, Members
from regrow.supervisor.journal import Entry
from regrow.supervisor.readings import gpu_readings
from regrow.supervisor.web.feed import Feed
from regrow.supervisor.web.page import Page

if TYPE_CHECKING:
    from regrow.supervisor.service import Supervisor

log = logging.getLogger("regrow.supervisor.api")

JOB_COMMANDS = {"stop": "stop", "save-and-stop": "save-and-stop", "pause": "pause", "resume": "run", "abort": "abort"}
NODE_COMMANDS = ("cordon", "uncordon", "drain", "clear")
_MAX_BODY = 4 * 1024 * 1024
_PING_SECONDS = 10.0
_MAX_DIGITS = 18
Handler = Callable[[Request], Awaitable[Response]]


class NotLeadingError(OperationalError):
    """This supervisor stands by, or has no term yet."""


class NotFoundError(ConfigurationError):
    """No such job, node or rank."""


class ConflictError(ConfigurationError):
    """What is asked contradicts what is."""


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")


def _status_of(error: RegrowError) -> int:
    kinds: tuple[tuple[type[RegrowError], int], ...] = ((NotFoundError, 404), (ConflictError, 409), (ConfigurationError, 400))
    return next((status for kind, status in kinds if isinstance(error, kind)), 503)


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RegrowError as error:
            return _json({"error": error.document()}, _status_of(error))

    return guarded


class Routes:
    """Handlers."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._page = Page(Feed(supervisor.journal, self._look, supervisor.name))

    def app(self) -> Starlette:
        """The application."""
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/", self._page.index),
            ("GET", "/page/{name}", self._page.asset),
            ("GET", "/v1/page", self._page.follow),
            ("GET", "/healthz", self.healthz),
            ("GET", "/metrics", self.metrics),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/v1/prometheus/targets", self.targets),
            ("GET", "/v1/status", self.status),
            ("GET", "/v1/jobs", self.jobs),
            ("POST", "/v1/jobs", self.submit),
            ("GET", "/v1/jobs/{job}", self.job),
            ("GET", "/v1/jobs/{job}/where", self.where),
            ("POST", "/v1/jobs/{job}/{command}", self.command_job),
            ("GET", "/v1/nodes", self.nodes),
            ("GET", "/v1/nodes/{node}", self.node),
            ("POST", "/v1/nodes/{node}/{command}", self.command_node),
            ("POST", "/v1/automation/{state}", self.automation),
            ("GET", "/v1/actuators", self.actuators),
            ("GET", "/v1/events", self.events),
        ]
        return Starlette(
            routes=[Route(path, _guarded(handler), methods=[method]) for method, path, handler in table],
            exception_handlers={404: _no_route, 405: _no_route},
        )

    # --- what there is

    def _look(self) -> tuple[View | None, float]:
        term = self._supervisor.term
        ready = term is not None and term.ready and term.view.term_at is not None
        return (term.view if term is not None and ready else None), self._supervisor.now()

    def _view(self) -> View:
        term = self._supervisor.term
        if term is None or not term.ready or term.view.term_at is None:
            raise NotLeadingError(
                "this supervisor does not lead now", where=self._supervisor.name, hint="ask again in a moment, or ask the leader"
            )
        return term.view

    def _job(self, request: Request) -> tuple[View, JobView]:
        view = self._view()
        name = request.path_params["job"]
        if name not in view.jobs:
            known = ", ".join(sorted(view.jobs)) or "none"
            raise NotFoundError(f"there is no job {name!r}", where="supervisor", hint=f"known jobs: {known}")
        return view, view.jobs[name]

    async def healthz(self, _request: Request) -> Response:
        """Alive; `leading` says in which role."""
        term = self._supervisor.term
        return _json({"ok": True, "leading": term is not None and term.ready, "epoch": term.view.epoch if term else 0})

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text format."""
        self._supervisor.refresh_metrics()
        text = await asyncio.to_thread(self._supervisor.metrics.exposition)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        """What this API promises."""
        return _json(openapi.document())

    async def targets(self, _request: Request) -> Response:
        """HTTP service discovery for Prometheus."""
        supervisor = self._supervisor
        groups = await discovery.targets(self._store(), supervisor.keys, supervisor.config.cluster, own=supervisor.http_address)
        return _json(groups)

    async def status(self, _request: Request) -> Response:
        """The cluster."""
        view = self._view()
        return _json(documents.status(view, self._supervisor.now(), name=self._supervisor.name, leading=True))

    async def jobs(self, _request: Request) -> Response:
        """All jobs."""
        view = self._view()
        return _json({"jobs": [documents.job_line(job, self._supervisor.now()) for _, job in sorted(view.jobs.items())]})

    async def job(self, request: Request) -> Response:
        """One job."""
        view, job = self._job(request)
        return _json(documents.job_document(view, job, self._supervisor.now()))

    async def nodes(self, _request: Request) -> Response:
        """All nodes."""
        view = self._view()
        return _json({"nodes": [documents.node(view, node, self._supervisor.now()) for _, node in sorted(view.nodes.items())]})

    async def node(self, request: Request) -> Response:
        """One node; with readings=1 its agent is asked what the GPUs read now."""
        view = self._view()
        name = request.path_params["node"]
        if name not in view.nodes:
            raise NotFoundError(
                f"there is no node {name!r}", where="supervisor", hint=f"known nodes: {', '.join(sorted(view.nodes)) or 'none'}"
            )
        document = documents.node(view, view.nodes[name], self._supervisor.now())
        if request.query_params.get("readings") == "1":
            document["readings"] = await gpu_readings(self._store(), self._supervisor.keys, name)
        return _json(document)

    async def where(self, request: Request) -> Response:
        """Where a rank runs (or ran, in an earlier generation)."""
        _, job = self._job(request)
        rank = _number(request, "rank")
        generation = _number(request, "generation")
        current = job.generation.number if job.generation is not None else 0
        found = documents.where(job, rank)
        if generation is not None and generation != current:
            found = await self._earlier(job.spec.job, generation, rank)
        if not found:
            raise _nowhere(job, rank, current if generation is None else generation, current)
        return _json({"job": job.spec.job, "generation": generation or current, "ranks": found})

    async def _earlier(self, job: str, generation: int, rank: int | None) -> list[dict[str, Any]]:
        store, keys = self._store(), self._supervisor.keys
        found: list[dict[str, Any]] = []
        for item in await store.get_prefix(keys.members_of(job, generation)):
            for node, workers in msgspec.json.decode(item.value, type=Members).nodes.items():
                found += [
                    {"rank": w.rank, "node": node, "local_rank": w.local_rank, "device": w.device_uuid, "generation": generation}
                    for w in workers
                    if rank is None or w.rank == rank
                ]
        return sorted(found, key=lambda item: item["rank"])

    # --- orders

    def _store(self) -> Store:
        store = self._supervisor.store
        if store is None:
            raise NotLeadingError("the store is not open yet", where=self._supervisor.name)
        return store

    async def submit(self, request: Request) -> Response:
        """A job."""
        self._view()
        body = await request.body()
        if len(body) > _MAX_BODY:
            raise ConfigurationError("the specification is too long", where="POST /v1/jobs")
        try:
            spec = msgspec.json.decode(body, type=wire.JobSpec)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"this is not a job specification: {error}", where="POST /v1/jobs", hint="it needs at least job and argv"
            ) from error
        await self._supervisor.submit(spec)
        return _json({"job": spec.job, "submitted": True}, 201)

    async def command_job(self, request: Request) -> Response:
        """stop, save-and-stop, pause, resume, abort. Written to the store first: it holds over a supervisor restart."""
        _, job = self._job(request)
        asked = request.path_params["command"]
        if asked not in JOB_COMMANDS:
            raise NotFoundError(f"there is no command {asked!r}", where=f"job {job.spec.job}", hint=f"commands: {', '.join(JOB_COMMANDS)}")
        if job.outcome is not None:
            if asked == "resume":
                raise ConflictError(
                    f"job {job.spec.job!r} is {job.outcome.state}", where="resume", hint="submit it again: it goes on from its checkpoint"
                )
            return _json({"job": job.spec.job, "state": job.outcome.state, "changed": False})
        command = JOB_COMMANDS[asked]
        unchanged = job.command == command == "run" or (command == "pause" and job.paused)
        record = wire.CommandRecord(command=command, by=_who(request))  # type: ignore[arg-type]
        put = Put(self._supervisor.keys.job(job.spec.job, "command"), msgspec.json.encode(record))
        event = e.CommandGiven(at=self._supervisor.now(), job=job.spec.job, command=command, by=record.by)  # type: ignore[arg-type]
        await self._supervisor.give([put], event)  # also where nothing changes: the store may hold an order whose answer was lost
        if unchanged:
            return _json({"job": job.spec.job, "state": documents.job_line(job, self._supervisor.now())["state"], "changed": False})
        return _json({"job": job.spec.job, "command": command, "changed": True})

    async def command_node(self, request: Request) -> Response:
        """cordon, uncordon, drain, clear."""
        view = self._view()
        name, command = request.path_params["node"], request.path_params["command"]
        if command not in NODE_COMMANDS:
            raise NotFoundError(f"there is no command {command!r}", where=f"node {name}", hint=f"commands: {', '.join(NODE_COMMANDS)}")
        held = any(record.node == name for record in view.quarantine.values())
        if name not in view.nodes and name not in view.cordoned and not held:
            raise NotFoundError(
                f"there is no node {name!r}", where="supervisor", hint=f"known nodes: {', '.join(sorted(view.nodes)) or 'none'}"
            )
        key = self._supervisor.keys.cordon(name)
        order = e.NodeCommandGiven(at=self._supervisor.now(), node=name, command=command, by=_who(request))
        if command in ("cordon", "drain"):
            record = Cordon(node=name, drain=command == "drain", by=order.by)
            await self._supervisor.give([Put(key, msgspec.json.encode(record))], order)
        elif command == "uncordon":
            await self._supervisor.give([Delete(key)], order)
        else:
            self._supervisor.post(order)  # what it changes are decisions
        return _json({"node": name, "command": command})

    async def automation(self, request: Request) -> Response:
        """on or off: the one switch."""
        self._view()
        state = request.path_params["state"]
        if state not in ("on", "off"):
            raise NotFoundError(f"automation can be on or off, not {state!r}", where="supervisor")
        order = e.AutomationSwitched(at=self._supervisor.now(), on=state == "on", by=_who(request))
        await self._supervisor.give([Put(self._supervisor.keys.automation, state.encode())], order)
        return _json({"automation": state})

    async def actuators(self, _request: Request) -> Response:
        """What Slurm, Kubernetes or a program of the site was told, and what became of it."""
        self._view()
        return _json(self._supervisor.actuators.document())

    # --- events

    async def events(self, request: Request) -> Response:
        """The journal: what is in memory after an id, and with follow=1 what comes, as server-sent events."""
        after = _number(request, "after") or 0
        limit = _number(request, "limit")
        job = request.query_params.get("job", "")
        journal = self._supervisor.journal
        follow = request.query_params.get("follow", "0")
        if follow not in ("0", "1", ""):
            raise ConfigurationError(f"follow = {follow!r} is neither 0 nor 1", where=str(request.url.path))
        if follow != "1":
            return _json({"events": journal.since(after, job=job, limit=limit or 1_000)})
        without = frozenset(request.query_params.get("without", "").split(",")) - {""}
        return StreamingResponse(
            self._follow(after, job, limit or 20_000, without), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _follow(self, after: int, job: str, limit: int, without: frozenset[str]) -> AsyncIterator[bytes]:
        journal = self._supervisor.journal
        follower = journal.follow()
        try:
            last = after
            for entry in journal.since(after, job=job, limit=limit):
                last = entry.id
                if entry.kind not in without:
                    yield _sse(entry)
            yield b": here\n\n"
            while journal.follows(follower) or not follower.empty():
                try:
                    async with asyncio.timeout(_PING_SECONDS):
                        entry = await follower.get()
                except TimeoutError:
                    yield b": ping\n\n"
                    continue
                if entry is None:
                    return
                if entry.id > last and (not job or entry.job == job) and entry.kind not in without:
                    last = entry.id
                    yield _sse(entry)
        finally:
            journal.unfollow(follower)


def _nowhere(job: JobView, rank: int | None, generation: int, current: int) -> NotFoundError:
    where = f"job {job.spec.job}"
    if generation != current:
        who = "ranks are" if rank is None else f"rank {rank} is"
        hint = f"the current one is {current}, and the 20 before it are kept" if current else "it has had none yet"
        return NotFoundError(f"no {who} known of generation {generation}", where=where, hint=hint)
    if not current:
        return NotFoundError("no generation runs", where=where, hint=f"`regrow job show {job.spec.job}` says what it waits for")
    return NotFoundError(
        f"rank {rank} is not in generation {generation}", where=where, hint=f"its ranks are 0 to {len(documents.where(job, None)) - 1}"
    )


def _sse(entry: Entry) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (entry.id, entry.kind.encode(), msgspec.json.encode(entry))


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ConfigurationError(f"{name} = {text!r} is not a number", where=str(request.url.path))
    return int(text)


def _who(request: Request) -> str:
    return request.headers.get("x-regrow-user", request.client.host if request.client else "")[:64]


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    found = ConfigurationError(
        f"{request.method} {request.url.path} is not part of this API", where="supervisor", hint="see docs/operations.md"
    )
    return _json({"error": found.document()}, status)
