"""Actuators: which orders are given, that the intent comes first and survives a change of leader, and the program of a site."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from regrow.errors import ConfigurationError
from regrow.store.base import Put, Store, mod_revision
from regrow.store.memory import MemoryStore
from regrow.supervisor.actuators import config as settings
from regrow.supervisor.actuators import orders
from regrow.supervisor.actuators.command import Command, check_template, fill
from regrow.supervisor.actuators.loop import Actuation, Tenure
from regrow.supervisor.actuators.port import ActuatorError, Call, Done, LeftAlone, safe_reason
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.core.view import View
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys
from regrow.supervisor.service import Supervisor

LIMIT = 60.0
HOUR = orders.WINDOW_SECONDS


def quarantined(*nodes: str, automation: bool = True) -> View:
    records = {f"gpu-{n}": QuarantineRecord(key=f"gpu-{n}", state="quarantined", since=0.0, reason="XID 79", node=n) for n in nodes}
    return View(term_at=0.0, quarantine=records, automation=automation)


def decide(view: View, records: dict[str, orders.Record], now: float = 0.0, per_hour: int = 10) -> orders.Plan:
    return orders.plan(orders.wanted_out(view), records, now=now, epoch=3, per_hour=per_hour)


def after(plan: orders.Plan, state: orders.State, now: float = 0.0) -> dict[str, orders.Record]:
    return {record.node: orders.attempted(record, now=now, state=state, detail="") for record in plan.intents}


def kinds(plan: orders.Plan) -> list[tuple[str, str]]:
    return [(record.node, record.direction) for record in (*plan.intents, *plan.again)]


def test_a_quarantined_node_goes_out_once_and_comes_back_once() -> None:
    first = decide(quarantined("n1"), {})
    assert kinds(first) == [("n1", "out")]
    done = after(first, "done")
    assert kinds(decide(quarantined("n1"), done, 5.0)) == []
    back = decide(View(), done, 10.0)
    assert kinds(back) == [("n1", "in")]
    assert back.intents[0].id != first.intents[0].id, "another order, another id"
    gone = after(back, "done", 10.0)
    assert decide(View(), gone, 20.0).forget == (), "the rate limit still counts it"
    assert decide(View(), gone, HOUR + 1).forget == ("n1",)


def test_a_failed_order_is_given_again_with_the_same_id_after_a_pause_that_grows() -> None:
    failed = after(decide(quarantined("n1"), {}), "failed")
    assert kinds(decide(quarantined("n1"), failed, 4.9)) == []
    again = decide(quarantined("n1"), failed, 5.0)
    assert [record.id for record in again.again] == [failed["n1"].id]
    assert [orders.pause_seconds(count) for count in (1, 2, 3, 20)] == [5.0, 10.0, 20.0, 300.0]
    assert kinds(decide(View(), failed, 1.0)) == [("n1", "in")], "it may have had its effect all the same: it is undone"
    assert kinds(decide(quarantined("n1"), failed, -500.0)) == [("n1", "out")], "a clock that went back does not stop it"


def test_what_somebody_else_took_out_is_not_brought_back() -> None:
    left = after(decide(quarantined("n1"), {}), "left")
    plan = decide(View(), left, HOUR + 1)
    assert (kinds(plan), plan.forget) == ([], ("n1",))


def test_the_limit_holds_those_that_go_out_not_those_that_come_back() -> None:
    view = quarantined("n1", "n2", "n3")
    plan = decide(view, {}, per_hour=2)
    assert (kinds(plan), [want.node for want in plan.held]) == ([("n1", "out"), ("n2", "out")], ["n3"])
    done = after(plan, "done")
    assert [want.node for want in decide(view, done, 10.0, per_hour=2).held] == ["n3"]
    assert kinds(decide(quarantined("n3"), done, 10.0, per_hour=2)) == [("n1", "in"), ("n2", "in")]
    assert kinds(decide(view, done, HOUR + 1, per_hour=2)) == [("n3", "out")]
    flapping = after(decide(View(), done, 10.0, per_hour=2), "done", 10.0)
    assert kinds(decide(view, flapping, 20.0, per_hour=2)) == [], "a node that goes in and out uses the limit up"


def test_reasons_are_plain_text() -> None:
    assert safe_reason('--now "$(reboot)"\n\x1b[2J;') == "now _(reboot)_2J;"
    assert safe_reason("x" * 500) == "x" * 200


class Recorder:
    """An actuator that looks into the store when it is called."""

    name = "recorder"

    def __init__(self, store: Store, keys: Keys) -> None:
        self.calls: list[Call] = []
        self.stored: list[str] = []
        self.outcomes: list[Done | LeftAlone | Exception] = []
        self._store, self._keys = store, keys

    def preview(self, call: Call) -> str:
        return f"{call.direction} {call.node}"

    async def act(self, call: Call) -> Done | LeftAlone:
        item = await self._store.get(self._keys.actuated(self.name, call.node))
        self.stored.append(msgspec.json.decode(item.value, type=orders.Record).state if item is not None else "nothing")
        self.calls.append(call)
        outcome = self.outcomes.pop(0) if self.outcomes else Done("ok")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Leader:
    """One term: holds as long as its key has the revision that it wrote."""

    def __init__(self, store: Store, recorder: Recorder, keys: Keys) -> None:
        self.store, self.recorder, self.keys = store, recorder, keys
        self.journal = Journal(None)
        self.view: View | None = quarantined("n1")
        self.now = 0.0
        self.holding = True

    async def begin(self, epoch: int, **changes: Any) -> Actuation:
        await self.store.transaction([], [Put("/term", str(epoch).encode())])
        item = await self.store.get("/term")
        assert item is not None
        tenure = Tenure(
            store=self.store,
            keys=self.keys,
            journal=self.journal,
            comparison=mod_revision("/term") == item.mod_revision,
            epoch=epoch,
            now=lambda: self.now,
            look=lambda: self.view,
            holds=lambda: self.holding,
        )
        made = Actuation(self.recorder, tenure, **{"dry_run": False, "per_hour": 10} | changes)
        await made._load()
        return made

    def outcomes(self) -> list[str]:
        return [entry.data["outcome"] for entry in self.journal.since(0) if entry.kind == "actuator"]


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    store, keys = MemoryStore(), Keys("t")
    yield Leader(store, Recorder(store, keys), keys)
    await store.close()


async def test_the_intent_is_in_the_store_before_anything_is_done(leader: Leader) -> None:
    term = await leader.begin(1)
    await term._once()
    await term._once()
    assert [(call.node, call.direction, call.reason, call.hardware) for call in leader.recorder.calls] == [
        ("n1", "out", "XID 79", "gpu-n1")
    ]
    assert leader.recorder.stored == ["intended"]
    assert leader.outcomes() == ["ordered", "done"]


async def test_the_next_leader_goes_on_with_what_was_begun(leader: Leader) -> None:
    first = await leader.begin(1)
    leader.recorder.outcomes = [ActuatorError("no controller")]
    await first._once()
    assert (leader.outcomes(), first.counts()["failed"]) == (["ordered", "failed"], 1)
    second = await leader.begin(2)
    await second._once()
    assert len(leader.recorder.calls) == 1, "the pause holds over the change"
    leader.now = 6.0
    await second._once()
    assert [call.id for call in leader.recorder.calls] == [leader.recorder.calls[0].id] * 2
    assert second.records["n1"].state == "done"


async def test_a_leader_that_is_deposed_orders_nothing(leader: Leader) -> None:
    old = await leader.begin(1)
    await leader.begin(2)
    await old._once()
    assert leader.recorder.calls == [], "the store did not take the intent"
    old = await leader.begin(3)
    leader.holding = False
    await old._once()
    assert leader.recorder.calls == [], "nor by its own clock"
    assert old.records["n1"].state == "intended"


@pytest.mark.parametrize("how", ["dry run", "automation is off"])
async def test_nothing_is_done_in_a_dry_run_or_with_automation_off(leader: Leader, how: str) -> None:
    leader.view = quarantined("n1", automation=how == "dry run")
    term = await leader.begin(1, dry_run=how == "dry run")
    for _ in range(3):
        await term._once()
    assert leader.recorder.calls == []
    assert [entry.data["detail"] for entry in leader.journal.since(0)] == [f"would: out n1 ({how})"]
    assert await leader.store.get(leader.keys.actuated("recorder", "n1")) is None


async def test_a_bug_in_an_actuator_stops_that_one_and_is_shown(leader: Leader) -> None:
    term = await leader.begin(1)
    leader.recorder.outcomes = [ZeroDivisionError("oops")]
    task = asyncio.create_task(term.run())
    task.add_done_callback(term.ended)
    async with asyncio.timeout(LIMIT):
        await asyncio.wait([task])
    assert "oops" in term.document()["paused"]


# --- a program of the site


def call(**changes: Any) -> Call:
    return Call(**{"node": "n1", "direction": "out", "reason": "XID 79", "hardware": "GPU-1", "id": "1-n1-1"} | changes)


def test_a_value_stays_in_its_argument() -> None:
    argv = fill(("/bin/tool", "--why={reason}", "{node}", "{id}{direction}"), call(reason='a" {node}; rm -rf /'))
    assert argv == ("/bin/tool", "--why=regrow: a_ _node_; rm -rf /", "n1", "1-n1-1out")


@pytest.mark.parametrize(("argv", "what"), [((), "no program"), (("{node}",), "must be fixed"), (("x", "{host}"), "{host}")])
def test_bad_templates_are_refused(argv: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        check_template(argv, "command_out")


async def test_programs_get_no_secrets_and_end_with_all_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TOKEN", "hush-hush")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nenv; echo arg=$1; exit $2\n")
    tool.chmod(0o755)
    done = await Command((str(tool), "{reason}", "0"), (), LIMIT).act(call())
    assert isinstance(done, Done)
    assert "arg=regrow: XID 79" in done.detail
    assert "hush-hush" not in done.detail
    with pytest.raises(ActuatorError, match="ended with 7"):
        await Command((str(tool), "{reason}", "7"), (), LIMIT).act(call())
    with pytest.raises(ActuatorError, match="cannot be started"):
        await Command((str(tmp_path / "nothing"),), (), LIMIT).act(call())
    tool.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >{tmp_path}/pid\nwait\n")
    with pytest.raises(ActuatorError, match="did not end within"):
        await Command((str(tool),), (), 1.0).act(call())
    child = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(LIMIT):
        while _alive(child):  # noqa: ASYNC110  # a process, not a task
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- in a supervisor


@asynccontextmanager
async def supervisor(tmp_path: Path, store: Store, actuators: settings.ActuatorConfig) -> AsyncIterator[Supervisor]:
    config = SupervisorConfig(cluster="t", store="memory://", state=str(tmp_path / "s"), ttl=LIMIT, name="s0")
    made = Supervisor(config, Policy(takeover_seconds=0.1), actuators=actuators, store=store)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        made.stop()
        await running


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  # files and other processes
            await asyncio.sleep(0.02)


async def recorded(store: Store, key: str, state: str) -> None:
    """Wait until the outcome is in the store: a leader that ended before that leaves the order to the next one, which repeats it."""
    async with asyncio.timeout(LIMIT):
        while (item := await store.get(key)) is None or msgspec.json.decode(item.value, type=orders.Record).state != state:  # noqa: ASYNC110  # the store is another part
            await asyncio.sleep(0.02)


async def test_quarantine_and_clear_reach_the_program_over_a_change_of_supervisor(tmp_path: Path) -> None:
    told, store = tmp_path / "told", MemoryStore()
    tool = tmp_path / "tool"
    tool.write_text(f'#!/bin/sh\necho "$1 $2 $3" >>{told}\n')
    tool.chmod(0o755)
    (tmp_path / "c.toml").write_text(
        f'[actuators]\nmode = "on"\nuse = "command"\ncommand_out = ["{tool}", "out", "{{node}}", "{{reason}}"]\n'
        f'command_in = ["{tool}", "in", "{{node}}", "{{reason}}"]\n'
    )
    loaded, _ = settings.load(tmp_path / "c.toml")
    record = next(iter(quarantined("n1").quarantine.values()))
    await store.transaction([], [Put(Keys("t").quarantined(record.key), msgspec.json.encode(record))])
    async with supervisor(tmp_path / "a", store, loaded):
        await until(lambda: told.exists() and told.read_text() == "out n1 regrow: XID 79\n")
        await recorded(store, Keys("t").actuated("command", "n1"), "done")
    async with supervisor(tmp_path / "b", store, loaded) as made:
        await until(lambda: made.actuators.counts()["done"] == 1)
        async with httpx.AsyncClient(base_url=f"http://{made.http_address}", trust_env=False, timeout=LIMIT) as client:
            assert (await client.post("/v1/nodes/n1/clear")).status_code == 200
            await until(lambda: told.read_text().splitlines()[1:] == ["in n1 regrow: XID 79"])
            shown = await asyncio.to_thread(_regrow, "actuators", "ls", "--json", "--supervisor", made.http_address)
            assert shown["mode"] == "on"
            assert [(order["node"], order["direction"]) for order in shown["actuators"][0]["orders"]] == [("n1", "in")]
            assert 'regrow_actuator_orders{state="done"} 1.0' in (await client.get("/metrics")).text
        assert [entry.data["outcome"] for entry in made.journal.since(0) if entry.kind == "actuator"] == ["ordered", "done"]
    await store.close()


def _regrow(*words: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
    done = subprocess.run([sys.executable, "-m", "regrow", *words], capture_output=True, text=True, check=False, env=environment)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('mode = "maybe"', "'maybe' is not known"),
        ('mode = "on"', "none is used"),
        ('use = "slurm,ticket"', "'ticket' is not known"),
        ('use = "command"', "no program"),
        ('use = "command"\ncommand_out = "a b"\nper_hour = 0', "per_hour"),
        ('kubernetes_effect = "Evict"', "kubernetes_effect"),
        ("command_out = [1]", "list of texts"),
        ('scontrol = "x"', "unknown key"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[actuators]\n{text}\n")
    with pytest.raises(ConfigurationError, match=what):
        settings.load(path)
