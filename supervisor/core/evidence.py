"""Evidence first: what is asked for before a generation is replaced that nobody is to be blamed for yet."""

from __future__ import annotations

import itertools

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import links, symptoms
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.symptoms import Symptom
from regrow.supervisor.core.view import GenerationView, JobView, View

_EARLY_SHARE = 1 / 3
"""Victims alone: after this share of the time in which an explanation may come the members are asked about the network."""


def collect(
    view: View,
    job: JobView,
    generation: GenerationView,
    found: tuple[Symptom, ...],
    main: Symptom,
    policy: Policy,
    now: float,
    draft: Draft,
) -> bool:
    """Stacks of a hang, and reachability where all hang or fail alike. True while they are awaited.

    Where a process is known not to run, its peers' stacks say nothing more of the cause: they are asked for and not awaited.
    """
    waits = main.kind == "hang" and _stacks(job, generation, policy, now, draft)
    if symptoms.is_explained_hang(generation, found):
        return False
    if _all_alike(view, generation, found, main):
        waits |= _reach(view, job, generation, policy, now, draft)
    return waits


def ask_early(
    view: View, job: JobView, generation: GenerationView, found: tuple[Symptom, ...], policy: Policy, now: float, draft: Draft
) -> None:
    """While an explanation for victims is waited for, the network can be asked about already; and ranks that hang for their stacks."""
    if all(symptom.kind == "hang" for symptom in found):
        _stacks(job, generation, policy, now, draft)
        return
    if not _victims(found):
        return
    due = min(symptom.seen_at for symptom in found) + policy.victim_seconds * _EARLY_SHARE
    if now < due:
        draft.look(due)
        return
    _reach(view, job, generation, policy, now, draft)


def _all_alike(view: View, generation: GenerationView, found: tuple[Symptom, ...], main: Symptom) -> bool:
    """Is a network that is cut for one member a possible explanation that would say who it is?"""
    match main.kind:
        case "hang":
            return generation.stall is not None and not generation.stall.lingering and not symptoms.is_halted(generation)
        case "start_failed":
            return bool(main.cause) and not symptoms.singled_out(view, generation, found)
        case _:
            return _victims(found)


def _victims(found: tuple[Symptom, ...]) -> bool:
    """Workers that ended for want of another, and nothing that says whose."""
    return all(symptom.kind == "worker_exit" and not symptom.explains for symptom in found)


def name_silent(view: View, generation: GenerationView, found: tuple[Symptom, ...], main: Symptom) -> Symptom:
    """Where nothing names anybody, the one node that says nothing is the likely one: of workers that lost a peer, the only member whose
    workers have not ended; of a hang, the only member that cannot be heard. `main` as it is when there is no such node."""
    if _victims(found):
        ended = {name for name, member in generation.members.items() if any(worker.rank in generation.exits for worker in member.workers)}
        quiet = [name for name, member in generation.members.items() if member.workers and name not in ended]
        why = "the others lost a peer, and nothing is heard of its workers"
    elif main.kind == "hang" and main.rank < 0 and not main.node:
        quiet = [name for name in generation.members if (node := view.nodes.get(name)) is None or not node.reachable]
        why = "it alone cannot be heard"
    else:
        return main
    if len(quiet) != 1:
        return main
    ranks = [worker.rank for worker in generation.members[quiet[0]].workers]
    text = f"{why}; {main.text}"
    return msgspec.structs.replace(main, node=quiet[0], rank=ranks[0] if len(ranks) == 1 else -1, text=text, traceback="")


def _stacks(job: JobView, generation: GenerationView, policy: Policy, now: float, draft: Draft) -> bool:
    if generation.stacks_asked_at is None:
        action = a.AskStacks(job=job.spec.job, generation=generation.number, nodes=tuple(generation.members))
        draft.act(action, because=f"generation {generation.number} does not move: collect the stacks of all ranks")
        draft.look(now + policy.stacks_seconds)
        return True
    due = generation.stacks_asked_at + policy.stacks_seconds
    if len(generation.stacks) >= generation.spec.world_size or now >= due:
        return False
    draft.look(due)
    draft.say(f"{len(generation.stacks)} of {generation.spec.world_size} stacks are here")
    return True


def _reach(view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, draft: Draft) -> bool:
    if generation.reach_asked_at is None:
        helpers = _helpers(view, generation)
        peers = links.targets((*generation.spec.nodes, *helpers))
        there = [name for name in peers if (node := view.nodes.get(name)) is not None and node.reachable]
        if len(there) < links.LEAST_ASKED:
            return False
        action = a.AskReach(job=job.spec.job, generation=generation.number, peers={name: peers[name] for name in there})
        draft.act(action, because=f"all of generation {generation.number} hang alike: can they reach each other on the data network?")
        draft.look(now + policy.reach_seconds)
        return True
    if symptoms.probes_are_in(view, generation, policy, now):
        return False
    draft.look(generation.reach_asked_at + policy.reach_seconds)
    draft.say(f"{len(generation.reach)} of {len(generation.reach_asked)} nodes have told whom they reach")
    return True


def _helpers(view: View, generation: GenerationView) -> tuple[str, ...]:
    """Some nodes that can be heard and are no members, whatever else they do."""
    others = (name for name in sorted(view.nodes) if name not in generation.members and view.nodes[name].reachable)
    return tuple(itertools.islice(others, links.HELPERS))
