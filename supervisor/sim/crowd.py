"""All nodes come to a new leader at once: how long until the last has been greeted.

The rules are those of production: sixteen connections are taken at a time (`supervisor.beat_server`), the rest wait in the kernel; a
node that waits too long gives up and comes again (`agent.beat`); whoever has been greeted beats from then on.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque

from regrow.supervisor.sim.control_plane import BEAT_SECONDS, Load, check, frame_seconds
from regrow.supervisor.sim.leader_costs import Costs

FORMING_SECONDS = 10.0
"""Aim for a cluster that comes to a new leader."""
_AT_ONCE = 16
_PAUSE_SECONDS = (0.02, 1.0)
_BACKLOG = 4096
_PATIENCE_SECONDS = 3.0
"""A connection that is not made by then is given up."""
_FIRST_SECONDS, _AGAIN_SECONDS = 0.05, 1.0
_NEVER_SECONDS = 120.0


def greeting_seconds(costs: Costs, load: Load, *, seed: int = 1) -> float:
    """Seconds until all senders (nodes, or aggregators) have been greeted; infinite when it takes longer than two minutes.

    Raises:
        ConfigurationError: a load that makes no sense.
    """
    check(load)
    rng = random.Random(f"{seed}/crowd")  # noqa: S311  # a simulation is to be repeated
    coming = [(rng.uniform(0.0, 1.3 * _FIRST_SECONDS), number, 1) for number in range(load.senders)]
    heapq.heapify(coming)
    waiting: deque[tuple[float, int, int]] = deque()
    now, greeted, frame = 0.0, 0, frame_seconds(costs, load)
    if load.senders * frame >= BEAT_SECONDS or load.senders * costs.greeting > _NEVER_SECONDS:
        return math.inf  # the last ones would find no time left
    while greeted < load.senders:
        while coming and coming[0][0] <= now:
            came = heapq.heappop(coming)
            if len(waiting) < _BACKLOG:
                waiting.append(came)
            else:
                heapq.heappush(coming, (now + _AGAIN_SECONDS, came[1], came[2]))  # the kernel sends its first packet again
        work = 0.0
        for _ in range(min(_AT_ONCE, len(waiting))):
            came_at, number, tries = waiting.popleft()
            gave_up_at = came_at + _PATIENCE_SECONDS
            if gave_up_at <= now + work:
                work += costs.abandoned
                pause = min(_AGAIN_SECONDS, _FIRST_SECONDS * 2**tries) * rng.uniform(0.7, 1.3)
                heapq.heappush(coming, (max(gave_up_at + pause, now), number, tries + 1))
            else:
                work += costs.greeting
                greeted += 1
        free = 1.0 - greeted * frame / BEAT_SECONDS
        if free <= 0.0 or now > _NEVER_SECONDS:
            return math.inf
        now += max(_PAUSE_SECONDS[0], work / free)
    return now
