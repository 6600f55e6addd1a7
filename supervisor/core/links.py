"""Which members the others cannot reach over the data network, from what they say of each other (pure).

Asked when a generation does not move and nobody is singled out: the management network may be fine while the network that the
workers use is not, and then all members hang alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgspec

LEAST_ASKED = 3
"""With two, one cannot reach the other: nobody can say whose fault that is."""
HELPERS = 3
"""So many nodes that are not members, if there are any, are asked as well: of a generation of two they know which it is."""
LEAST_WITNESSES = 2
EVIDENCE = "unreachable"
"""In the record of a host that was put out because the others could not reach it."""
_ALL_PAIRS = 17
"""Up to so many members everybody tries everybody; of more each tries those at distances 1, 2, 4, 8 ... in the ring."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What one member found: peers whose host answered, and those whose did not."""

    reached: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()


class CutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A member that most of those who tried cannot reach."""

    node: str
    num_failed: int
    num_tried: int


def targets(members: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """{member: peers that it is to try}. Everybody is tried by as many as it tries itself: 2,048 members, 11 each."""
    count = len(members)
    steps = range(1, count) if count <= _ALL_PAIRS else [1 << power for power in range((count - 1).bit_length())]
    return {name: tuple(members[(index + step) % count] for step in steps) for index, name in enumerate(members)}


def cut_off(reports: Mapping[str, Reach], members: Iterable[str], helpers: Iterable[str] = ()) -> tuple[CutOff, ...]:
    """Members to leave out, worst first; none when the words do not single a minority of all that were asked out.

    One after the other the member that the greatest share of its witnesses cannot reach is taken out, with what it says of
    others: over half of them, and at least two. What a member says of itself is no evidence. When half of all or more would be
    taken out, the network is split and this view cannot tell which side is the right one.
    """
    own = set(members)
    names = own | set(helpers)
    failed: dict[str, set[str]] = {name: set() for name in names}
    tried: dict[str, set[str]] = {name: set() for name in names}
    for witness, report in reports.items():
        for peer in report.reached | report.unreached:
            if peer not in names or peer == witness:
                continue
            tried[peer].add(witness)
            if peer in report.unreached:
                failed[peer].add(witness)
    queue = [_rank(name, failed[name], tried[name]) for name in sorted(names) if _accused(failed[name], tried[name])]
    heapq.heapify(queue)
    found: dict[str, CutOff] = {}
    while queue:
        rank = heapq.heappop(queue)
        name = rank[-1]
        if name in found or rank != _rank(name, failed[name], tried[name]):
            continue  # said anew since
        found[name] = CutOff(node=name, num_failed=len(failed[name]), num_tried=len(tried[name]))
        report = reports.get(name, Reach())
        for peer in report.reached | report.unreached:
            if peer not in names or peer in found:
                continue
            failed[peer].discard(name)
            tried[peer].discard(name)
            if _accused(failed[peer], tried[peer]):
                heapq.heappush(queue, _rank(peer, failed[peer], tried[peer]))
    return tuple(one for one in found.values() if one.node in own) if 2 * len(found) < len(names) else ()


def _accused(failed: set[str], tried: set[str]) -> bool:
    return len(failed) >= LEAST_WITNESSES and 2 * len(failed) > len(tried)


def _rank(name: str, failed: set[str], tried: set[str]) -> tuple[float, int, str]:
    """Least first: the greatest share, then the most witnesses."""
    return -len(failed) / len(tried), -len(failed), name
