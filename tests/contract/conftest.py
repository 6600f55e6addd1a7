"""Stores to test: one in memory, one real etcd for the whole run, clusters and relays where a test asks for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from regrow.store.base import Store
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.open import open_store

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """One real etcd for all tests that do not break it."""
    member = EmbeddedEtcd(tmp_path_factory.mktemp("shared-etcd"))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(member.start())
    yield member
    loop.run_until_complete(member.stop())
    loop.close()


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd of one's own, to be broken."""
    member = EmbeddedEtcd(tmp_path / "etcd")
    await member.start()
    yield member
    await member.stop()


@pytest.fixture(params=["memory", "etcd"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Address of the store under test."""
    return "memory://" if request.param == "memory" else request.getfixturevalue("shared_etcd").url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """The store under test, by the machine's clock."""
    made = open_store(store_url, timeout=20.0)
    yield made
    await made.close()


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test-{next(_numbers)}/"
