"""What every store does with keys and transactions."""

from __future__ import annotations

import asyncio

import pytest

from regrow.store import base, cas
from regrow.store.base import Compacted, Delete, Get, LeaseLost, Put, RequestTooLarge, Store, StoreError
from regrow.store.rules import prefix_end


async def test_a_missing_key_is_none(store: Store, prefix: str) -> None:
    assert await store.get(prefix + "nothing") is None
    assert (await store.get_prefix(prefix)).items == ()
    assert await store.delete(prefix + "nothing") is False
    assert await store.delete_prefix(prefix) == 0


async def test_put_counts_versions_and_revisions(store: Store, prefix: str) -> None:
    key = prefix + "a"
    first = await store.put(key, b"1")
    second = await store.put(key, b"\x00\xff")
    item = await store.get(key)
    assert item is not None
    assert (item.key, item.value, item.version, item.create_revision, item.mod_revision) == (key, b"\x00\xff", 2, first, second)
    assert second == first + 1
    assert await store.delete(key)
    third = await store.put(key, b"")
    item = await store.get(key)
    assert item is not None
    assert (item.value, item.version, item.create_revision) == (b"", 1, third)


async def test_prefixes_list_in_order_and_exactly(store: Store, prefix: str) -> None:
    inside = [prefix + name for name in ("b", "a", "a/2", "ü", "a0")]
    for key in inside:
        await store.put(key, key.encode())
    await store.put(prefix[:-1] + "0", b"outside")
    listing = await store.get_prefix(prefix)
    assert [item.key for item in listing] == sorted(inside, key=str.encode)
    assert listing.values() == {key: key.encode() for key in inside}
    bare = await store.get_prefix(prefix, keys_only=True)
    assert [(item.key, item.value, item.mod_revision) for item in bare] == [(item.key, b"", item.mod_revision) for item in listing]
    assert await store.delete_prefix(prefix + "a") == 3
    assert [item.key for item in await store.get_prefix(prefix)] == [prefix + "b", prefix + "ü"]


@pytest.mark.parametrize(
    ("after", "limit", "expected"),
    [("", 2, ["a", "a/2"]), ("a", 3, ["a/2", "a0", "b"]), ("a1", 9, ["b", "ü"]), ("b", 1, ["ü"]), ("ü", 5, []), ("z", 5, ["ü"])],
)
async def test_a_few_keys_from_behind_one_on(store: Store, prefix: str, after: str, limit: int, expected: list[str]) -> None:
    for name in ("b", "a", "a/2", "ü", "a0"):
        await store.put(prefix + name, b"value")
    await store.put(prefix[:-1] + "0", b"outside")
    assert await store.next_keys(prefix, after, limit) == tuple(prefix + name for name in expected)


async def test_a_listing_is_of_one_revision_and_reads_the_past(store: Store, prefix: str) -> None:
    for number in range(700):  # more than one page
        await store.put(f"{prefix}{number:04d}", b"old")
    past = await store.get_prefix(prefix)
    await store.put(f"{prefix}0001", b"new")
    await store.delete(f"{prefix}0002")
    again = await store.get_prefix(prefix, revision=past.revision)
    assert again == past
    assert len(past) == 700
    now = await store.get_prefix(prefix)
    expected = {**past.values(), f"{prefix}0001": b"new"}
    del expected[f"{prefix}0002"]
    assert now.values() == expected
    assert now.revision == past.revision + 2


async def test_a_compacted_past_says_so(store: Store, prefix: str) -> None:
    old = await store.put(prefix + "a", b"1")
    new = await store.put(prefix + "a", b"2")
    await store.compact(new)
    with pytest.raises(Compacted):
        await store.get_prefix(prefix, revision=old)
    with pytest.raises(Compacted):
        await store.compact(old)
    with pytest.raises(StoreError, match="future"):
        await store.compact(new + 1_000_000)
    assert (await store.get_prefix(prefix, revision=new)).values() == {prefix + "a": b"2"}


COMPARISONS = [
    ("value", "==", b"v", True),
    ("value", "==", b"w", False),
    ("value", "!=", b"w", True),
    ("value", "<", b"w", True),
    ("value", ">", b"w", False),
    ("version", "==", 2, True),
    ("version", "!=", 2, False),
    ("version", ">", 1, True),
    ("version", "<", 2, False),
    ("create_revision", "==", "created", True),
    ("create_revision", "<", "created", False),
    ("mod_revision", "==", "modified", True),
    ("mod_revision", ">", "created", True),
]


@pytest.mark.parametrize(("target", "operator", "operand", "holds"), COMPARISONS)
async def test_comparisons(store: Store, prefix: str, target: str, operator: str, operand: bytes | int | str, holds: bool) -> None:
    key = prefix + "k"
    revisions = {"created": await store.put(key, b"u"), "modified": await store.put(key, b"v")}
    number = revisions[operand] if isinstance(operand, str) else operand
    condition = base.Comparison(key, target, operator, number)  # type: ignore[arg-type]
    result = await store.transaction((condition,), (Put(prefix + "yes", b""),), (Put(prefix + "no", b""),))
    assert result.succeeded is holds
    assert (await store.get(prefix + "yes") is not None) is holds
    assert (await store.get(prefix + "no") is None) is holds


async def test_comparisons_with_a_missing_key(store: Store, prefix: str) -> None:
    key = prefix + "missing"
    for condition, holds in (
        (base.version(key) == 0, True),
        (base.create_revision(key) == 0, True),
        (base.mod_revision(key) > 0, False),
        (base.mod_revision(key) < 1, True),
        (base.version(key) != 0, False),
        (base.value(key) == b"", False),
        (base.value(key) != b"x", False),
    ):
        assert (await store.transaction((condition,), (), ())).succeeded is holds, condition


async def test_a_transaction_is_one_revision_and_sees_itself(store: Store, prefix: str) -> None:
    await store.put(prefix + "old", b"")
    result = await store.transaction(
        (base.version(prefix + "a") == 0, base.version(prefix + "old") > 0),
        (Put(prefix + "a", b"1"), Put(prefix + "b", b"2"), Delete(prefix + "old"), Get(prefix, prefix=True), Get(prefix + "none")),
    )
    assert result.succeeded
    items = result.results[3].items
    assert [(item.key, item.value, item.mod_revision) for item in items] == [
        (prefix + "a", b"1", result.revision),
        (prefix + "b", b"2", result.revision),
    ]
    assert result.results[2].deleted == 1
    assert result.results[4].items == ()
    again = await store.transaction((base.version(prefix + "a") == 0,), (Put(prefix + "a", b"x"),), (Get(prefix + "a"),))
    assert not again.succeeded
    assert again.results[0].items[0].value == b"1"
    assert again.revision == result.revision, "a transaction that writes nothing makes no revision"


async def test_what_a_transaction_refuses(store: Store, prefix: str) -> None:
    with pytest.raises(StoreError):
        await store.transaction((), (Put(prefix + "a", b"1"), Put(prefix + "a", b"2")))
    with pytest.raises(StoreError):
        await store.transaction((), (Put(prefix + "a", b"1"), Delete(prefix, prefix=True)))
    with pytest.raises(RequestTooLarge, match="129"):
        await store.transaction((), [Put(f"{prefix}{number}", b"") for number in range(129)])
    with pytest.raises(RequestTooLarge):
        await store.put(prefix + "a", bytes(2_000_000))
    assert (await store.get_prefix(prefix)).items == ()
    await store.transaction((), [Put(f"{prefix}{number:03d}", bytes(8_000)) for number in range(128)])
    assert len(await store.get_prefix(prefix)) == 128


async def test_create_and_replace(store: Store, prefix: str) -> None:
    key = prefix + "k"
    assert await store.put_if_not_exists(key, b"1")
    assert not await store.put_if_not_exists(key, b"2")
    assert await store.replace(key, b"1", b"3")
    assert not await store.replace(key, b"1", b"4")
    item = await store.get(key)
    assert item is not None
    assert item.value == b"3"


async def test_swap_by_revision(store: Store, prefix: str) -> None:
    key = prefix + "k"
    created = await cas.create(store, key, b"mine")
    assert created.won
    assert created.current is not None
    lost = await cas.create(store, key, b"yours")
    assert not lost.won
    assert lost.current == created.current
    swapped = await cas.swap(store, key, b"next", expected=created.current.mod_revision)
    assert swapped.won
    assert swapped.current is not None
    stale = await cas.swap(store, key, b"late", expected=created.current.mod_revision)
    assert not stale.won
    assert stale.current == swapped.current


async def test_updates_by_many_lose_nothing(store: Store, prefix: str) -> None:
    key = prefix + "counter"

    async def add(times: int) -> None:
        for _ in range(times):
            await cas.update(store, key, lambda old: str(int(old or b"0") + 1).encode(), timeout=60)

    await asyncio.gather(*(add(5) for _ in range(6)))
    item = await store.get(key)
    assert item is not None
    assert (item.value, item.version) == (b"30", 30)
    assert await cas.update(store, key, lambda _: None) == item


async def test_a_key_cannot_hang_on_a_lease_that_is_gone(store: Store, prefix: str) -> None:
    lease = await store.lease(5)
    await lease.revoke()
    with pytest.raises(LeaseLost):
        await store.put(prefix + "a", b"", lease=lease)
    with pytest.raises(LeaseLost):
        await store.transaction((), (Put(prefix + "a", b"", lease.id),))
    assert await store.get(prefix + "a") is None


def test_the_end_of_a_prefix() -> None:
    assert prefix_end("/a/") == b"/a0"
    assert prefix_end("a\x7f") == b"a\x80"
    assert prefix_end("") == b"\0"
