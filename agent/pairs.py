"""Before a node joins it exchanges known bytes with another one; a node that is bad is told from its partner in a second round.

Nobody leads this. A node that starts offers itself under `preflight/<node>`, asks the next one of those that start or are registered
(agent/pair_judge.py), and asks others until it is known what is the matter, within its budget. Nodes that train answer as well; one that
finds that an exchange with a newcomer went wrong looks for a second partner of its own, so that it is found out when it is the bad one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from regrow import security, wire
from regrow.agent import exchange
from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.preflight_report import PAIRS, PAIRS_OPEN, PAIRS_UNREACHED
from regrow.agent.pair_judge import Exchange, Verdict, judge, next_partner, told
from regrow.agent.registry import Keys
from regrow.errors import OperationalError
from regrow.store.base import Lease, Store

_log = logging.getLogger("regrow.agent.pairs")

_STORE_SECONDS = 3.0
_OFFER_TTL_SECONDS = 10.0
_PAUSE_SECONDS = (0.2, 1.0)
_AT_ONCE = 4
_NEIGHBOURS = 16
"""Partners that a node looks at. A second one that is known to be good is among them, or asks by itself."""
AGAIN_SECONDS = 20.0
"""A node that could not be judged, or reached nobody, tries again after so long."""
_NAMES: dict[Verdict, str] = {"bad": PAIRS, "unreached": PAIRS_UNREACHED, "open": PAIRS_OPEN}


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """preflight/<node>, leased while the check runs: who starts now, and where its peer port is."""

    address: str


class Pairs:
    """Exchanges of this node, asked and answered."""

    def __init__(
        self,
        node: str,
        store: Store,
        keys: Keys,
        *,
        address: Callable[[], str],
        tls: security.Tls | None = None,
        num_bytes: int = exchange.NUM_BYTES,
        spoil: bool = False,
    ) -> None:
        """`address`: host:port of this node's peer port; `tls`: how to connect to others'; `num_bytes`: of each block that this node asks
        for; `spoil` (chaos): one bit of each block that it sends is flipped.
        """
        self._node = node
        self._store = store
        self._keys = keys
        self._address = address
        self._tls = tls
        self._num_bytes = num_bytes
        self._spoil = spoil
        self._found: dict[str, Exchange] = {}
        self._answering = 0
        self._checking = False
        self.good = False
        """This node has passed with somebody since it started."""
        self.suspected = asyncio.Event()
        """An exchange that this node answered went wrong: it has to be found out whose fault that was."""

    async def check(self, others_done: asyncio.Event, *, budget_seconds: float) -> CheckResult:
        """Ask partners until this node is judged, within the budget. With nobody to ask it waits for `others_done` only.

        Earlier exchanges count only where bytes were wrong. Returns a check named `pairs` when it passed, was alone, or is bad;
        `pairs_unreached` and `pairs_open` are for what is not known to be this node's fault.
        """
        began = time.monotonic()
        self.suspected.clear()
        self._found = {name: one for name, one in self._found.items() if one.outcome == "wrong"}
        problem = ""
        self._checking = True
        try:
            async with asyncio.timeout(budget_seconds), contextlib.AsyncExitStack() as held:
                lease = await self._store.lease(_OFFER_TTL_SECONDS, timeout=_STORE_SECONDS)
                held.push_async_callback(self._withdraw, lease)
                offer = msgspec.json.encode(Offer(address=self._address()))
                await self._store.put(self._keys.offer(self._node), offer, lease=lease, timeout=_STORE_SECONDS)
                await self._rounds(others_done)
        except OperationalError as error:
            problem = f"the store does not say who is there: {error.what}"
        except TimeoutError:
            _log.info("pairs: the budget of %.0f s is over", budget_seconds)
        finally:
            self._checking = False
        verdict = judge(self._found)
        detail = told(self._found) or problem or "no other node"
        return CheckResult(
            name=_NAMES.get(verdict, PAIRS), ok=verdict in ("good", "alone"), seconds=time.monotonic() - began, detail=detail[:600]
        )

    @staticmethod
    async def _withdraw(lease: Lease) -> None:
        with contextlib.suppress(OperationalError):
            await lease.revoke()

    async def _rounds(self, others_done: asyncio.Event) -> None:
        pause = _PAUSE_SECONDS[0]
        while judge(self._found) not in ("good", "bad"):
            there = await self._there()
            partner = next_partner(self._node, there, self._found)
            fresh = bool(partner) and partner not in self._found
            if not fresh and others_done.is_set() and not any(one.outcome == "wrong" for one in self._found.values()):
                return
            if not fresh:
                await asyncio.sleep(pause)
                pause = min(_PAUSE_SECONDS[1], pause * 2)
            if partner:
                address = await self._address_of(partner)
                self._note(partner, await self._ask(partner, address))

    async def _ask(self, partner: str, address: str) -> Exchange:
        return await exchange.ask(self._node, partner, address, tls=self._tls, num_bytes=self._num_bytes, spoil=self._spoil)

    async def _there(self) -> set[str]:
        """The next ones in the ring of those that start or are registered: a few names, however large the cluster is."""
        there: set[str] = set()
        for prefix in (self._keys.node(""), self._keys.offer("")):
            keys = await self._store.next_keys(prefix, self._node, _NEIGHBOURS, timeout=_STORE_SECONDS)
            if len(keys) < _NEIGHBOURS:  # the ring begins again
                keys += await self._store.next_keys(prefix, "", _NEIGHBOURS - len(keys), timeout=_STORE_SECONDS)
            there |= {key.removeprefix(prefix) for key in keys}
        return there - {self._node}

    async def _address_of(self, partner: str) -> str:
        """host:port of its peer port: from its offer, for what is registered may be of an earlier life; empty: it is gone."""
        offer = await self._store.get(self._keys.offer(partner), timeout=_STORE_SECONDS)
        item = offer or await self._store.get(self._keys.node(partner), timeout=_STORE_SECONDS)
        if item is None:
            return ""
        try:
            if offer is not None:
                return msgspec.json.decode(item.value, type=Offer).address
            return msgspec.json.decode(item.value, type=wire.NodeRecord).peer_address
        except msgspec.MsgspecError as error:
            _log.warning("pairs: the record of %s cannot be read: %s", partner, error)
            return ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: wire.PairCheck) -> None:
        """Another node asks: the other side of one exchange."""
        role, name = security.peer_name(writer)
        if role and name != request.node:
            _log.warning("pairs: %s says that it is %s", name, request.node)
            return
        if self._answering >= _AT_ONCE:
            writer.write(wire.encode(exchange.Accepted(busy=True)))
            await writer.drain()
            return
        self._answering += 1
        try:
            found = await exchange.answer((reader, writer), request, self._node, good=self.good, spoil=self._spoil)
        finally:
            self._answering -= 1
        if found.outcome == "wrong" and not self._checking:
            self._found = {}
            self.suspected.set()
        self._note(request.node, found)

    def _note(self, partner: str, found: Exchange) -> None:
        before = self._found.get(partner)
        if before is not None and before.outcome == "wrong" and found.outcome in ("late", "absent"):
            return
        self._found[partner] = found
        self.good = self.good or found.outcome == "ok"
        level = logging.INFO if found.outcome in ("ok", "absent") else logging.WARNING
        _log.log(level, "pairs with=%s outcome=%s good=%s seconds=%.2f %s", partner, found.outcome, found.good, found.seconds, found.detail)
