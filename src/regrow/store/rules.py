"""Rules that every store keeps, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from regrow.store.base import (
    MAX_OPERATIONS,
    MAX_REQUEST_BYTES,
    Comparison,
    Event,
    KeyValue,
    Lease,
    Listing,
    Operation,
    Put,
    RequestTooLarge,
)

LEAST_TTL_SECONDS = 2.0
"""The least TTL that a store grants (etcd's default election timeout gives the same)."""


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys that begin with `prefix`: etcd's range_end. An empty prefix means all keys."""
    raw = bytearray(prefix.encode())
    while raw:
        if raw[-1] < 0xFF:
            raw[-1] += 1
            return bytes(raw)
        raw.pop()
    return b"\0"


def lease_id(lease: Lease | int) -> int:
    """The id of a lease given as an object or as a number."""
    return lease if isinstance(lease, int) else lease.id


def difference(known: dict[str, int], listing: Listing) -> tuple[Event, ...]:
    """Events that lead from `known` ({key: mod_revision}) to `listing`, in order of revision; deletions first."""
    present = {item.key for item in listing.items}
    gone = tuple(Event("delete", KeyValue(key, b"", 0, listing.revision, 0)) for key in known if key not in present)
    changed = sorted((item for item in listing.items if known.get(item.key) != item.mod_revision), key=lambda item: item.mod_revision)
    return (*gone, *(Event("put", item) for item in changed))


def check_size(compare: Sequence[Comparison], success: Sequence[Operation], failure: Sequence[Operation]) -> None:
    """Refuse a transaction that a default etcd would refuse.

    Raises:
        RequestTooLarge: with the numbers.
    """
    most = max(len(compare), len(success), len(failure))
    if most > MAX_OPERATIONS:
        raise RequestTooLarge(f"{most} operations in one transaction (most: {MAX_OPERATIONS})", where="store", hint="split it")
    size = sum(len(one.key) + len(one.value) for one in (*success, *failure) if isinstance(one, Put))
    if size > MAX_REQUEST_BYTES:
        raise RequestTooLarge(f"{size} bytes in one transaction (most: {MAX_REQUEST_BYTES})", where="store", hint="store it in chunks")
