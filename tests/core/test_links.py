"""All members hang alike because the data network of one is cut: it is found by what they say of each other, never by one witness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from world import LOST_PEER, POLICY, STARTED, World, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.links import Reach, cut_off, targets


def words(members: tuple[str, ...], broken: Iterable[tuple[str, str]]) -> dict[str, Reach]:
    """What each member says when connections between these pairs fail, whoever tries; '*' is everybody."""
    pairs = set(broken)

    def fails(one: str, other: str) -> bool:
        return bool(pairs & {(one, other), (other, one), (one, "*"), (other, "*")})

    return {
        name: Reach(
            reached=frozenset(peer for peer in peers if not fails(name, peer)),
            unreached=frozenset(peer for peer in peers if fails(name, peer)),
        )
        for name, peers in targets(members).items()
    }


SIX = tuple("abcdef")


@pytest.mark.parametrize(
    ("members", "broken", "out"),
    [
        ("abc", [("b", "*")], "b"),
        ("ab", [("a", "b")], ""),  # one witness each
        ("abc", [("a", "b")], ""),  # one link: each of the two reaches the third
        ("abcdef", [("b", "*"), ("e", "*")], "be"),
        ("abcd", [("a", "*"), ("b", "*")], ""),  # half of all: the words of the others are no majority
        ("abcd", [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")], ""),  # split in two halves
        ("abcde", [(one, other) for one in "ab" for other in "cde"], "ab"),  # split: the smaller side goes
        ("abcdef", [("a", "b"), ("a", "c"), ("a", "d")], "a"),  # 3 of 5 cannot reach it
        ("abcdef", [("a", "b"), ("a", "c")], ""),  # 2 of 5
        ("abcdef", [], ""),
    ],
)
def test_who_is_cut_off(members: str, broken: list[tuple[str, str]], out: str) -> None:
    found = cut_off(words(tuple(members), broken), tuple(members))
    assert sorted(one.node for one in found) == sorted(out)


def test_one_that_says_that_it_reaches_nobody_is_no_evidence_against_anybody() -> None:
    reports = words(SIX, []) | {"c": Reach(unreached=frozenset(SIX) - {"c"})}
    assert cut_off(reports, SIX) == ()


def test_those_who_did_not_answer_are_not_counted() -> None:
    reports = words(SIX, [("b", "*")])
    (found,) = cut_off({name: reports[name] for name in "acd"}, SIX)
    assert (found.node, found.num_failed, found.num_tried) == ("b", 3, 3)
    assert cut_off({"a": reports["a"]}, SIX) == ()


def test_thousands_try_eleven_each_and_a_rack_is_found() -> None:
    members = tuple(f"n{index:04d}" for index in range(2048))
    tried = targets(members)
    assert {len(peers) for peers in tried.values()} == {11}
    rack = members[640:656]
    found = cut_off(words(members, [(name, "*") for name in rack]), members)
    assert sorted(one.node for one in found) == list(rack)


def test_of_two_members_a_third_node_knows_which_it_is() -> None:
    reports = words(tuple("abh"), [("b", "*")])
    assert [one.node for one in cut_off(reports, "ab", "h")] == ["b"]
    assert cut_off({name: reports[name] for name in "ab"}, "ab") == ()
    cut = words(tuple("abh"), [("h", "*")])
    assert cut_off(cut, "ab", "h") == (), "whoever is no member is not left out"


# --- what is done about it


def job(*nodes: str, **changes: Any) -> World:
    """A running job whose members answer when the test says so."""
    world = running(*nodes, **changes)
    world.all_reached = False
    return world


def stalled(world: World, *, halted: int | None = None) -> None:
    """No rank moves; all are at the same place."""
    ranks = tuple(
        wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase="stopped" if rank == halted else "step", age_seconds=9.0)
        for rank in range(world.generation.spec.world_size)
    )
    world.now += 9
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 9, limit_seconds=8, ranks=ranks))
    world.wait(0.2)


def answer(world: World, cut: str = "", only: str = "") -> None:
    """Members that were asked say whom they reach."""
    (asked,) = (action for action in world.actions if isinstance(action, a.AskReach))
    for node, peers in asked.peers.items():
        bad = tuple(peer for peer in peers if cut in (node, peer))
        good = tuple(peer for peer in peers if peer not in bad)
        if not only or node in only:
            world.tell(e.PeersWereProbed(at=world.now, node=node, job="j", generation=1, reached=good, unreached=bad))


def test_hang_of_all_alike_asks_and_the_host_that_nobody_reaches_is_left_out() -> None:
    world = job("a", "b", "c", "d")
    stalled(world)
    assert world.generation.number == 1
    answer(world, cut="c")
    world.wait(POLICY.stacks_seconds)
    assert world.generation.spec.nodes == ("a", "b", "d")
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.node, incident.cause) == ("unreachable", "c", "infrastructure")
    assert incident.text == "3 of 3 peers cannot reach c on the data network"
    record = world.view.quarantine["hw-c"]
    assert (record.state, record.node, record.evidence) == ("quarantined", "c", ("unreachable",))
    world.step(3)
    world.step(4)
    assert world.job.incidents[-1].closed


def test_two_members_and_a_spare() -> None:
    world = job("a", "b")
    world.join("s")
    stalled(world)
    (asked,) = (action for action in world.actions if isinstance(action, a.AskReach))
    assert sorted(asked.peers) == ["a", "b", "s"]
    answer(world, cut="a")
    world.wait(POLICY.stacks_seconds)
    assert world.generation.spec.nodes == ("s", "b"), "the spare has its ranks"
    assert world.view.quarantine["hw-a"].state == "quarantined"


def test_two_members_alone_are_not_asked() -> None:
    world = job("a", "b")
    stalled(world)
    assert not world.take(a.AskReach)


def test_all_reach_each_other_so_the_same_members_start_again() -> None:
    world = job("a", "b", "c", "d")
    stalled(world)
    answer(world)
    world.wait(POLICY.stacks_seconds)
    assert world.generation.number == 2
    assert world.generation.spec.nodes == ("a", "b", "c", "d")
    assert world.job.incidents[-1].kind == "hang"
    assert not world.view.quarantine


def test_members_that_never_answer_are_not_waited_for_for_ever() -> None:
    world = job("a", "b", "c", "d")
    stalled(world)
    answer(world, cut="c", only="ab")
    world.wait(POLICY.stacks_seconds)
    assert world.generation.number == 1
    world.wait(POLICY.reach_seconds)
    assert world.generation.spec.nodes == ("a", "b", "d")
    assert world.job.incidents[-1].text.startswith("2 of 2 peers")


def test_one_answer_alone_accuses_nobody() -> None:
    world = job("a", "b", "c", "d")
    stalled(world)
    answer(world, cut="c", only="a")
    world.wait(POLICY.reach_seconds + 0.1)
    assert world.generation.spec.nodes == ("a", "b", "c", "d")
    assert not world.view.quarantine


def test_process_that_does_not_run_is_reason_enough() -> None:
    world = job("a", "b", "c", "d")
    stalled(world, halted=2)
    assert not world.take(a.AskReach)


def test_workers_that_all_lost_a_peer_and_nobody_is_gone() -> None:
    """The question is out before the time for an explanation is over; an explanation that comes makes it pointless."""
    world = job("a", "b", "c")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(POLICY.victim_seconds / 2)
    answer(world, cut="b")
    world.wait(POLICY.victim_seconds)
    assert world.generation.spec.nodes == ("a", "c")
    assert world.job.incidents[-1].kind == "unreachable"


def test_an_explained_loss_asks_nothing() -> None:
    world = job("a", "b", "c")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.exit(2, signal=9)
    world.wait(5)
    assert world.generation.number == 2
    assert not world.take(a.AskReach)


def test_start_that_is_late_on_all_alike_asks() -> None:
    world = job("a", "b", "c")
    world.answer = False
    world.exit(0, signal=9)
    world.wait(1)
    world.tell(e.SpareStoreChanged(at=world.now, node="a", address="a:5"))
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=2))
    for node in "abc":
        for phase in STARTED[:4]:
            world.tell(world.phase_event(node, phase, job="j", generation=2))
    world.take()
    world.wait(POLICY.start_seconds + 1)
    (asked,) = world.take(a.AskReach)
    assert asked.peers == {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}


def test_more_hosts_than_the_breaker_allows_are_left_out_and_a_person_is_called() -> None:
    nodes = tuple(f"n{index}" for index in range(12))
    world = job(*nodes, max_nodes=12, global_batch=24, mesh=None)
    stalled(world)
    (asked,) = (action for action in world.actions if isinstance(action, a.AskReach))
    cut = set(nodes[:4])
    for node, peers in asked.peers.items():
        bad = tuple(peer for peer in peers if node in cut or peer in cut)
        good = tuple(peer for peer in peers if peer not in bad)
        world.tell(e.PeersWereProbed(at=world.now, node=node, job="j", generation=1, reached=good, unreached=bad))
    world.wait(POLICY.stacks_seconds)
    assert set(world.generation.spec.nodes) == set(nodes) - cut
    assert not world.view.quarantine
    (page,) = world.take(a.Page)
    assert "4 nodes cannot be reached at once" in page.reason


# --- the way back


def cut_off_c(**policy: float) -> World:
    """A job of a, b, d, from which c was put out because nobody reached it; its agent is heard all the while."""
    world = job("a", "b", "c", "d", policy=msgspec.structs.replace(POLICY, **policy))
    stalled(world)
    answer(world, cut="c")
    world.wait(POLICY.stacks_seconds)
    world.step(3)
    world.step(4)
    world.take()
    assert world.view.quarantine["hw-c"].state == "quarantined"
    return world


def tried(world: World, *, reached: str = "", missed: str = "") -> None:
    """Witnesses say whether they reach c."""
    for node in reached:
        world.tell(e.PeersWereProbed(at=world.now, node=node, job="", generation=0, reached=("c",)))
    for node in missed:
        world.tell(e.PeersWereProbed(at=world.now, node=node, job="", generation=0, unreached=("c",)))


def test_others_try_it_again_and_most_that_reach_it_bring_it_back_before_its_time() -> None:
    world = cut_off_c()
    due = world.view.quarantine["hw-c"].until
    world.wait(POLICY.reach_again_seconds)
    assert world.take(a.AskAgain) == [a.AskAgain(node="c", witnesses=("a", "b", "d"))]
    tried(world, reached="a", missed="b")
    assert world.view.quarantine["hw-c"].state == "quarantined", "one of three is no evidence"
    tried(world, reached="d")
    assert world.view.quarantine["hw-c"].state == "burn_in"
    assert "2 of 3 nodes reach c" in world.reason
    assert due is not None
    assert world.now < due - POLICY.quarantine_seconds / 2
    world.wait(POLICY.burn_in_seconds + 1)
    assert world.view.quarantine["hw-c"].state == "probation"
    world.step(5)
    world.wait(POLICY.growth_cooldown_seconds)
    (save,) = world.take(a.AskSave)
    assert save.purpose == "growth"


def test_while_they_do_not_reach_it_they_are_asked_again_and_again() -> None:
    world = cut_off_c()
    for _ in range(3):
        world.wait(POLICY.reach_again_seconds)
        assert [asked.node for asked in world.take(a.AskAgain)] == ["c"]
        tried(world, reached="a", missed="bd")
    assert world.view.quarantine["hw-c"].state == "quarantined"
    tried(world, reached="x")
    assert world.view.quarantine["hw-c"].state == "quarantined", "who was not asked says nothing"


def test_answers_of_an_earlier_try_do_not_count_for_the_next() -> None:
    world = cut_off_c()
    world.wait(POLICY.reach_again_seconds)
    tried(world, reached="a", missed="bd")
    world.wait(POLICY.reach_again_seconds)
    tried(world, reached="b", missed="ad")
    assert world.view.quarantine["hw-c"].state == "quarantined"


@pytest.mark.parametrize("why", ["off", "silent", "sick", "alone"])
def test_who_is_not_tried(why: str) -> None:
    world = cut_off_c(reach_again_seconds=0.0) if why == "off" else cut_off_c()
    if why == "silent":
        world.tell(e.NodeSilent(at=world.now, node="c", last_heard_at=world.now - 2))
    if why == "sick":
        bad = wire.HealthVerdict(state="unhealthy", action="replace", reason="XID 79")
        world.tell(e.NodeHealth(at=world.now, node="c", verdict=bad))
    if why == "alone":
        for node in "bd":
            world.lose(node)
    world.take()
    world.wait(2 * POLICY.reach_again_seconds)
    assert not world.take(a.AskAgain)


@pytest.mark.parametrize("why", ["leaves", "quarantined", "silent"])
def test_who_is_no_witness(why: str) -> None:
    world = cut_off_c()
    world.join("0", "1")  # before all others by name
    match why:
        case "leaves":
            world.tell(e.NodeLeaving(at=world.now, node="0", reason="SIGTERM"))
        case "quarantined":
            record = msgspec.structs.replace(world.view.quarantine["hw-c"], key="hw-0", node="0", evidence=())
            world.tell(e.QuarantineLoaded(at=world.now, records=(record,)))
        case _:
            world.tell(e.NodeSilent(at=world.now, node="0", last_heard_at=world.now - 2))
    world.take()
    world.wait(POLICY.reach_again_seconds)
    assert [asked.witnesses for asked in world.take(a.AskAgain)] == [("1", "a", "b")]


def test_an_operator_brings_it_back_at_once() -> None:
    world = cut_off_c()
    world.tell(e.NodeCommandGiven(at=world.now, node="c", command="clear"))
    assert world.view.quarantine["hw-c"].state == "probation"
    world.wait(POLICY.reach_again_seconds + 1)
    assert not world.take(a.AskAgain)


def test_a_second_time_it_waits_twice_as_long() -> None:
    world = cut_off_c()
    record = msgspec.structs.replace(world.view.quarantine["hw-c"], strikes=2, since=world.now)
    world.tell(e.QuarantineLoaded(at=world.now, records=(record,)))
    world.take()
    world.wait(2 * POLICY.reach_again_seconds - 1)
    assert not world.take(a.AskAgain)
    world.wait(2)
    assert len(world.take(a.AskAgain)) == 1
