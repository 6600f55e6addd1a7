"""Known bytes exchanged before a node joins, over real connections: who is bad is told from its partner in a second round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.agent.harness import LIMIT
from tests.agent.scene import Scene

from regrow import certificates, security, wire
from regrow.agent.exchange import Accepted, ask, block
from regrow.agent.health.burnin_result import FAULT_VARIABLE, CheckResult
from regrow.agent.health.preflight_report import PAIRS, PAIRS_OPEN, PAIRS_UNREACHED, Preflight, findings_of, with_pairs
from regrow.agent.pair_judge import Exchange, judge, next_partner
from regrow.agent.pairs import Pairs
from regrow.agent.peer import PeerServer, Report, Settled
from regrow.agent.registry import Keys
from regrow.store.base import Store
from regrow.store.memory import MemoryStore

KEYS = Keys("c")
SIZE = 64 << 10
DONE = asyncio.Event()
DONE.set()


async def _nothing(report: Report) -> Settled | None:
    del report
    return None


class Node:
    """A node's peer port and its exchanges."""

    def __init__(self, name: str, store: Store, *, spoil: bool = False) -> None:
        self.name = name
        self.store = store
        self.pairs = Pairs(name, store, KEYS, address=lambda: self.server.address, num_bytes=SIZE, spoil=spoil)
        self.server = PeerServer("127.0.0.1", 0, _nothing, pair=self.pairs.serve)

    async def check(self, seconds: float = LIMIT) -> CheckResult:
        return await self.pairs.check(DONE, budget_seconds=seconds)

    async def register(self) -> None:
        record = wire.NodeRecord(node=self.name, incarnation="i", address="127.0.0.1", peer_address=self.server.address, slots=1)
        await self.store.put(KEYS.node(self.name), msgspec.json.encode(record))


class Cluster:
    """Nodes on one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.nodes: list[Node] = []

    async def node(self, name: str, *, spoil: bool = False, registered: bool = False) -> Node:
        made = Node(name, self.store, spoil=spoil)
        await made.server.start()
        self.nodes.append(made)
        if registered:
            await made.register()
        return made


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(MemoryStore())
    yield made
    for node in made.nodes:
        await node.server.close()
    await made.store.close()


async def test_nobody_else_is_no_reason_to_wait(cluster: Cluster) -> None:
    alone = await (await cluster.node("a")).check()
    assert (alone.name, alone.ok, alone.detail) == (PAIRS, True, "no other node")


@pytest.mark.parametrize("bad", [0, 3, 6])
async def test_all_nodes_start_at_once_and_the_bad_one_alone_is_named(cluster: Cluster, bad: int) -> None:
    nodes = [await cluster.node(f"n{number}", spoil=number == bad) for number in range(7)]
    for node in nodes:
        await node.register()
    found = await asyncio.gather(*(node.check() for node in nodes))
    assert [one.ok for one in found] == [number != bad for number in range(7)], found
    assert found[bad].name == PAIRS
    assert found[bad].detail.count("wrong") > 1
    assert [node.pairs.good for node in nodes] == [number != bad for number in range(7)]


async def test_offers_alone_bring_those_together_that_start(cluster: Cluster) -> None:
    nodes = [await cluster.node(name) for name in "abc"]
    never = asyncio.Event()
    found = await asyncio.gather(*(node.pairs.check(never, budget_seconds=LIMIT) for node in nodes))
    assert all(one.ok and ": ok in" in one.detail for one in found), found
    assert len(await cluster.store.get_prefix(KEYS.offer(""))) == 0, "an offer ends with the check"


async def test_a_bad_newcomer_is_kept_out_and_its_partners_clear_themselves(cluster: Cluster) -> None:
    old = [await cluster.node(name, registered=True) for name in "xyz"]
    newcomer = await cluster.node("new", spoil=True)
    task = asyncio.create_task(newcomer.check())
    async with asyncio.timeout(LIMIT):
        await old[0].pairs.suspected.wait()
    assert (await old[0].check()).ok, "it looks for a partner of its own"
    assert not old[0].pairs.suspected.is_set()
    assert (await old[1].check()).ok
    found = await task
    assert (found.name, found.ok) == (PAIRS, False), found


async def test_a_bad_node_of_the_cluster_is_found_by_a_sound_newcomer(cluster: Cluster) -> None:
    bad = await cluster.node("b", spoil=True, registered=True)
    other, newcomer = await cluster.node("c", registered=True), await cluster.node("a")
    found = await newcomer.check()
    assert found.ok, found
    assert "b: wrong" in found.detail
    assert "c: ok" in found.detail
    assert bad.pairs.suspected.is_set()
    assert not other.pairs.suspected.is_set()
    verdict = await bad.check()
    assert (verdict.name, verdict.ok) == (PAIRS, False), "the second partner is known to be good"


async def test_of_two_nobody_is_named_until_a_third_comes(cluster: Cluster) -> None:
    bad, sound = await cluster.node("a", spoil=True, registered=True), await cluster.node("b", registered=True)
    first = await asyncio.gather(bad.check(1.5), sound.check(1.5))
    assert [(one.name, one.ok) for one in first] == [(PAIRS_OPEN, False)] * 2
    third = await cluster.node("c", registered=True)
    later = await asyncio.gather(bad.check(), sound.check(), third.check())
    assert [one.ok for one in later] == [False, True, True]
    assert later[0].name == PAIRS


async def test_who_accepts_and_then_says_nothing_is_late_and_who_is_not_there_is_no_evidence(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.agent.exchange.EXCHANGE_SECONDS", 0.3)
    held = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(wire.encode(Accepted(good=True)))
        await held.wait()
        writer.close()

    servers = [await asyncio.start_server(accept, "127.0.0.1", 0) for _ in range(2)]
    for number, server in enumerate(servers):
        port = server.sockets[0].getsockname()[1]
        record = wire.NodeRecord(node=f"s{number}", incarnation="i", address="h", peer_address=f"127.0.0.1:{port}", slots=1)
        await cluster.store.put(KEYS.node(f"s{number}"), msgspec.json.encode(record))
    gone = await cluster.node("gone", registered=True)
    await gone.server.close()
    node = await cluster.node("a")
    found = await node.check()
    assert (found.name, found.ok) == (PAIRS_UNREACHED, False), found
    assert "gone: absent" in found.detail
    sound = await cluster.node("t", registered=True)
    assert (await node.check()).ok
    assert sound.pairs.good
    held.set()
    for server in servers:
        server.close()


async def test_over_tls_a_changed_byte_is_seen_too_and_a_name_must_be_the_certificates(tmp_path: Path, cluster: Cluster) -> None:
    store = cluster.store
    authority = certificates.make_authority(tmp_path, days=1)
    files: dict[str, security.Files] = {}
    for name in ("a", "b"):
        certificate, key = certificates.issue(tmp_path, "node", name, hosts=("127.0.0.1",), days=1)
        files[name] = security.Files(str(certificate), str(key), str(authority))
    answering = Pairs("b", store, KEYS, address=lambda: "", tls=security.Tls(files["b"], "client"))
    server = PeerServer("127.0.0.1", 0, _nothing, pair=answering.serve, tls=security.Tls(files["b"], "server"))
    await server.start()
    tls = security.Tls(files["a"], "client")
    assert (await ask("a", "b", server.address, tls=tls, num_bytes=SIZE)).outcome == "ok"
    assert (await ask("a", "b", server.address, tls=tls, num_bytes=SIZE, spoil=True)).outcome == "wrong"
    assert (await ask("c", "b", server.address, tls=tls, num_bytes=SIZE)).outcome == "absent", "it is a, by its certificate"
    assert (await ask("a", "b", server.address, num_bytes=SIZE)).outcome == "absent"
    await server.close()


OK, WRONG, BY_GOOD, LATE, ABSENT = (
    Exchange(outcome="ok"),
    Exchange(outcome="wrong"),
    Exchange(outcome="wrong", good=True),
    Exchange(outcome="late", good=True),
    Exchange(outcome="absent"),
)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([], "alone"),
        ([ABSENT, ABSENT, ABSENT], "alone"),
        ([OK], "good"),
        ([BY_GOOD, BY_GOOD, OK], "good"),
        ([BY_GOOD], "open"),
        ([WRONG, WRONG, WRONG], "open"),
        ([WRONG, BY_GOOD], "bad"),
        ([LATE], "open"),
        ([LATE, ABSENT], "open"),
        ([LATE, LATE], "unreached"),
        ([LATE, LATE, WRONG], "open"),
    ],
)
def test_verdicts(found: list[Exchange], verdict: str) -> None:
    assert judge({str(number): one for number, one in enumerate(found)}) == verdict


def test_whom_to_ask() -> None:
    there = ["a", "b", "d", "e"]
    assert next_partner("c", there, {}) == "d", "the next in the ring"
    assert next_partner("e", ["a", "b"], {}) == "a"
    assert next_partner("c", there, {"d": WRONG}) == "e"
    assert next_partner("c", ["d", "e"], {"d": WRONG, "e": WRONG}) == "e", "the first one that failed comes last"
    assert next_partner("c", ["d", "e"], {"d": WRONG, "e": BY_GOOD}) == "d"
    assert next_partner("c", ["e"], {"e": BY_GOOD}) == ""


def test_blocks_differ_by_sender_and_by_exchange() -> None:
    assert len({block(nonce, sender, 64) for nonce in "xy" for sender in "ab"}) == 4


@pytest.mark.parametrize(
    ("name", "state", "action"),
    [(PAIRS, "unhealthy", "reboot"), (PAIRS_UNREACHED, "unhealthy", "watch"), (PAIRS_OPEN, "degraded", "watch")],
)
def test_what_is_held_against_the_node(name: str, state: str, action: str) -> None:
    report = Preflight(ok=True, seconds=1.0, checks=(CheckResult(name="memory", ok=True, seconds=1.0),))
    report = with_pairs(report, CheckResult(name=name, ok=False, seconds=2.0, detail="d"))
    assert [(one.state, one.action) for one in findings_of(report)] == [(state, action)]
    later = with_pairs(report, CheckResult(name=PAIRS, ok=True, seconds=2.0))
    assert later.ok
    assert [one.name for one in later.checks] == ["memory", PAIRS]
    assert findings_of(later) == ()


async def test_agents_of_a_cluster_keep_a_bad_node_out(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real agents, one of which sends a wrong bit: its greeting says that it is unhealthy, those of the others that they are not."""
    flags = ("--health-seconds", "5", "--preflight-seconds", str(LIMIT), "--kernel-log", "")

    async def start(node: str, fault: str = "") -> None:
        with monkeypatch.context() as patch:
            patch.setenv(FAULT_VARIABLE, fault)
            await scene.agent(*flags, node=node)

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(start("n0"), start("n1"), start("n2"))
        await start("bad", "pairs")
    greetings = {node: said for node, said in scene.leader.said if isinstance(said, wire.Hello)}
    assert {node: said.health.state for node, said in greetings.items()} == {
        "n0": "healthy",
        "n1": "healthy",
        "n2": "healthy",
        "bad": "unhealthy",
    }
    assert "preflight_failed: pairs" in greetings["bad"].health.reason
    reports = {node: json.loads((tmp_path / node / "preflight.json").read_text()) for node in greetings}
    assert {node: report["ok"] for node, report in reports.items()} == {"n0": True, "n1": True, "n2": True, "bad": False}
