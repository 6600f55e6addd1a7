"""Compare-and-swap that survives lost answers.

A write that timed out may have been applied, or may still be on its way. So these helpers re-read, and try the same
comparison again: it can hold only once, whichever of the attempts gets there. Values must be unique to their writer (all of
Regrow's records carry an epoch, an incarnation or a nonce), else an equal value of somebody else would be taken for our own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from regrow.store.base import Comparison, Get, KeyValue, Lease, Operation, Put, Store, StoreUnavailable, mod_revision, version
from regrow.store.rules import lease_id

_PAUSE_SECONDS = 0.1
_ATTEMPT_SECONDS = 5.0


class CasResult(msgspec.Struct, frozen=True):
    """Outcome of a compare-and-swap that is known for sure."""

    won: bool
    current: KeyValue | None
    """The key as it is afterwards: ours when won, else what stood in the way (None: the key does not exist)."""


async def create(store: Store, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float = 15.0) -> CasResult:
    """Create `key` if it does not exist. The result is certain even if answers got lost on the way.

    Args:
        timeout: seconds for everything.

    Raises:
        StoreUnavailable: the outcome could not be learned in time; the write may have been applied.
    """
    return await swap(store, key, value, expected=0, lease=lease, timeout=timeout)


async def swap(store: Store, key: str, value: bytes, *, expected: int, lease: Lease | int = 0, timeout: float = 15.0) -> CasResult:
    """Write `key` if its mod_revision is `expected` (0: if it does not exist). See `create`.

    Raises:
        StoreUnavailable: the outcome could not be learned in time; the write may have been applied.
    """
    condition = mod_revision(key) == expected if expected else version(key) == 0
    return await guarded(store, condition, key, value, expected=expected, lease=lease, timeout=timeout)


async def guarded(
    store: Store,
    condition: Comparison,
    key: str,
    value: bytes,
    *,
    along: Sequence[Operation] = (),
    expected: int = -1,
    lease: Lease | int = 0,
    timeout: float = 15.0,
) -> CasResult:
    """Write `key` if `condition` holds (it may be about another key, such as a generation record).

    Args:
        along: what is written in the same transaction.
        expected: mod_revision of `key` before the write, if known; tells our own earlier attempt from what was there.

    Raises:
        StoreUnavailable: the outcome could not be learned in time; the write may have been applied.
    """
    write = Put(key, value, lease_id(lease))
    uncertain = False
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        attempt = max(0.1, min(_ATTEMPT_SECONDS, deadline - loop.time()))
        try:
            result = await store.transaction((condition,), (write, *along, Get(key)), (Get(key),), timeout=attempt)
        except StoreUnavailable as error:
            uncertain = uncertain or error.maybe_applied
            if loop.time() + _PAUSE_SECONDS >= deadline:
                raise StoreUnavailable(error.what, where=error.where, hint=error.hint, maybe_applied=uncertain) from error
            await asyncio.sleep(_PAUSE_SECONDS)
            continue
        items = result.results[-1].items
        current = items[0] if items else None
        if result.succeeded:
            return CasResult(won=True, current=current)
        ours = uncertain and current is not None and (current.value, current.lease) == (write.value, write.lease)
        ours = ours and current is not None and current.mod_revision != expected
        return CasResult(won=ours, current=current)


async def update(store: Store, key: str, change: Callable[[bytes | None], bytes | None], *, timeout: float = 15.0) -> KeyValue | None:
    """Read, change, write back, and begin again when somebody else was faster.

    Args:
        change: gets the value (None: no such key), returns the new one, or None to leave it alone. Called once per attempt.

    Returns:
        The key as it is afterwards.

    Raises:
        StoreUnavailable: the outcome could not be learned in time; the write may have been applied.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        current = await store.get(key, timeout=max(0.1, deadline - loop.time()))
        wanted = change(current.value if current else None)
        if wanted is None:
            return current
        expected = current.mod_revision if current else 0
        result = await swap(store, key, wanted, expected=expected, timeout=max(0.1, deadline - loop.time()))
        if result.won:
            return result.current
