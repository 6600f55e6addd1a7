"""Records that go to the store soon: the newest value of each key, many in one transaction, again until the store took them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from regrow.store.base import Comparison, Delete, NoSpace, Operation, Put, Store, StoreError
from regrow.supervisor.core import events as e

log = logging.getLogger("regrow.supervisor.writes")

_RETRY_SECONDS = 0.3
_TRANSACTION_SECONDS = 4.0
_MOST_OPERATIONS = 64
"""In one transaction. etcd takes 128, and refuses a key twice: an event of the store is removed when 128 newer ones are there."""
_MOST_BYTES = 512 * 1024
"""Of values in one transaction, where more than one key is in it; etcd takes 1.5 MB."""


class Writes:
    """One per term. `lost` is called when the store says that the term is over."""

    def __init__(
        self,
        store: Store,
        comparison: Comparison | None,
        *,
        post: Callable[[e.Event], None],
        now: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        self._store = store
        self._comparison = comparison
        self._post = post
        self._now = now
        self._lost = lost
        self._dirty: dict[str, bytes | None] = {}
        self._along: dict[str, list[Operation]] = {}
        """{key: what is written in the same transaction}."""
        self._more = asyncio.Event()
        self._up = True

    def __contains__(self, key: str) -> bool:
        """Whether the store does not have the newest value of a key yet."""
        return key in self._dirty

    def __bool__(self) -> bool:
        return bool(self._dirty)

    def write(self, key: str, value: bytes | None, along: Sequence[Operation] = ()) -> None:
        """Write (None: delete) a key soon. `along` goes into the same transaction, whichever value that has."""
        self._dirty[key] = value
        if along:
            self._along.setdefault(key, []).extend(along)
        self._more.set()

    async def run(self) -> None:
        """Write what is dirty, the oldest keys first, until cancelled or deposed."""
        while True:
            while not self._dirty:
                self._more.clear()
                await self._more.wait()
            chosen, operations = self._choose()
            try:
                written = await self._transact(operations)
            except StoreError as error:
                self._note(up=False, reason=f"{error.what}" + (" (the store is full)" if isinstance(error, NoSpace) else ""))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._note(up=True)
            if not written:
                self._lost("the leader's record is not ours any more")
                return
            for key, (value, num_along) in chosen.items():
                self._written(key, value, num_along)

    def _choose(self) -> tuple[dict[str, tuple[bytes | None, int]], list[Operation]]:
        """{key: its value, and how many of those that go along with it}, and the operations."""
        chosen: dict[str, tuple[bytes | None, int]] = {}
        operations: list[Operation] = []
        num_bytes = 0
        for key, value in self._dirty.items():
            along = self._along.get(key, ())
            num_bytes += len(value or b"")
            room = _MOST_OPERATIONS - len(operations) - 1
            if chosen and (len(along) > room or num_bytes > _MOST_BYTES):
                break
            taken = along[:room]
            chosen[key] = (value, len(taken))
            operations += [Put(key, value) if value is not None else Delete(key), *taken]
            if len(operations) >= _MOST_OPERATIONS:
                break
        return chosen, operations

    def _written(self, key: str, value: bytes | None, num_along: int) -> None:
        left = self._along.pop(key, [])[num_along:]
        if left:
            self._along[key] = left
        elif self._dirty.get(key, ...) is value:
            del self._dirty[key]

    async def _transact(self, operations: Sequence[Operation]) -> bool:
        compare = [self._comparison] if self._comparison else []
        result = await self._store.transaction(compare, operations, (), timeout=_TRANSACTION_SECONDS)
        return result.succeeded

    def _note(self, *, up: bool, reason: str = "") -> None:
        if up != self._up:
            self._up = up
            self._post(e.StoreChanged(at=self._now(), up=up, reason=reason))
