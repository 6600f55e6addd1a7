"""`torchrun --rdzv-backend=regrow`: membership of an unmodified torchrun launch from a running Regrow.

torchrun finds this by the entry point group `torchrun.handlers`. Its own agents start and restart the workers; who is in a round,
whose node is refused and which round counts comes from the store that Regrow's supervisor leads.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from regrow.errors import ConfigurationError, OperationalError
from regrow.integrations.membership import ClosedError, LateError, Membership, RefusedError, Settings
from regrow.integrations.rounds import Round
from regrow.store.base import Store
from regrow.store.open import open_store

_T = TypeVar("_T")

_OPTIONS = ("cluster", "node", "ttl", "settle", "join_timeout", "closed", "timeout", "rank")
"""Keys of --rdzv-conf; torchrun itself adds `timeout` and `rank`, which have no meaning here."""
_CONNECT_SECONDS = 30.0
_LEAVE_SECONDS = 10.0


def store_url(endpoint: str) -> str:
    """The store that --rdzv-endpoint names: a URL, or host:port of etcd.

    Raises:
        ConfigurationError: nothing is given, or it is the address of a supervisor.
    """
    if not endpoint:
        raise ConfigurationError("no store is given", where="--rdzv-endpoint", hint="give etcd://HOST:2379, the supervisor's --store")
    if endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{endpoint} is a web address; a supervisor does not hand out its store",
            where="--rdzv-endpoint",
            hint="give the supervisor's own --store, such as etcd://HOST:2379",
        )
    url = endpoint if "://" in endpoint else f"etcd://{endpoint}"
    if url.startswith("memory://"):
        raise ConfigurationError("a store in memory is not shared between nodes", where="--rdzv-endpoint", hint="give etcd://HOST:2379")
    return url


def settings_of(parameters: RendezvousParameters) -> Settings:
    """Settings from torchrun's flags and --rdzv-conf.

    Raises:
        ConfigurationError: an unknown key or a value that cannot be used.
    """
    for name in parameters.config:
        if name not in _OPTIONS:
            raise ConfigurationError(f"unknown key {name!r}", where="--rdzv-conf", hint=f"known: {', '.join(_OPTIONS[:-2])}")
    found = Settings(
        cluster=str(parameters.get("cluster", "local")),
        run=parameters.run_id,
        node=str(parameters.get("node") or socket.gethostname().split(".")[0].lower()),
        least=parameters.min_nodes,
        most=parameters.max_nodes,
    )
    fields = {"ttl": "ttl_seconds", "settle": "settle_seconds", "join_timeout": "join_seconds", "closed": "closed_seconds"}
    given = {field: _seconds(parameters, key) for key, field in fields.items() if parameters.get(key) is not None}
    return dataclasses.replace(found, **given)


def _seconds(parameters: RendezvousParameters, key: str) -> float:
    text = str(parameters.get(key))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{key}={text} is not a number of seconds above 0", where="--rdzv-conf", hint=f"write it like {key}=10")
    return value


class RegrowRendezvous(RendezvousHandler):
    """torchrun's side. It calls from its one thread; the store's client lives in an event loop of its own thread."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._settings = settings_of(parameters)
        self._url = store_url(parameters.endpoint)
        self._address = parameters.local_addr or ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._membership: Membership | None = None
        self._served: TCPStore | None = None
        self._refused = False

    def get_backend(self) -> str:
        """The name on the command line."""
        return "regrow"

    def get_run_id(self) -> str:
        """--rdzv-id."""
        return self._settings.run

    @property
    def use_agent_store(self) -> bool:
        """False: each round's workers make a store of their own, so that none of them reads an address of an earlier round."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round with this process in it.

        Raises:
            RendezvousClosedError: the launch is over.
            RendezvousConnectionError: the store does not answer, or no supervisor leads.
            RendezvousTimeoutError: too few nodes came.
            RendezvousError: the node is cordoned, drained or quarantined.
        """
        try:
            membership = self._started()
            while True:
                found = self._call(membership.join(self._serve))
                store = self._connect(found)
                if store is not None:
                    break
        except RefusedError as error:
            self._refused = True
            raise RendezvousError(str(error)) from error
        except ClosedError as error:
            raise RendezvousClosedError(str(error)) from error
        except LateError as error:
            raise RendezvousTimeoutError(str(error)) from error
        except OperationalError as error:
            raise RendezvousConnectionError(str(error)) from error
        rank = found.members.index(membership.id)
        bootstrap = RendezvousStoreInfo.build(rank, store, self._own_address())
        return RendezvousInfo(store, rank, len(found.members), bootstrap)

    def is_closed(self) -> bool:
        """True once the launch is over."""
        return self._membership is not None and self._membership.picture().closed

    def set_closed(self) -> None:
        """End the launch for all."""
        if self._membership is not None:
            self._call(self._membership.close_launch())

    def num_nodes_waiting(self) -> int:
        """How many changes call for a new round: newcomers, lost members, a drain of this node, a round that went on without it."""
        return self._membership.count() if self._membership is not None else 0

    def shutdown(self) -> bool:
        """Leave; unless this node was refused, the launch is over. Returns False when the store did not take it in time."""
        if self._loop is None:
            return True
        try:
            self._call(self._end(), timeout=_LEAVE_SECONDS)
            done = True
        except (OperationalError, TimeoutError):
            done = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None:
            self._thread.join()
        self._loop = self._membership = None
        return done

    def _abandon(self) -> None:
        """torchrun ends by a signal without `shutdown`: take this node out at once and leave the launch open for the others."""
        if self._membership is not None:
            with contextlib.suppress(OperationalError, TimeoutError):
                self._call(self._membership.leave(), timeout=_LEAVE_SECONDS)

    async def _end(self) -> None:
        if self._membership is not None:
            try:
                if not self._refused:
                    await self._membership.close_launch()
                await self._membership.leave()
            finally:
                await self._membership.stop()
        if self._store is not None:
            await self._store.close()

    def _started(self) -> Membership:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="regrow-rendezvous", daemon=True)
            self._thread.start()
            atexit.register(self._abandon)
        if self._membership is None:
            self._membership = self._call(self._open())
        return self._membership

    async def _open(self) -> Membership:
        self._store = self._store or open_store(self._url)
        made = Membership(self._store, self._settings)
        try:
            await made.start()
        except OperationalError:
            await made.stop()
            raise
        return made

    def _call(self, work: Coroutine[Any, Any, _T], *, timeout: float | None = None) -> _T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _own_address(self) -> str:
        return self._address or socket.getfqdn()

    def _serve(self) -> tuple[str, int]:
        """A store for one round. The one before ends with the last reference to it."""
        self._served = served = TCPStore(self._own_address(), 0, is_master=True, wait_for_workers=False)
        return self._own_address(), served.port

    def _connect(self, found: Round) -> PrefixStore | None:
        """The round's store; None: it is gone, so another round has to come."""
        limit = timedelta(seconds=min(_CONNECT_SECONDS, self._settings.join_seconds))
        try:
            store = TCPStore(found.address, found.port, is_master=False, wait_for_workers=False, timeout=limit)
        except DistError:
            return None
        store.set_timeout(timedelta(seconds=self._settings.join_seconds))
        return PrefixStore(f"regrow/{found.number}", store)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point gives torchrun."""
    return RegrowRendezvous
