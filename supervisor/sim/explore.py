"""The checkpoint table: every interleaving of reports, commits, crashes and a new generation, at small size, to the end.

Two nodes, two saves, an old and a new generation. The production `ckpt.commit.Collector` decides what is complete; the store
compares the generation's revision as the real transaction does. Each reachable state is visited once and checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from regrow import wire
from regrow.ckpt.commit import Collector
from regrow.errors import InternalError
from regrow.ids import MeshShape

_NODES = ("a", "b")
_STEPS = (10, 20)
_FAILED = -1
"""In the place of a node: the report that a save failed."""


class State(NamedTuple):
    """Everything that matters of one moment. Steps and nodes by index."""

    durable: frozenset[tuple[int, int]] = frozenset()
    """(step, node) whose shards are on storage."""
    reported: tuple[tuple[int, int], ...] = ()
    """(step, node) reports that the committing agent has folded, in order; lost with it. A node of `_FAILED`: a save failed."""
    failed: frozenset[int] = frozenset()
    """Steps that a node could not write."""
    records: frozenset[int] = frozenset()
    """Steps with a self-certifying record on storage."""
    committed: tuple[int, ...] = ()
    """Steps in the store, in the order of their transactions."""
    current: int = 1
    """Generation in the store: 1, or 2 once a new one is recorded."""
    restored: int = -1
    """Step index that generation 2 chose; -1: none was committed."""
    committer: bool = True
    """The committing agent of generation 1 lives."""
    alive: frozenset[int] = frozenset((0, 1))
    store: bool = True
    crashes: int = 0


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """What the search saw."""

    states: int
    transitions: int
    crash_points: int
    """Transitions that were crashes or outages."""
    endings: int
    """States in which nothing more can happen."""


def _spec() -> wire.GenerationSpec:
    return wire.GenerationSpec(
        job="j", epoch=1, generation=1, mesh=MeshShape(dp=2), world_size=2, nodes=_NODES, committing_node="a", global_batch=2
    )


def _report(step: int, node: int) -> wire.ShardsDurable:
    return wire.ShardsDurable(
        job="j",
        epoch=1,
        generation=1,
        step=_STEPS[step],
        node=_NODES[node],
        directory=f"step-{_STEPS[step]}",
        ranks=(node,),
        world_size=2,
        files=(wire.ShardFile(rank=node, name=f"r{node}", size_bytes=1, digest="d"),),
        manifest=f"n{node}",
        manifest_digest="m",
    )


def _failure(step: int) -> wire.ShardsFailed:
    return wire.ShardsFailed(job="j", generation=1, step=_STEPS[step], node=_NODES[0], reason="no space")


def _complete(state: State) -> set[int]:
    """Steps that the production collector calls complete after these reports."""
    collector = Collector(_spec())
    found: set[int] = set()
    for step, node in state.reported:
        if collector.add(_failure(step) if node == _FAILED else _report(step, node)).kind == "complete":
            found.add(step)
    return found


def moves(state: State, *, fenced: bool = True, most_crashes: int = 2) -> Iterator[tuple[str, State]]:
    """All that may happen next. `fenced` False takes the commit's comparison away, to prove that the check sees it."""
    for step in range(len(_STEPS)):
        for node in sorted(state.alive):
            if (step, node) not in state.durable and step not in state.failed:
                yield f"durable {step}{node}", state._replace(durable=state.durable | {(step, node)})
        for node in range(len(_NODES)):
            if (step, node) in state.durable and state.committer and (step, node) not in state.reported:
                yield f"report {step}{node}", state._replace(reported=(*state.reported, (step, node)))
        if step in state.failed and state.committer and (step, _FAILED) not in state.reported:
            yield f"report failure {step}", state._replace(reported=(*state.reported, (step, _FAILED)))
    if state.committer:
        for step in sorted(_complete(state)):
            if step not in state.records:
                yield f"record {step}", state._replace(records=state.records | {step})
            elif step not in state.committed and state.store and (state.current == 1 or not fenced):
                yield f"commit {step}", state._replace(committed=(*state.committed, step))
    if state.current == 1 and state.store:
        best = max(state.committed, default=-1)
        yield "new generation", state._replace(current=2, restored=best)
    if not state.store:
        yield "store up", state._replace(store=True)
    if state.crashes < most_crashes:
        yield from _crashes(state._replace(crashes=state.crashes + 1), state)


def _crashes(after: State, state: State) -> Iterator[tuple[str, State]]:
    if state.committer:
        yield "crash committer", after._replace(committer=False, reported=())
    else:
        yield "restart committer", after._replace(committer=True)
    for node in sorted(state.alive):
        yield f"crash node {node}", after._replace(alive=state.alive - {node})
    if state.store:
        yield "store down", after._replace(store=False)
    for step in range(len(_STEPS)):
        if step not in state.records and step not in state.failed and not _whole(state, step):
            yield f"write fails {step}", after._replace(failed=state.failed | {step})


def _whole(state: State, step: int) -> bool:
    return all((step, node) in state.durable for node in range(len(_NODES)))


def problems(before: State, after: State) -> list[str]:
    """What must never be true of a transition."""
    found: list[str] = []
    for step in after.committed:
        if step not in after.records:
            found.append(f"step {step} is committed without its record")
        if not _whole(after, step):
            found.append(f"step {step} is committed and a shard is missing")
    found += [f"step {step} has a record and a shard is missing" for step in after.records if not _whole(after, step)]
    if len(after.committed) > len(before.committed) and before.current == 2:
        found.append(f"generation 1 commits step {after.committed[-1]} although generation 2 is current")
    if not set(before.committed) <= set(after.committed):
        found.append("a committed checkpoint is gone")
    if after.current == 2 and before.current == 1 and after.restored != max(before.committed, default=-1):
        found.append("generation 2 does not continue from the newest committed checkpoint")
    if len(after.committed) != len(set(after.committed)):
        found.append("a step is committed twice")
    return found


def explore(*, fenced: bool = True, most_crashes: int = 2) -> Explored:
    """Visit every reachable state.

    Raises:
        InternalError: a transition breaks a rule; the text has the way there.
    """
    start = State()
    way: dict[State, tuple[State, str] | None] = {start: None}
    open_states = [start]
    transitions = crashes = endings = 0
    while open_states:
        state = open_states.pop()
        number = 0
        for name, following in moves(state, fenced=fenced, most_crashes=most_crashes):
            number += 1
            transitions += 1
            crashes += following.crashes > state.crashes
            broken = problems(state, following)
            if broken:
                raise InternalError("; ".join(broken), where=" > ".join([*_path(way, state), name]))
            if following not in way:
                way[following] = (state, name)
                open_states.append(following)
        endings += number == 0
    return Explored(states=len(way), transitions=transitions, crash_points=crashes, endings=endings)


def _path(way: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    steps: list[str] = []
    at = way[state]
    while at is not None:
        steps.append(at[1])
        at = way[at[0]]
    return steps[::-1]
