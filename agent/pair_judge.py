"""Which of two nodes is bad, when the bytes that they exchanged are not what they should be? Pure.

An exchange that fails says nothing about its sides: either may be the bad one. So each of the two does a second round, with another
partner that is known to be good because it has passed with somebody. Who fails with two, one of them good, is the bad one. Who passes
once is not. A good partner that cannot be had names nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Outcome = Literal["ok", "wrong", "late", "absent"]
Verdict = Literal["good", "bad", "unreached", "open", "alone"]

LEAST_UNREACHED = 2
"""So many partners that did not answer in time, and none that did: then the network of this node is the common part."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange with one partner. `wrong`: bytes differed, or the two disagree on what they hold; `late`: no end in time;
    `absent`: nobody there who takes part (refused, gone, busy, an older version), which is evidence against nobody.
    """

    outcome: Outcome
    good: bool = False
    """The partner had passed with somebody when it said so."""
    seconds: float = 0.0
    detail: str = ""


def judge(found: Mapping[str, Exchange]) -> Verdict:
    """This node by the exchanges with its partners, {partner: the last one}.

    Returns:
        good: one passed. bad: two or more were wrong, one of these with a good partner. unreached: none passed, and two or more
        did not end in time. open: something failed and it is not known whose fault it is. alone: there was nobody.
    """
    by = [one.outcome for one in found.values()]
    if "ok" in by:
        return "good"
    wrong = [one for one in found.values() if one.outcome == "wrong"]
    if len(wrong) > 1 and any(one.good for one in wrong):
        return "bad"
    if by.count("late") >= LEAST_UNREACHED and not wrong:
        return "unreached"
    return "open" if wrong or "late" in by else "alone"


def is_settled(one: Exchange) -> bool:
    """Whether the same partner need not be asked again: it passed, or it is known to be good and did not."""
    return one.outcome == "ok" or (one.outcome == "wrong" and one.good)


def next_partner(own: str, there: Iterable[str], found: Mapping[str, Exchange]) -> str:
    """Whom to ask next: a new one first, in a ring that begins after this node's own name (so that all nodes of a cluster that start
    together ask different ones), then those that may answer otherwise by now, the one that failed first last. Empty: nobody.

    Args:
        there: names of the others.
        found: exchanges so far.
    """
    ring = sorted(there, key=lambda name: (name < own, name))
    fresh = [name for name in ring if name not in found]
    if fresh:
        return fresh[0]
    tried = list(found)
    again = sorted((name for name in ring if not is_settled(found[name])), key=tried.index, reverse=True)
    return again[0] if again else ""


def told(found: Mapping[str, Exchange]) -> str:
    """The exchanges in words, for the report."""
    parts = [f"{name}: {one.outcome} in {one.seconds:.2f} s{' (' + one.detail + ')' if one.detail else ''}" for name, one in found.items()]
    return "; ".join(parts)
