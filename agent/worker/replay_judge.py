"""When a micro-step is repeated, and what the repetitions say (pure, torch-free).

A result is known by the digest of its gradients and by a sketch of three sums a tensor. Where kernels repeat to the bit,
only equal digests are the same; where they do not, sketches closer than a measured noise floor are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from regrow.agent.worker.data import mix
from regrow.ids import MeshShape
from regrow.wire import ReplayVerdict

DEFAULT_RATE = 1.0 / 256.0
"""Share of steps of which a micro-step is repeated: at most 0.4 % of a step's compute, with one micro-step a step."""
FLOOR_MARGIN = 8.0
"""A mismatch is so many times as large as the largest difference that repetitions showed when the noise was measured."""
ROUNDING = 1e-5
"""In norms of a gradient: float32 sums in another order differ by 1e-7 to 1e-6 of it."""
LEAST_FLOOR = 1e-12
MOST_NOISE = 1e-2
"""Of half-precision sums of many terms with the margin. What differs more is wrong, or a program with random numbers of its own."""
PROVEN_CHECKS = 3
"""Clean checks of all ranks after which a program counts as one that repeats to the bit."""
_STREAM = 0x5EED_0F_4EB1A7


class Seen(msgspec.Struct, frozen=True):
    """Gradients that one run of a micro-step left."""

    digest: str
    sketch: tuple[float, ...] = ()
    """For each tensor: norm, sum, sum with alternating signs, in float64."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw in one check."""

    rank: int
    own: tuple[Seen, ...]
    """The run that counts, then its repetitions on the same rank."""
    helped: dict[int, tuple[Seen, ...]] = {}
    """Runs of other ranks' micro-steps on this one: {owner: runs}."""
    tensor: str = ""
    """First parameter whose gradient differed between two of `own`."""
    clean: int = 0
    """Checks of this rank before that showed no mismatch."""


class Sample(msgspec.Struct, frozen=True):
    """Of a step that is checked."""

    unit: int
    """Number of the micro-step in the step, from 0."""
    buddy: bool
    """Repeat it on another replica instead of in place."""


def sample(seed: int, step: int, rate: float, units: int) -> Sample | None:
    """Whether a step is checked: the same answer on every rank, and nothing that a fault could follow.

    Args:
        rate: share of steps.
        units: micro-steps that every rank has in a step.
    """
    words = mix(np.array([seed & 0xFFFFFFFF, _STREAM], dtype=np.uint64))
    with np.errstate(over="ignore"):
        key = words[0] * np.uint64(3) + words[1] + np.uint64(step) * np.uint64(0x9E3779B97F4A7C15)
    chance, place, kind = (int(value) for value in mix(np.array([key, key + np.uint64(1), key + np.uint64(2)], dtype=np.uint64)))
    if chance >= rate * 2.0**64:
        return None
    return Sample(place % max(1, units), bool(kind & 1))


def same(left: Seen, right: Seen, floor: float) -> bool:
    """Do two runs agree? `floor` 0: to the bit."""
    return left.digest == right.digest or (floor > 0.0 and distance(left, right) <= floor)


def distance(left: Seen, right: Seen) -> float:
    """Largest difference of a sum, in norms of its tensor; infinite when something is not finite or the tensors differ."""
    a, b = (np.asarray(one.sketch, dtype=np.float64).reshape(-1, 3) for one in (left, right))
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    scale = np.maximum(np.maximum(a[:, :1], b[:, :1]), np.finfo(np.float64).tiny)
    return float((np.abs(a - b) / scale).max(initial=0.0))


def largest(evidence: Sequence[Evidence]) -> float:
    """The largest difference between two runs of the same work, on one rank or on two."""
    owners = {item.rank: item.own[0] for item in evidence}
    own = [distance(one, other) for item in evidence for one in item.own for other in item.own]
    return max([*own, *(distance(owners[owner], seen) for item in evidence for owner, runs in item.helped.items() for seen in runs)])


def is_rounding(evidence: Sequence[Evidence]) -> bool:
    """Do runs differ by no more than another order of summation makes them? Nobody is accused of that."""
    return largest(evidence) <= ROUNDING


def noise(evidence: Sequence[Evidence]) -> float:
    """The floor from now on: the largest difference that was seen, times the margin. 0: it is too large for the order of sums to explain,
    so nothing can be told from this check; a floor that high would call everything the same for ever."""
    floor = max(FLOOR_MARGIN * largest(evidence), LEAST_FLOOR)
    return floor if floor <= MOST_NOISE else 0.0


def calm(evidence: Sequence[Evidence], floor: float) -> bool:
    """Nothing differs."""
    owners = {item.rank: item.own[0] for item in evidence}
    return all(
        all(same(item.own[0], other, floor) for other in item.own)
        and all(same(owners[owner], seen, floor) for owner, runs in item.helped.items() for seen in runs)
        for item in evidence
    )


def settled(runs: Sequence[Seen], floor: float) -> tuple[Seen | None, int]:
    """What most runs of one rank say, and how many say something else; None when no two say the same."""
    best = max(runs, key=lambda one: sum(same(one, other, floor) for other in runs))
    agreeing = sum(same(best, other, floor) for other in runs)
    if agreeing < 2 and len(runs) > 1:
        return None, len(runs)
    return best, len(runs) - agreeing


def unsteady(evidence: Sequence[Evidence], floor: float) -> list[int]:
    """Ranks whose own runs differ among themselves."""
    return [item.rank for item in evidence if settled(item.own, floor)[1]]


def not_repeatable(evidence: Sequence[Evidence], floor: float) -> bool:
    """Is it the program that does not repeat to the bit, and no part? So when most ranks differ from themselves, and did so from
    the beginning: a few clean checks prove that the program can."""
    proven = min(item.clean for item in evidence) >= PROVEN_CHECKS
    return not proven and 2 * len(unsteady(evidence, floor)) > len(evidence)


def judge(evidence: Sequence[Evidence], mesh: MeshShape, floor: float) -> ReplayVerdict:
    """The verdict, from the full evidence of all ranks. Nobody is a suspect whose wrong result was not seen twice.

    A rank is wrong when its runs differ among themselves, or when two other replicas agree on its work and it does not.
    """
    buddy = any(item.helped for item in evidence)
    if calm(evidence, floor):
        return ReplayVerdict(verdict="agree", buddy=buddy, reason=f"{len(evidence)} ranks repeated a micro-step")
    if not_repeatable(evidence, floor):
        ranks = unsteady(evidence, floor)
        return ReplayVerdict(verdict="skipped", buddy=buddy, reason=f"{len(ranks)} of {len(evidence)} ranks do not repeat their own result")
    again: list[int] = []
    once: list[int] = []
    for item in evidence:
        if (wrong := settled(item.own, floor)[1]) > 0:
            (again if wrong > 1 else once).append(item.rank)
    open_pairs = _between_replicas(evidence, floor, again, once)
    tensor = next((item.tensor for item in evidence if item.rank in (*again, *once) and item.tensor), "")
    return _verdict(sorted(set(again)), sorted(set(once) - set(again)), open_pairs, mesh, tensor, buddy=buddy)


def _between_replicas(evidence: Sequence[Evidence], floor: float, again: list[int], once: list[int]) -> list[tuple[int, ...]]:
    """Judge what helpers saw; adds to `again` and `once`, returns groups of ranks of which one is wrong."""
    open_groups: list[tuple[int, ...]] = []
    for item in evidence:
        own = settled(item.own, floor)[0]
        helpers = {other.rank: other.helped[item.rank] for other in evidence if item.rank in other.helped}
        if own is None or not helpers:
            continue
        views = {item.rank: (own, len(item.own))}
        for rank, runs in helpers.items():
            value, wrong = settled(runs, floor)
            if value is None or wrong:
                (again if wrong > 1 else once).append(rank)
            if value is not None:
                views[rank] = (value, len(runs))
        differing = [rank for rank, (value, _) in views.items() if not same(value, own, floor)]
        if not differing:
            continue
        most, _ = settled([value for value, _ in views.values()], floor)
        if most is None or len(views) < 3:
            open_groups.append(tuple(sorted(views)))
            continue
        for rank, (value, times) in views.items():
            if not same(value, most, floor):
                (again if times > 1 else once).append(rank)
    return open_groups


def _verdict(
    again: list[int], once: list[int], open_groups: list[tuple[int, ...]], mesh: MeshShape, tensor: str, *, buddy: bool
) -> ReplayVerdict:
    where = f", first in {tensor}" if tensor else ""
    if again and len({rank // mesh.replica_size for rank in again}) == 1:
        who = f"rank {again[0]} was" if len(again) == 1 else f"one of ranks {again} was"
        reason = f"{who} wrong in more than one run of the same micro-step{where}"
        return ReplayVerdict(verdict="diverged", suspects=tuple(again), once=tuple(once), reason=reason, tensor=tensor, buddy=buddy)
    unclear = sorted({rank for group in open_groups for rank in group} | set(again))
    if unclear:
        reason = f"ranks {unclear} do not agree on the same micro-step, and nothing says who is right{where}"
        return ReplayVerdict(verdict="diverged", once=tuple(once), reason=reason, tensor=tensor, buddy=buddy)
    reason = f"rank {once[0]} was wrong in one run of a micro-step and right in all others{where}"
    return ReplayVerdict(verdict="diverged", once=tuple(once), reason=reason, tensor=tensor, repaired=True, buddy=buddy)
