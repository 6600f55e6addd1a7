"""What is wrong with a generation now, read from the view. A symptom that explains others ends the waiting for more."""

from __future__ import annotations

import math
import re

import msgspec

from regrow.supervisor.core import hang, links, rates, standing
from regrow.supervisor.core.memo import Memo, Scan
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.tracebacks import error_line
from regrow.supervisor.core.view import ExitFact, GenerationView, JobView, Member, NodeView, Stall, View

RESTORE_FAILED_EXIT = 75
"""Exit code of a worker that could not load the restore point: its reason comes as a message of its own."""
USAGE_EXIT = 2
"""Exit code of argparse, click and shells for wrong usage: no restart cures that."""
WRONG_USAGE = f"left with {USAGE_EXIT}, wrong usage of the script"
_SIGKILL, _SIGABRT = 9, 6
_KILLED_HINTS = (" (out of memory suspected)", ", sent by somebody: the kernel counted no out-of-memory kill")
RERUN_EXIT, WRONG_RESULT_EXIT = 16, 17
"""Exit codes of Megatron's rerun machine: run the step again elsewhere to tell what it was; the same wrong result came again."""
_HARDWARE_WORDS = frozenset(
    {"reset_gpu", "reset_gpu_at_idle", "drain_reset_gpu", "drain_node", "reboot_node", "replace_gpu", "replace_node"}
)
"""Actions of `regrow health --classify` that are about a part, not about the program."""

_LOST_PEER = re.compile(
    r"DistNetworkError|DistStoreError|DistBackendError|RendezvousConnection|RendezvousTimeout|ConnectionResetError|ConnectionRefusedError"
    r"|BrokenPipeError|Connection (?:reset|closed|refused|aborted)|Broken pipe|ECONN|EPIPE|gloo/transport|Gloo (?:connect|all|context)"
    r"|\[enforce fail at .*gloo|Application timeout caused pair closure|Timed out waiting|NCCL (?:error|communicator)|ncclSystemError"
    r"|ncclRemoteError|Socket Timeout|socket timeout|GenerationChanged|peer closed|Read error|recvValue failed|sendBytes failed",
)


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    kind: str
    at: float
    """When it began, as far as known."""
    seen_at: float
    cause: str
    """infrastructure, preemption, program, unknown; empty: not charged."""
    text: str
    node: str = ""
    rank: int = -1
    traceback: str = ""
    explains: bool = True
    """False: most likely the victim of something else that we have not heard of yet."""
    fatal: str = ""
    """The job must stop: why."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All symptoms, and when to look again if nothing happens."""

    symptoms: tuple[Symptom, ...]
    look_at: float | None = None
    waiting: str = ""
    """What is suspicious and not held against anybody yet."""


def level(generation: GenerationView) -> int:
    """0: a script that does not know Regrow (restarts only); 1: it reports phases or steps."""
    if generation.completed_step is not None:
        return 1
    return _levels.get((generation,), None, lambda: _level(generation))


_levels: Memo[int] = Memo()
"""Asked for every member of a start: thousands of times for one generation."""


def _level(generation: GenerationView) -> int:
    if any(fact.exit.last_step >= 0 for fact in generation.exits.values()):
        return 1
    return 1 if _at_work.get(generation.members) else 0


def finished_ranks(generation: GenerationView) -> set[int]:
    """Ranks that reached their declared end (or, without Regrow in the script, left with 0)."""
    plain = level(generation) == 0
    return {
        rank
        for rank, fact in generation.exits.items()
        if not fact.exit.torn_down and fact.exit.signal == 0 and fact.exit.exit_code == 0 and (fact.exit.declared_end or plain)
    }


def find(view: View, job: JobView, generation: GenerationView, policy: Policy, now: float) -> Findings:
    """Everything that is wrong with the running generation of a job."""
    finished = finished_ranks(generation)
    symptoms = [made for fact in generation.exits.values() if (made := _of_exit(fact, generation, finished)) is not None]
    symptoms += _of_state(generation, policy)
    failing = any(symptom.kind == "worker_exit" for symptom in symptoms)
    failing |= generation.lost_peer_at is not None
    looks: list[float] = []
    waiting: list[str] = []
    everyone_gone = len(view.nodes) > 1 and not any(node.reachable for node in view.nodes.values())
    members, due = _suspicious(view, generation, policy, now)
    looks += [due] if due is not None else []
    for member in members:
        if member.workers and all(worker.rank in finished for worker in member.workers):
            continue
        found, look = _of_member(view, job, generation, member, policy, now, failing=failing, everyone_gone=everyone_gone)
        symptoms += [found] if found is not None else []
        if look is not None and found is None:
            looks.append(look[0])
            waiting += [look[1]] if look[1] else []
    if not everyone_gone:
        symptoms = [symptom for symptom in symptoms if symptom.kind != "hang" or _is_heard(view, generation, symptom)]
    symptoms = _laggards(generation, symptoms) + _unreachable(view, generation, policy, now)
    return Findings(symptoms=tuple(symptoms), look_at=min(looks) if looks else None, waiting="; ".join(waiting[:3]))


def _is_heard(view: View, generation: GenerationView, hung: Symptom) -> bool:
    """False for a hang that is read from old words: the agent of that rank, or of all, is gone. It may be lost: silence has its own rule."""
    names = (hung.node,) if hung.node else generation.members
    return any((node := view.nodes.get(name)) is not None and node.reachable for name in names)


_START = ("fenced", "stopped", "started", "rendezvous", "restored")


def _laggards(generation: GenerationView, symptoms: list[Symptom]) -> list[Symptom]:
    """A start that is over its time holds all members up: those are to blame that are behind the others, when some are (case A11)."""
    late = {symptom.node for symptom in symptoms if _is_late(symptom)}
    if not late:
        return symptoms
    reached = {name: sum(phase in member.phases for phase in _START) for name, member in generation.members.items()}
    least = min(reached[name] for name in late)
    behind = {name for name in late if reached[name] == least}
    return [symptom for symptom in symptoms if not _is_late(symptom) or symptom.node in behind]


def _is_late(symptom: Symptom) -> bool:
    return symptom.kind == "start_failed" and bool(symptom.cause)


def singled_out(view: View, generation: GenerationView, symptoms: tuple[Symptom, ...]) -> frozenset[str]:
    """Members that did not start in time while others did; none when it was all that can be heard."""
    late = {symptom.node for symptom in symptoms if _is_late(symptom)}
    there = {name for name in generation.members if (node := view.nodes.get(name)) is not None and node.reachable}
    return frozenset() if late >= there else frozenset(late)


_members: Memo[tuple[Member, ...]] = Memo()
_told: Scan[Member] = Scan(lambda member: member.empty_at is not None or member.refused_at is not None)
_at_work: Scan[Member] = Scan(lambda member: not _BEFORE_WORK.issuperset(member.phases))
_BEFORE_WORK = frozenset({"started", "fenced", "stopped"})


def _suspicious(view: View, generation: GenerationView, policy: Policy, now: float) -> tuple[tuple[Member, ...], float | None]:
    """Members that something is the matter with, or that are over a deadline of a start; and the next such deadline."""
    matter = _members.get((view.nodes, generation.members), None, lambda: _matter(view, generation))
    recorded = generation.recorded_at
    if generation.first_step_at is not None or generation.adopted or recorded is None:
        return matter, None
    first = recorded + policy.start_seconds if level(generation) > 0 else math.inf
    next_due = math.inf
    over: list[Member] = []
    for member in generation.members.values():
        due = first
        if "started" not in member.phases:
            due = (member.sent_at if member.sent_at is not None else recorded) + policy.phase_seconds
        if due <= now:
            over.append(member)
        elif due < next_due:
            next_due = due
    known = {member.node for member in matter}
    return (*matter, *(member for member in over if member.node not in known)), next_due if next_due < math.inf else None


def _matter(view: View, generation: GenerationView) -> tuple[Member, ...]:
    members = generation.members
    names = {member.node for member in _told.get(members)}
    names.update(node.name for node in standing.notable(view) if not node.reachable and node.name in members)
    names.update(name for name in members.keys() - view.nodes.keys())
    return tuple(member for name, member in members.items() if name in names) if names else ()


def _of_exit(fact: ExitFact, generation: GenerationView, finished: set[int]) -> Symptom | None:
    ended = fact.exit
    if ended.torn_down or ended.rank in finished:
        return None
    base = Symptom(
        kind="worker_exit", at=fact.at, seen_at=fact.at, cause="unknown", text="", node=fact.node, rank=ended.rank, traceback=ended.error
    )
    change = msgspec.structs.replace
    if ended.oom_killed:
        return change(base, text="killed by the kernel: out of memory")
    if ended.signal:
        hint = _KILLED_HINTS[ended.oom_counted] if ended.signal == _SIGKILL else ""
        return change(base, text=f"ended by signal {ended.signal}{hint}", explains=ended.signal != _SIGABRT)
    if ended.exit_code == 0:
        return change(base, text="left with 0 before its declared end")
    if ended.exit_code == RESTORE_FAILED_EXIT:
        return change(base, text="could not restore", explains=generation.refusal is not None)
    last = error_line(ended.error)
    if _LOST_PEER.search(ended.error):
        return change(base, text=f"lost a peer: {last[:200]}", explains=False, traceback="")
    if ended.said_action in _HARDWARE_WORDS:
        return change(base, cause="infrastructure", text=f"its last lines speak of {ended.said}: {last[:200]}".rstrip(": "), traceback="")
    if ended.exit_code in (RERUN_EXIT, WRONG_RESULT_EXIT):
        return _rerun(base, ended.exit_code, generation)
    if ended.error:
        return change(base, cause="program", text=last[:300])
    if ended.said == "unknown":
        return change(base, text=f"left with {ended.exit_code}; its last lines are a victim's", explains=False)
    if ended.exit_code == USAGE_EXIT:
        return change(base, cause="program", text=f"{WRONG_USAGE}: its words are in rank{ended.rank}.out")
    return change(base, text=f"left with {ended.exit_code} and no traceback")


def _rerun(base: Symptom, code: int, generation: GenerationView) -> Symptom:
    """Megatron's rerun machine saw a result that it did not trust. One rank alone with 17 is accused by its own repeated
    result; when all leave alike, nobody is."""
    change = msgspec.structs.replace
    if code == RERUN_EXIT:
        return change(
            base, cause="infrastructure", text=f"left with {code}: asks to run again to tell a transient fault from a lasting one"
        )
    alike = sum(fact.exit.exit_code == WRONG_RESULT_EXIT for fact in generation.exits.values())
    if alike == 1:
        return change(
            base, kind="sdc", cause="infrastructure", explains=False, text=f"left with {code}: its result was wrong again when repeated"
        )
    return change(base, cause="infrastructure", text=f"left with {code}, as {alike - 1} others: a result was wrong again when repeated")


def _of_state(generation: GenerationView, policy: Policy) -> list[Symptom]:
    """Facts that the generation as a whole has collected."""
    found: list[Symptom] = []
    streak = generation.non_finite
    if streak is not None and streak.last_step - streak.first_step + 1 >= policy.non_finite_steps:
        who = (
            f"first in {streak.what} of rank {streak.rank} alone{', again when its work was repeated there' if streak.again else ''}"
            if streak.rank >= 0
            else f"in {streak.what} of {streak.num_ranks or 'all'} ranks{f', all of replica {streak.replica}' if streak.replica >= 0 else ''}"
        )
        text = f"not finite from step {streak.first_step} to {streak.last_step}, {who}"
        cause = ("unknown" if streak.again else "infrastructure") if streak.rank >= 0 or streak.replica >= 0 else "program"
        node = generation.node_of(streak.rank)
        found.append(Symptom(kind="non_finite", at=streak.at, seen_at=streak.at, cause=cause, text=text, node=node, rank=streak.rank))
    if generation.wrong_step:
        at = generation.first_step_at or generation.created_at
        found.append(
            Symptom(kind="wrong_step", at=at, seen_at=at, cause="program", text=generation.wrong_step, fatal=generation.wrong_step)
        )
    if generation.divergence is not None:
        what = generation.divergence
        node = generation.node_of(what.rank)
        found.append(Symptom(kind="sdc", at=what.at, seen_at=what.at, cause="infrastructure", text=what.text, node=node, rank=what.rank))
    if generation.refusal is not None:
        what = generation.refusal
        text = f"checkpoint of step {what.step} does not load: {what.problem}"
        found.append(Symptom(kind="restore_refused", at=what.at, seen_at=what.at, cause="", text=text, node=what.node, rank=what.rank))
    if generation.stall is not None and generation.stall.lingering:
        found.append(_linger(generation, generation.stall))
    elif generation.stall is not None:
        what = generation.stall
        odd = hang.odd_rank(what.ranks, generation.stacks)
        text = f"no progress for {what.at - what.since:.1f} s (limit {what.limit_seconds:.1f} s); "
        text += f"rank {odd.rank}: {odd.why}" if odd.rank >= 0 else odd.why
        node = generation.node_of(odd.rank)
        found.append(Symptom(kind="hang", at=what.since, seen_at=what.at, cause="unknown", text=text, node=node, rank=odd.rank))
    return found


def is_halted(generation: GenerationView) -> bool:
    """Some rank's process is known not to run: that is why nothing moves."""
    return generation.stall is not None and any(word.phase in hang.STOPPED for word in generation.stall.ranks)


def is_explained_hang(generation: GenerationView, found: tuple[Symptom, ...]) -> bool:
    """Nothing but a hang, and the process that it comes from is known: no other symptom can follow that would explain it better."""
    return is_halted(generation) and all(symptom.kind == "hang" for symptom in found)


def probes_are_in(view: View, generation: GenerationView, policy: Policy, now: float) -> bool:
    """Members were asked whom they reach, and all that can answer have, or had their time."""
    if generation.reach_asked_at is None:
        return False
    if now >= generation.reach_asked_at + policy.reach_seconds:
        return True
    return all(name in generation.reach for name in generation.reach_asked if (node := view.nodes.get(name)) is not None and node.reachable)


_cut: Memo[tuple[links.CutOff, ...]] = Memo()


def _unreachable(view: View, generation: GenerationView, policy: Policy, now: float) -> list[Symptom]:
    """Members that the others cannot reach, where the management network says that all are well."""
    asked = generation.reach_asked_at
    if asked is None or not generation.reach or not probes_are_in(view, generation, policy, now):
        return []
    since = generation.stall.since if generation.stall is not None else asked
    base = Symptom(kind="unreachable", at=since, seen_at=asked, cause="infrastructure", text="")
    return [
        msgspec.structs.replace(
            base, node=one.node, text=f"{one.num_failed} of {one.num_tried} peers cannot reach {one.node} on the data network"
        )
        for one in _cut.get(
            (generation.reach, generation.members, generation.reach_asked),
            None,
            lambda: links.cut_off(generation.reach, generation.members, generation.reach_asked),
        )
        if one.node in view.nodes
    ]


def _linger(generation: GenerationView, what: Stall) -> Symptom:
    """The program is over and some ranks do not end. That is a deadlock of the program at its end: no hardware is blamed."""
    ranks = [item.rank for item in what.ranks]
    who = f"rank {ranks[0]} of {generation.node_of(ranks[0])} does" if len(ranks) == 1 else f"ranks {ranks} do"
    text = f"{who} not end after the program's end: no CPU time used for {what.at - what.since:.1f} s (limit {what.limit_seconds:.1f} s)"
    return Symptom(kind="hang", at=what.since, seen_at=what.at, cause="unknown", text=text, rank=ranks[0] if len(ranks) == 1 else -1)


_Look = tuple[float, str]


def _of_member(
    view: View, job: JobView, generation: GenerationView, member: Member, policy: Policy, now: float, *, failing: bool, everyone_gone: bool
) -> tuple[Symptom | None, _Look | None]:
    name = member.node
    if member.empty_at is not None:
        text = f"the agent of {name} is there without its workers"
        cause = "" if generation.adopted and generation.first_step_at is None else "infrastructure"
        return Symptom(kind="returned_empty", at=member.empty_at, seen_at=member.empty_at, cause=cause, text=text, node=name), None
    if member.refused_at is not None:
        text = f"{name} did not start: {member.refused}"
        return Symptom(kind="start_failed", at=member.refused_at, seen_at=member.refused_at, cause="", text=text, node=name), None
    node = view.nodes.get(name)
    if node is None or not node.reachable:
        return _gone(view, job, generation, node, name, policy, now, failing=failing, everyone_gone=everyone_gone)
    return _late(generation, member, policy, now)


def _gone(
    view: View,
    job: JobView,
    generation: GenerationView,
    node: NodeView | None,
    name: str,
    policy: Policy,
    now: float,
    *,
    failing: bool,
    everyone_gone: bool,
) -> tuple[Symptom | None, _Look | None]:
    """Silence is suspicion; progress excuses it; failing peers, or progress that stopped, confirm it."""
    term = view.term_at if view.term_at is not None else generation.created_at
    closed = node is None or not node.connected
    since = term if node is None else (node.silent_since or node.disconnected_at or term)
    what = "closed its connection" if closed else "is silent"
    if everyone_gone and not failing:
        return None, (now + policy.takeover_seconds, "all nodes are silent at once: the observer is at fault")
    lost = Symptom(kind="node_lost", at=since, seen_at=since, cause="infrastructure", text=f"{name} {what}", node=name)
    if failing and node is None and now < term + policy.takeover_seconds:
        return None, (term + policy.takeover_seconds, f"{name} has not been heard by this leader yet")
    if failing:
        return msgspec.structs.replace(lost, text=f"{name} {what} and its peers' workers failed"), None
    sighted = view.sighted_at if view.sighted_at is not None else since
    progress = max(generation.progress_at or generation.created_at, since, sighted)
    limit = rates.stopped_limit(job, policy)
    due = max(progress + limit, since + policy.reconnect_seconds)
    if generation.adopted and not any(member.adopted for member in generation.members.values()):
        due = max(due, term + policy.takeover_seconds)
    if level(generation) == 0 and generation.recorded_at is not None and not generation.adopted:
        due = max(due, since + policy.orphan_seconds)
    if now < due:
        return None, (due, f"{name} {what}; progress excuses it until {due - now:.1f} s from now")
    text = f"{name} {what} for {now - since:.1f} s and no step completed for {now - progress:.1f} s (limit {limit:.1f} s)"
    return msgspec.structs.replace(lost, text=text, seen_at=due), None


def _late(generation: GenerationView, member: Member, policy: Policy, now: float) -> tuple[Symptom | None, _Look | None]:
    """Deadlines of a start."""
    if generation.first_step_at is not None or generation.adopted or generation.recorded_at is None:
        return None, None
    if "started" not in member.phases:
        since = member.sent_at if member.sent_at is not None else generation.recorded_at
        due, what = since + policy.phase_seconds, "has not started its workers"
    elif level(generation) > 0:
        since = generation.recorded_at
        due, what = since + policy.start_seconds, "has not completed a first step"
    else:
        return None, None
    if now < due:
        return None, (due, "")
    text = f"{member.node} {what} in time"
    return Symptom(kind="start_failed", at=since, seen_at=due, cause="infrastructure", text=text, node=member.node), None
