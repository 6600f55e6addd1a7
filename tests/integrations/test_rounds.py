"""Who is in the next round: tables over pictures."""

from __future__ import annotations

import pytest

from regrow import wire
from regrow.integrations.rounds import Member, Picture, Round, Seen, changes, elect, refusal, waiting
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.effects import Cordon


def picture(current: str = "", closed: bool = False, **wants: int) -> Picture:
    """Members named by letters that arrived in the order given; `current` are those of round 1."""
    members = {name: Seen(Member(id=name, node=name, wants=number), 10 + place) for place, (name, number) in enumerate(wants.items())}
    found = Round(number=1, members=tuple(current), nodes=tuple(current), address="127.0.0.1", port=1, epoch=1) if current else None
    return Picture(members=members, current=found, revision=5 if current else 0, closed=closed)


@pytest.mark.parametrize(
    ("seen", "settled", "expected"),
    [
        (picture(a=1), False, ""),  # one of two to three: there may come more
        (picture(a=1, b=1), False, ""),
        (picture(a=1, b=1), True, "ab"),
        (picture(a=1), True, ""),  # too few, however long
        (picture(a=1, b=1, c=1), False, "abc"),  # complete: at once
        (picture(a=1, b=1, c=1, d=1), False, "abc"),  # the last one is a spare
        (picture("abc", a=2, b=1, c=2), True, ""),  # b still trains: nobody is left behind
        (picture("abc", a=2, c=2), True, "ac"),  # b died
        (picture("bca", d=2, a=2, b=2, c=2), False, "bca"),  # ranks are kept, newcomers come after them
        (picture("ab", d=2, b=2, a=2), False, "abd"),
        (picture(a=1, b=1, c=1, closed=True), True, ""),
    ],
)
def test_elect(seen: Picture, settled: bool, expected: str) -> None:
    assert "".join(elect(seen, least=2, most=3, settled=settled)) == expected


@pytest.mark.parametrize(
    ("seen", "me", "mine", "expected"),
    [
        (picture("ab", a=1, b=1), "a", 1, 0),
        (picture("ab", a=1, b=1, c=2), "a", 1, 1),  # room for a third
        (picture("ab", a=1, b=1, c=2, d=2), "a", 1, 1),  # for one of two
        (picture("abc", a=1, b=1, c=1, d=2), "a", 1, 0),  # no room: d is a spare
        (picture("abc", a=1, b=1, d=2), "a", 1, 2),  # c died and d can take its place
        (picture("ab", a=1, b=2), "a", 1, 1),  # b failed and asks for a new round
        (picture("ab", a=1), "a", 1, 1),
        (picture("ab", a=1, b=1), "c", 1, 1),  # the round went on without c: fenced
        (picture("ab", a=1, b=1), "a", 2, 1),  # a round that the store does not know
        (picture("ab", a=1, b=2, closed=True), "a", 1, 0),
        (picture("ab", a=1, b=2), "a", 0, 0),  # not in a round: nothing to restart
    ],
)
def test_changes(seen: Picture, me: str, mine: int, expected: int) -> None:
    assert changes(seen, me, mine, most=3) == expected


def test_waiting_is_by_rank_then_by_arrival() -> None:
    assert waiting(picture("ba", d=2, c=2, a=2, b=2)) == ["b", "a", "d", "c"]


CORDON = (Cordon(node="n1", by="ann"),)
DRAIN = (Cordon(node="n1", drain=True, by="ann"),)
RECORD = wire.NodeRecord(
    node="n1",
    incarnation="i",
    address="127.0.0.1",
    peer_address="127.0.0.1:1",
    slots=1,
    hardware_id="chassis-1",
    devices=(wire.Device(index=0, uuid="GPU-1", name="H100", memory_bytes=1),),
)


def held(key: str, state: str = "quarantined", node: str = "n1") -> tuple[QuarantineRecord, ...]:
    return (QuarantineRecord(key=key, state=state, since=1.0, reason="xid 79", node=node),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "cordons", "quarantine", "trains", "expected"),
    [
        (RECORD, (), (), False, ""),
        (None, CORDON, (), False, "cordoned by ann"),
        (None, CORDON, (), True, ""),  # a cordon lets run what runs
        (None, DRAIN, (), True, "drained by ann"),
        (RECORD, (), held("GPU-1"), True, "quarantined: xid 79"),
        (RECORD, (), held("GPU-1", "burn_in"), False, "burn_in: xid 79"),
        (RECORD, (), held("GPU-1", "probation"), False, ""),
        (RECORD, (), held("chassis-1", node="other"), False, "quarantined: xid 79"),  # the same machine under another name
        (RECORD, (), held("GPU-9"), False, ""),  # other hardware under this name: repaired
        (None, (), held("GPU-9"), False, "quarantined: xid 79"),  # no agent says which hardware it is: the name decides
        (None, (), held("GPU-9", node="n2"), False, ""),
    ],
)
def test_refusal(
    record: wire.NodeRecord | None, cordons: tuple[Cordon, ...], quarantine: tuple[QuarantineRecord, ...], trains: bool, expected: str
) -> None:
    assert refusal("n1", record, cordons, quarantine, trains=trains) == expected
