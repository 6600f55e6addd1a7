"""Workers that may leave their state behind before a warm restart kills them: who is waited for, and how long."""

from __future__ import annotations

import signal

import msgspec
from tests.agent.test_core import Node, ended, order

from regrow import wire
from regrow.agent import lastwords
from regrow.agent import machine as m


def wanted(generation: int) -> wire.StartGeneration:
    """An order of a leader that wants the newest state."""
    made = order(generation)
    return msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, gasp=1))


def able(rank: int) -> m.Said:
    """A worker says that it can."""
    return m.Said(wire.WorkerWatch(job="toy", generation=1, rank=rank, pid=100 + rank, in_place=False, gasps=True))


def phase(rank: int, name: str, seconds: float = 0.0) -> m.Said:
    """A worker passed a phase."""
    return m.Said(wire.WorkerPhase(generation=1, rank=rank, phase=name, seconds=seconds))


def trained(*, first_step: bool = True) -> Node:
    """Two workers that can, and hold something."""
    node = Node().running(1)
    node.feed(able(0), able(1))
    if first_step:
        node.feed(phase(0, "first_step"), phase(1, "first_step"))
    return node


def kills(effects: list[m.Effect]) -> list[int]:
    """Signals among effects."""
    return [effect.signal for effect in effects if isinstance(effect, m.Kill)]


def asked(effects: list[m.Effect]) -> list[dict[int, int]]:
    """Who is asked."""
    return [effect.pids for effect in effects if isinstance(effect, m.AskGasp)]


def test_survivors_are_asked_and_killed_when_the_last_of_them_is_done() -> None:
    node = trained()
    node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9),)))
    effects = node.order(wanted(2))
    assert (asked(effects), kills(effects)) == ([{1: 101}], [])
    assert kills(node.feed(phase(1, wire.GASPED_PHASE))) == [signal.SIGKILL]


def test_who_did_it_by_itself_is_not_waited_for() -> None:
    node = trained()
    node.feed(phase(0, wire.GASPED_PHASE), phase(1, wire.GASPED_PHASE))
    effects = node.order(wanted(2))
    assert (asked(effects), kills(effects)) == ([], [signal.SIGKILL])


def test_nobody_waits_where_nobody_holds_anything() -> None:
    effects = trained(first_step=False).order(wanted(2))
    assert (asked(effects), kills(effects)) == ([], [signal.SIGKILL])


def test_nobody_waits_where_the_state_is_not_to_be_trusted() -> None:
    effects = trained().order(order(2))
    assert (asked(effects), kills(effects)) == ([], [signal.SIGKILL])


def test_a_worker_that_does_not_answer_is_killed_at_its_limit() -> None:
    node = trained()
    node.order(wanted(2))
    node.at += lastwords.ANSWER_SECONDS - 0.01
    assert not kills(node.feed(m.Tick()))
    node.at += 0.02
    assert kills(node.feed(m.Tick())) == [signal.SIGKILL]


def test_who_has_begun_has_as_long_as_it_said_and_not_longer_than_the_limit() -> None:
    for expected, until in ((0.5, lastwords.ANSWER_SECONDS + 0.5), (60.0, lastwords.LIMIT_SECONDS)):
        node = trained()
        node.order(wanted(2))
        node.feed(phase(0, wire.GASPED_PHASE), phase(1, wire.GASPING_PHASE, expected))
        node.at += until - 0.01
        assert not kills(node.feed(m.Tick()))
        node.at += 0.02
        assert kills(node.feed(m.Tick())) == [signal.SIGKILL]


def test_a_worker_that_dies_while_it_is_waited_for_is_not_waited_for_and_not_a_failure() -> None:
    node = trained()
    node.order(wanted(2))
    node.feed(phase(0, wire.GASPED_PHASE))
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(ended(1, number=9),)))
    assert kills(effects) == [signal.SIGKILL]
    assert not [effect for effect in effects if isinstance(effect, m.Send) and isinstance(effect.message, wire.WorkersExited)]


def test_an_order_to_stop_waits_for_nobody() -> None:
    node = trained()
    node.order(wanted(2))
    effects = node.order(wire.StopGeneration(epoch=1, seq=9, job="toy", generation=1))
    assert kills(effects) == [signal.SIGKILL]
