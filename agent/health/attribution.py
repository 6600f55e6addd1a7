"""Who broke the step, who only suffered, and whom did we stop ourselves? Pure.

The rank that reports a timeout is usually a victim; the cause often prints nothing. What decides, in this order:

1. a node that is gone, or whose health verdict condemns the part that a rank used;
2. what a rank said itself: the first cause in its last lines (symptoms excluded), or how the kernel ended it;
3. silence: others wait in a collective, one neither reports nor moves; among several, the one that is furthest behind.

Wall clocks of hosts are never compared: order comes from progress (steps), from what each rank said, and from the one
observer that received the reports. Where that is not enough the answer is `unknown`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from regrow.agent.health import classify
from regrow.wire import HealthVerdict, RankProgress, WorkerExit

Role = Literal["cause", "victim", "torn_down", "finished", "unknown"]

NODE, PART, SPOKEN, ENDED, SILENT = 5, 4, 3, 2, 1
"""Strength of a claim to be the cause, strongest first: node gone, condemned part, own words, end of the process, silence."""

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank of the broken generation."""

    rank: int
    node: str
    exit: WorkerExit | None = None
    """None: it has not ended (or nobody heard of it)."""
    last_lines: tuple[str, ...] = ()
    progress: RankProgress | None = None
    device_uuid: str = ""
    received: int | None = None
    """Position in which the one observer received this end; no clock."""
    stopped: bool = False
    """The process is in state T: somebody stopped it."""


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one node."""

    node: str
    lost: bool = False
    health: HealthVerdict = HealthVerdict()
    kernel_lines: tuple[str, ...] = ()
    """Lines of its kernel log since the generation began."""


class RankFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one rank, with its reasons."""

    rank: int
    node: str
    role: Role
    kind: str = msgspec.field(name="class", default="")
    """Class of what happened, in the words of `regrow health --classify` (or `hang`, `node_lost`)."""
    action: str = ""
    evidence: tuple[str, ...] = ()


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a generation."""

    ranks: tuple[RankFinding, ...]
    kind: str = msgspec.field(name="class", default="unknown")
    action: str = "symptom_find_first_failure"
    cause_ranks: tuple[int, ...] = ()
    cause_nodes: tuple[str, ...] = ()
    reason: str = ""


class _Claim(msgspec.Struct, frozen=True):
    strength: int
    tier: int
    kind: str
    action: str
    evidence: str
    role: Role = "cause"


def attribute(ranks: Iterable[RankEvidence], nodes: Iterable[NodeEvidence] = ()) -> Attribution:
    """Tell cause, victims and torn down apart. The order of the arguments does not matter."""
    known = sorted(ranks, key=lambda one: one.rank)
    about = {one.node: one for one in nodes}
    claims = {one.rank: _claim(one, about.get(one.node, NodeEvidence(node=one.node))) for one in known}
    _silence(known, claims)
    causes = _strongest(known, claims)
    findings = tuple(_finding(one, claims[one.rank], causes) for one in known)
    if not causes:
        return Attribution(ranks=findings, reason="nothing tells a cause from its victims")
    first = claims[causes[0].rank]
    assert first is not None
    names = ", ".join(str(one.rank) for one in causes)
    return Attribution(
        ranks=findings,
        kind=first.kind,
        action=first.action,
        cause_ranks=tuple(one.rank for one in causes),
        cause_nodes=tuple(dict.fromkeys(one.node for one in causes)),
        reason=f"rank {names}: {first.evidence}",
    )


def _claim(one: RankEvidence, node: NodeEvidence) -> _Claim | None:
    """What speaks for this rank as the cause, or names it a victim or torn down; None: nothing is known."""
    end = one.exit
    if node.lost:
        return _Claim(NODE, 3, "node_lost", "replace_node", f"node {node.node} is gone")
    if end is not None and end.torn_down:
        return _Claim(0, 0, "torn_down", "none", "we stopped it", "torn_down")
    condemned = _condemned(one, node)
    if condemned is not None:
        return condemned
    spoken = classify.verdict(classify.classify_lines((*one.last_lines, *(end.error.split("\n") if end else ()))))
    if end is not None and end.oom_killed:
        return _Claim(SPOKEN, 3, "host_oom_system", "restart_app", f"killed for lack of memory on {one.node}")
    memory = _out_of_memory(one, node)
    if memory is not None:
        return memory
    strong = spoken.kind not in ("benign", "unknown") and spoken.action != "watch"
    if strong and (end is None or _failed(end)):
        tier = classify.BROKEN_PART if spoken.action not in classify.PROGRAM_ACTIONS else classify.PROGRAM
        return _Claim(SPOKEN, tier, spoken.kind, spoken.action, f"said so itself ({spoken.kind})")
    if end is None:
        return None
    return _ended(end, spoken)


def _condemned(one: RankEvidence, node: NodeEvidence) -> _Claim | None:
    verdict = node.health
    if verdict.state != "unhealthy":
        return None
    ours = one.device_uuid and one.device_uuid in verdict.device_uuids
    whole_node = not verdict.device_uuids
    if not ours and not whole_node:
        return None
    kind = verdict.reason.split(":", 1)[0] or "unhealthy"
    where = f"its GPU {one.device_uuid}" if ours else f"its node {node.node}"
    return _Claim(PART, 3, kind, verdict.action, f"{where} is unhealthy: {verdict.reason}")


def _out_of_memory(one: RankEvidence, node: NodeEvidence) -> _Claim | None:
    """A kill by the kernel for memory names the process: evidence for a rank killed by SIGKILL with that pid."""
    if one.exit is None or one.exit.signal != signal.SIGKILL:
        return None
    for line in node.kernel_lines:
        got = classify.classify(line)
        if got.kind in ("host_oom_system", "host_oom_cgroup") and str(one.exit.pid) in line:
            return _Claim(SPOKEN, 3, got.kind, got.action, f"the kernel of {one.node} killed pid {one.exit.pid} for lack of memory")
    return None


def _failed(end: WorkerExit) -> bool:
    return end.exit_code != 0 or end.signal != 0 or (not end.declared_end and end.exit_code == 0)


def _ended(end: WorkerExit, spoken: classify.FileVerdict) -> _Claim | None:
    if spoken.kind == "unknown":
        return _Claim(0, 0, "symptom", spoken.action, spoken.reason, "victim")
    if end.signal in _CRASHES:
        return _Claim(ENDED, 2, "crash", "restart_app_track_node", f"crashed with {signal.Signals(end.signal).name}")
    if end.signal == signal.SIGKILL:
        return _Claim(ENDED, 2, "worker_killed", "restart_app", "killed by somebody else (SIGKILL), without a word")
    if end.signal == signal.SIGTERM:
        return _Claim(ENDED, 1, "preempted", "resume_later", "somebody else asked it to stop (SIGTERM)")
    if end.declared_end and end.exit_code == 0 and end.signal == 0:
        return _Claim(0, 0, "finished", "none", "reached the end", "finished")
    return None


def _silence(known: Sequence[RankEvidence], claims: dict[int, _Claim | None]) -> None:
    """Others wait for somebody, and somebody neither ended nor moves: a hang, when one rank stands out."""
    waiting = [one for one in known if _is_waiting(one, claims[one.rank])]
    silent = [one for one in known if one.exit is None and claims[one.rank] is None]
    stopped = [one for one in silent if one.stopped]
    if stopped:
        suspects, why = stopped, "the process is stopped (state T)"
    elif not waiting or not silent:
        return
    elif len(silent) == 1:
        suspects, why = silent, "the others wait in a collective; it neither waits nor moves"
    else:
        suspects, why = _furthest_behind(silent, waiting), "furthest behind while the others wait"
    for one in suspects:
        claims[one.rank] = _Claim(SILENT, 2, "hang", "restart_app", why)


def _is_waiting(one: RankEvidence, claim: _Claim | None) -> bool:
    return claim is not None and claim.role == "victim" and one.exit is not None


def _furthest_behind(silent: Sequence[RankEvidence], waiting: Sequence[RankEvidence]) -> list[RankEvidence]:
    """The silent ranks with the least progress, when it is less than that of somebody else; else nobody."""
    places = {one.rank: place for one in (*silent, *waiting) if (place := _place(one)) is not None}
    least = min((places[one.rank] for one in silent if one.rank in places), default=None)
    if least is None or all(place == least for place in places.values()):
        return []
    return [one for one in silent if places.get(one.rank) == least]


def _place(one: RankEvidence) -> tuple[int, int] | None:
    if one.progress is not None:
        return (one.progress.applied_step, one.progress.started_step)
    if one.exit is not None and one.exit.last_step >= 0:
        return (one.exit.last_step, one.exit.last_step + 1)
    return None


def _strongest(known: Sequence[RankEvidence], claims: dict[int, _Claim | None]) -> list[RankEvidence]:
    """The ranks with the best claim. Several when they say the same; the observer's order decides between different words."""
    rivals = [(one, claim) for one in known if (claim := claims[one.rank]) is not None and claim.role == "cause"]
    if not rivals:
        return []
    best = max((claim.strength, claim.tier) for _, claim in rivals)
    leading = [(one, claim) for one, claim in rivals if (claim.strength, claim.tier) == best]
    if len({claim.kind for _, claim in leading}) > 1:
        leading = _first_received(leading)
    return [one for one, _ in leading]


def _first_received(leading: list[tuple[RankEvidence, _Claim]]) -> list[tuple[RankEvidence, _Claim]]:
    order = [one.received for one, _ in leading]
    if any(position is None for position in order):
        return []
    first = min(leading, key=lambda pair: pair[0].received or 0)
    return [pair for pair in leading if pair[1].kind == first[1].kind]


def _finding(one: RankEvidence, claim: _Claim | None, causes: Sequence[RankEvidence]) -> RankFinding:
    if claim is None:
        role: Role = "victim" if causes and one.exit is None else "unknown"
        why = "still there when another rank failed" if role == "victim" else "ended without a word"
        return RankFinding(rank=one.rank, node=one.node, role=role, evidence=(why,))
    role = claim.role
    evidence = (claim.evidence,)
    if role == "cause" and all(one.rank != cause.rank for cause in causes):
        role = "victim" if causes and claim.strength <= ENDED else "unknown"
        evidence = (*evidence, "another rank has the stronger claim")
    return RankFinding(rank=one.rank, node=one.node, role=role, kind=claim.kind, action=claim.action, evidence=evidence)
