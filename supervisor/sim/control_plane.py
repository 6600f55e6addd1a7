"""What a leader's one thread can bear: beats, step reports, looks and turns of N nodes, with and without aggregators.

The costs are measured (benchmarks/aggregators.py, kept in leader.toml); the queue is simulated: one server, first come first served,
every node beats with a phase of its own, and who is silent is decided by the failure detector that runs in production. An
aggregator stands for a group of nodes: it folds their beats of one period, and their reports of one step, into one frame.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.detector import Silence, look_seconds, next_look
from regrow.supervisor.sim.leader_costs import Costs

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.0
"""Period of beats, and how long a node may be unheard (supervisor configuration)."""
LOOK_SECONDS = look_seconds(SILENCE_SECONDS)
"""Between two looks of the failure detector (`supervisor.term`)."""
DETECTION_SECONDS = 3.0
"""Aim for the detection of a silent host."""
MOST_CORES = 0.5
"""Aim for the leader's CPU while a job trains."""
_SPREAD_SECONDS = 0.05
"""Assumed: between the first and the last node that reports the same step. Collectives end together."""
_SIMULATED_SECONDS = 9.0
_RECOVERY_AT = 1.0
_LOST_AT = 4.5
_NUM_LOST = 100
_CROWDED = 1.5
"""Share of its thread over which a leader is not simulated: its queue only grows."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster under one leader."""

    nodes: int
    group: int = 1
    """Nodes an aggregator stands for; 1: none."""
    step_seconds: float = 2.0
    unheard_seconds: float = 0.0
    """How long the nodes of one aggregator are not heard because it died: until they have greeted another one."""

    @property
    def senders(self) -> int:
        """Connections of the leader."""
        return -(-self.nodes // self.group)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue did."""

    nodes: int
    group: int
    cores: float
    """CPU of the leader's thread while the job trains; 1 is all it has."""
    wait_p99_seconds: float
    """From a frame's arrival to its being noted; infinite: the queue only grows."""
    detection_p50_seconds: float
    detection_p99_seconds: float
    """From the loss of a hundred hosts at once (an eighth of all at most) to each being called silent; infinite: one never was."""
    num_false: int
    """Healthy nodes that were called silent."""


def check(load: Load) -> Load:
    """The same load when it makes sense.

    Raises:
        ConfigurationError: no nodes, groups of none, no time.
    """
    for name, value in (("nodes", load.nodes), ("group", load.group)):
        if value < 1:
            raise ConfigurationError(f"{name} is {value}", where="a leader's load", hint="give at least 1")
    if not load.step_seconds > 0 or not math.isfinite(load.step_seconds):
        raise ConfigurationError(f"a step of {load.step_seconds} s", where="a leader's load", hint="give seconds above 0")
    return load


def frame_seconds(costs: Costs, load: Load) -> float:
    """CPU of one sender's beats of one period."""
    return costs.beat if load.group == 1 else costs.beat + load.group * costs.word


def reports_seconds(costs: Costs, load: Load) -> float:
    """CPU of one sender's reports of one step."""
    return costs.report if load.group == 1 else costs.beat + load.group * costs.report_word


def cores(costs: Costs, load: Load) -> float:
    """Mean CPU while training, in cores: frames and the words in them, reports and a turn a step, looks."""
    frames = load.senders * frame_seconds(costs, load) / BEAT_SECONDS
    steps = (load.senders * reports_seconds(costs, load) + costs.step_turn * load.nodes / 1000.0) / load.step_seconds
    looks = costs.look * load.nodes / 1000.0 / LOOK_SECONDS
    return frames + steps + looks


_Job = tuple[float, int, str, int, float]
"""(arrival, order among equals, kind, sender, seconds of work) for the leader's thread."""


class _Queue:
    """One leader over a few seconds: steady training, the longest turn of a recovery, then hosts that lose power together."""

    def __init__(self, costs: Costs, load: Load, seed: int) -> None:
        self.costs, self.load = costs, load
        rng = random.Random(f"{seed}/beats")  # noqa: S311  # a simulation is to be repeated
        self.phase = [rng.uniform(0.0, BEAT_SECONDS) for _ in range(load.nodes)]
        self.frame_phase = self.phase if load.group == 1 else [rng.uniform(0.0, BEAT_SECONDS) for _ in range(load.senders)]
        self.lost = set(rng.sample(range(load.nodes), min(_NUM_LOST, load.nodes // 8)))
        self.rng = rng
        self.silence = Silence(silence_seconds=SILENCE_SECONDS, look_seconds=LOOK_SECONDS)
        self.waits: list[float] = []
        self.detected: dict[int, float] = {}
        self.false: set[int] = set()

    def run(self) -> None:
        """Serve everything that arrives, in order of arrival."""
        for node in range(self.load.nodes):
            self.silence.connected(str(node), 0.0)
        free_at = 0.0
        for at, _, kind, sender, seconds in self._arrivals():
            free_at = max(free_at, at) + seconds
            if kind == "beat":
                self.waits.append(free_at - at)
                for node in self._in_frame(sender, at):
                    self.silence.heard(str(node), free_at)
            elif kind == "look":
                self._look(free_at)

    def _look(self, now: float) -> None:
        for event in self.silence.look(now):
            node = int(event.node)
            if node in self.lost and now >= _LOST_AT:
                self.detected.setdefault(node, now - _LOST_AT)
            else:
                self.false.add(node)

    def _in_frame(self, sender: int, at: float) -> Iterator[int]:
        """Nodes whose beat is in the frame that left at this instant."""
        group = self.load.group
        if sender == 0 and _RECOVERY_AT <= at < _RECOVERY_AT + self.load.unheard_seconds:
            return
        for node in range(sender * group, min(self.load.nodes, (sender + 1) * group)):
            sent = at if group == 1 else at - (at - self.phase[node]) % BEAT_SECONDS
            if node not in self.lost or sent < _LOST_AT:
                yield node

    def _arrivals(self) -> Iterator[_Job]:
        """Beats, looks, steps with their reports, and one long turn, in order. Steps end with the loss: it stops all members."""
        costs, load = self.costs, self.load
        frame, reports = frame_seconds(costs, load), reports_seconds(costs, load)
        heap: list[_Job] = [(phase, number, "beat", number, frame) for number, phase in enumerate(self.frame_phase)]
        order = load.senders
        heap.append((LOOK_SECONDS, order, "look", -1, costs.look * load.nodes / 1000.0))
        heap.append((_RECOVERY_AT, order + 1, "turn", -1, costs.worst_turn * load.nodes / 1000.0))
        heap.append((load.step_seconds, order + 2, "step", -1, costs.step_turn * load.nodes / 1000.0))
        heapq.heapify(heap)
        order += 3
        periods = {"beat": BEAT_SECONDS, "look": LOOK_SECONDS, "step": load.step_seconds}  # of looks: at most
        while heap and heap[0][0] < _SIMULATED_SECONDS:
            job = heap[0]
            yield job
            at, number, kind, sender, seconds = job
            if kind not in periods or (kind == "step" and at >= _LOST_AT):
                heapq.heappop(heap)
                continue
            after = next_look(at, LOOK_SECONDS, (self.silence.due_at,)) if kind == "look" else at + periods[kind]
            heapq.heapreplace(heap, (after, number, kind, sender, seconds))
            if kind == "step":
                for one in range(load.senders):
                    order += 1
                    heapq.heappush(heap, (at + self.rng.uniform(0.0, _SPREAD_SECONDS), order, "report", one, reports))


def simulate(costs: Costs, load: Load, *, seed: int = 1) -> Answer:
    """Nine seconds of a leader.

    Raises:
        ConfigurationError: a load that makes no sense.
    """
    mean = cores(costs, check(load))
    if mean > _CROWDED:
        return Answer(
            nodes=load.nodes, group=load.group, cores=mean, wait_p99_seconds=math.inf, detection_p50_seconds=math.inf,
            detection_p99_seconds=math.inf, num_false=0,
        )  # fmt: skip
    queue = _Queue(costs, load, seed)
    queue.run()
    delays = sorted(queue.detected.get(node, math.inf) for node in queue.lost)
    return Answer(
        nodes=load.nodes,
        group=load.group,
        cores=mean,
        wait_p99_seconds=_share(sorted(queue.waits), 0.99),
        detection_p50_seconds=_share(delays, 0.5),
        detection_p99_seconds=_share(delays, 0.99),
        num_false=len(queue.false),
    )


def _share(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0
