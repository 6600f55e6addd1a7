"""A shim under test: real processes in a folder of the test, gone at its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agent.harness import Harness
from tests.agent.scene import Scene

from regrow.processes import MARK, kill_marked
from regrow.store.base import Store
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.open import open_store


@pytest.fixture(scope="session", autouse=True)
def signals_as_at_a_terminal() -> None:
    """Under nohup or a CI runner some signals are ignored, and every interpreter that a test starts would inherit that."""
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Harness]]:
    """Makes harnesses on one state folder; nothing of them is left afterwards."""
    state = tmp_path / "s"
    state.mkdir()
    monkeypatch.setenv(MARK, str(state))
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(state, **options))
        return made[-1]

    yield make
    for item in reversed(made):
        await item.leave()
    left = await asyncio.to_thread(kill_marked, MARK, str(state))
    assert left == [], f"processes that cannot be killed: {left}"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """One real etcd for this file."""
    member = EmbeddedEtcd(tmp_path_factory.mktemp("etcd"))
    with asyncio.Runner() as runner:
        runner.run(member.start())
        yield member
        runner.run(member.stop())


@pytest.fixture
async def store(etcd: EmbeddedEtcd) -> AsyncIterator[Store]:
    """A client of it."""
    made = open_store(etcd.url, timeout=20.0)
    yield made
    await made.close()


@pytest.fixture
async def scene(tmp_path: Path, etcd: EmbeddedEtcd, store: Store) -> AsyncIterator[Scene]:
    """A scene; nothing of it is left afterwards."""
    made = Scene(tmp_path, etcd.url, store)
    await made.leader.start()
    yield made
    for agent in made.agents:
        await agent.kill()
        left = await asyncio.to_thread(kill_marked, MARK, str(agent.state))
        assert left == []
    await made.leader.stop()
