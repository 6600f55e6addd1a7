"""What an earlier version left is read, and what a newer one left is refused with a way forward. Data as recorded from version 0.1.0."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow.ckpt import catalog
from regrow.errors import ConfigurationError
from regrow.store.base import Put, Store
from regrow.store.memory import MemoryStore
from regrow.supervisor import loading, upgrade
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.keys import Keys
from regrow.supervisor.service import Supervisor

RECORDED = Path(__file__).parents[1] / "data" / "upgrade" / "0.1.0"
LIMIT = 60.0


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = MemoryStore()
    yield made
    await made.close()


async def fill(store: Store, folder: str) -> dict[str, Any]:
    """The recorded keys; checkpoints are where the test says."""
    keys: dict[str, Any] = json.loads((RECORDED / "store.json").read_text(encoding="utf-8"))
    for key, value in keys.items():
        text = value if isinstance(value, str) else json.dumps(value)
        await store.transaction([], [Put(key, text.replace("@CHECKPOINTS@", folder).encode())])
    return keys


async def test_keys_of_the_version_before_are_read(store: Store) -> None:
    keys = await fill(store, str(RECORDED / "checkpoints"))
    assert "/regrow/local/meta" not in keys, "0.1.0 did not write it"
    loaded = await loading.load(store, Keys("local"), 0.0)
    (job,) = [event for event in loaded.events if isinstance(event, e.JobLoaded)]
    assert job.spec.job == "toy"
    assert loaded.generation_revisions.keys() == {"toy"}
    assert job.highest_generation == 2
    assert job.ledger is not None
    assert (job.ledger.state, len(job.ledger.charges)) == ("done", 1)
    assert [(item.kind, item.closed) for item in job.incidents] == [("worker_exit", True)]
    assert {record.step: record.damaged for record in job.checkpoints} == {4: "", 120: ""}


def test_checkpoints_of_the_version_before_are_restorable() -> None:
    found = catalog.newest_restorable(RECORDED / "checkpoints")
    assert found is not None
    assert found.step == 120
    assert (found.samples, found.generation) == (960, 2)


def test_every_byte_of_them_is_verified() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "ckpt", "verify", str(RECORDED / "checkpoints"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document["valid"], document["problems"]) == (True, [])


async def run_to_its_end(store: Store, tmp_path: Path) -> Supervisor:
    config = SupervisorConfig(cluster="local", store="memory://", state=str(tmp_path / "s"), ttl=LIMIT, name="s0")
    made = Supervisor(config, Policy(), store=store)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(LIMIT):
        while not running.done() and (made.term is None or made.term.view.term_at is None):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    made.stop()
    await running
    return made


async def test_a_supervisor_takes_them_up_and_writes_its_form(store: Store, tmp_path: Path) -> None:
    await fill(store, str(RECORDED / "checkpoints"))
    made = await run_to_its_end(store, tmp_path)
    assert any(entry.kind == "job_loaded" for entry in made.journal.since(0))
    item = await store.get("/regrow/local/meta")
    assert item is not None
    assert msgspec.json.decode(item.value, type=upgrade.Meta).form == upgrade.FORM


async def test_a_store_of_a_newer_version_is_refused_with_a_way_forward(store: Store, tmp_path: Path) -> None:
    newer = upgrade.Meta(form=7, least_writer=6, written_by="3.1.0")
    await store.transaction([], [Put("/regrow/local/meta", msgspec.json.encode(newer))])
    before = {item.key for item in await store.get_prefix("/regrow/local/")}
    with pytest.raises(ConfigurationError, match=r"written by Regrow 3\.1\.0") as caught:
        await run_to_its_end(store, tmp_path)
    assert "upgrade this supervisor to 3.1.0 or newer" in caught.value.hint
    assert {item.key for item in await store.get_prefix("/regrow/local/")} - before <= {"/regrow/local/leader"}, "nothing was written"


async def test_a_newer_form_that_this_version_may_write_is_left_as_it_is(store: Store, tmp_path: Path) -> None:
    newer = msgspec.json.encode(upgrade.Meta(form=7, least_writer=1, written_by="2.0.0"))
    await store.transaction([], [Put("/regrow/local/meta", newer)])
    await run_to_its_end(store, tmp_path)
    item = await store.get("/regrow/local/meta")
    assert item is not None
    assert item.value == newer
