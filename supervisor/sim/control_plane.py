"""What a leader's one thread can bear: beats, turns and greetings of N nodes as a queue, with and without aggregators.

The costs are measured (benchmarks/aggregators.py); the queue is simulated: one server, first come first served, every node beats
with a phase of its own. An aggregator stands for a group of nodes: it folds their beats of one period into one frame.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import msgspec

from regrow.errors import ConfigurationError

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.0
"""Period of beats, and how long a node may be unheard (supervisor configuration)."""
DETECTION_SECONDS = 3.0
"""Aim for the detection of a silent host: `SILENCE_SECONDS`, and what its peers' beats wait."""
FORMING_SECONDS = 10.0
"""Aim for a cluster that comes to a new leader."""
MOST_CORES = 0.5
"""Aim for the leader's CPU while a job trains."""
_SIMULATED_SECONDS = 10.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of the leader's process, each from a measurement."""

    beat: float
    """One beat of one node on a TLS connection of its own: wake-up, record, decoding, tables."""
    word: float
    """The same beat inside a frame of an aggregator: decoding and tables."""
    greeting: float
    """One TLS handshake with its hello and welcome."""
    step_turn: float
    """The turn that follows a completed step, per thousand nodes."""
    worst_turn: float
    """The longest turn of a recovery, per thousand nodes."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster under one leader."""

    nodes: int
    group: int = 1
    """Nodes an aggregator stands for; 1: none."""
    step_seconds: float = 2.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue did."""

    nodes: int
    group: int
    cores: float
    """CPU of the leader's thread while the job trains; 1 is all it has."""
    wait_p99_seconds: float
    """From a beat's arrival to its being noted, with one recovery in between."""
    longest_gap_seconds: float
    """Between two notes of one healthy node: above `SILENCE_SECONDS` it is called silent though it is not. (A queue that grows keeps
    its order, so that all are late alike: what goes first is detection.)"""
    greeting_seconds: float
    """Until all have greeted a new leader."""


def check(load: Load) -> Load:
    """The same load when it makes sense.

    Raises:
        ConfigurationError: no nodes, or groups of none.
    """
    for name, value in (("nodes", load.nodes), ("group", load.group)):
        if value < 1:
            raise ConfigurationError(f"{name} is {value}", where="a leader's load", hint="give at least 1")
    return load


def cores(costs: Costs, load: Load) -> float:
    """Mean CPU while training, in cores: frames, the words in them, and a turn a step."""
    frames = -(-load.nodes // load.group) / BEAT_SECONDS
    words = load.nodes / BEAT_SECONDS if load.group > 1 else 0.0
    turns = costs.step_turn * load.nodes / 1000.0 / load.step_seconds
    return frames * costs.beat + words * costs.word + turns


def greeting_seconds(costs: Costs, load: Load) -> float:
    """CPU seconds, and so at least seconds, until every connection has been greeted: what is left of the thread does it."""
    left = 1.0 - min(0.99, cores(costs, load))
    return -(-load.nodes // load.group) * costs.greeting / left


def simulate(costs: Costs, load: Load, *, seed: int = 1) -> Answer:
    """Ten seconds of beats, a turn a step, and one recovery's longest turn in the middle."""
    check(load)
    rng = random.Random(f"{seed}/beats")  # noqa: S311  # a simulation is to be repeated
    senders = -(-load.nodes // load.group)
    service = costs.beat + (load.group * costs.word if load.group > 1 else 0.0)
    noted: list[float | None] = [None] * senders
    waits: list[float] = []
    free_at = gap = 0.0
    for at, sender, seconds in _arrivals(costs, load, senders, service, rng):
        free_at = max(free_at, at) + seconds
        if sender < 0:
            continue
        waits.append(free_at - at)
        last = noted[sender]
        gap = max(gap, free_at - last) if last is not None else gap
        noted[sender] = free_at
    waits.sort()
    return Answer(
        nodes=load.nodes,
        group=load.group,
        cores=cores(costs, load),
        wait_p99_seconds=waits[int(0.99 * (len(waits) - 1))] if waits else 0.0,
        longest_gap_seconds=gap,
        greeting_seconds=greeting_seconds(costs, load),
    )


def _arrivals(costs: Costs, load: Load, senders: int, service: float, rng: random.Random) -> Iterator[tuple[float, int, float]]:
    """(instant, sender or -1 for a turn, seconds of work), in order."""
    heap: list[tuple[float, int, float, float]] = [
        (rng.uniform(0.0, BEAT_SECONDS), sender, service, BEAT_SECONDS) for sender in range(senders)
    ]
    heap.append((load.step_seconds, -1, costs.step_turn * load.nodes / 1000.0, load.step_seconds))
    heap.append((_SIMULATED_SECONDS / 2, -2, costs.worst_turn * load.nodes / 1000.0, _SIMULATED_SECONDS))
    heapq.heapify(heap)
    while heap and heap[0][0] < _SIMULATED_SECONDS:
        at, sender, seconds, period = heap[0]
        yield at, sender, seconds
        heapq.heapreplace(heap, (at + period, sender, seconds, period))


def misses(answer: Answer) -> dict[str, float]:
    """{aim: by how much a leader of that size misses it, as a ratio above 1}."""
    ratios = {
        "cpu": answer.cores / MOST_CORES,
        "greeting": answer.greeting_seconds / FORMING_SECONDS,
        "detection": (SILENCE_SECONDS + answer.wait_p99_seconds) / DETECTION_SECONDS,
        "false silence": answer.longest_gap_seconds / SILENCE_SECONDS,
    }
    return {name: ratio for name, ratio in ratios.items() if ratio > 1.0}


def largest(costs: Costs, aim: str, *, group: int = 1, most_nodes: int = 131_072) -> int:
    """Largest number of nodes that keeps one aim (cpu, greeting or detection), by halving, to about one per cent.

    The first two are sums; only for detection the queue is simulated, and not beyond twice what its thread can do.
    """
    low, high = 1, most_nodes
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        if _missed(costs, aim, Load(nodes=middle, group=group)):
            high = middle
        else:
            low = middle
    return low


def _missed(costs: Costs, aim: str, load: Load) -> bool:
    match aim:
        case "cpu":
            return cores(costs, load) > MOST_CORES
        case "greeting":
            return greeting_seconds(costs, load) > FORMING_SECONDS
        case _:
            return cores(costs, load) > 2.0 or aim in misses(simulate(costs, load))
