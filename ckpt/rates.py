"""How fast each place was that a restore may read from, and in which order to ask them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

MIN_BYTES = 8 << 20
"""Less says nothing of a rate."""
FORGET_SECONDS = 3600.0
"""A place that was slow is tried again after this."""
STORAGE = ""
"""The checkpoint folder, among names of nodes."""


class Rates:
    """Bytes per second by place, of the newest transfer. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: dict[str, tuple[float, float]] = {}

    def note(self, place: str, num_bytes: float, seconds: float) -> None:
        """A transfer has ended, whole or not."""
        if num_bytes >= MIN_BYTES and seconds > 0.0:
            self._found[place] = (num_bytes / seconds, self._now())

    def known(self) -> dict[str, float]:
        """What was measured and is not too old."""
        oldest = self._now() - FORGET_SECONDS
        return {place: rate for place, (rate, at) in self._found.items() if at >= oldest}


def order(holders: Sequence[str], known: Mapping[str, float]) -> tuple[str, ...]:
    """Which nodes to ask for a part of a file, the fastest first, before storage is read for what none of them gave.

    A node that was not measured comes first, in the order given: it may be the fastest, and while it sends it is measured. A node that
    was slower than storage is left out.

    Args:
        holders: Nodes that may have the file in memory: its own, then its buddy.
        known: Bytes per second by node, and of storage under `STORAGE`, as far as they were measured; without it for what is on no storage.
    """
    storage = known.get(STORAGE, 0.0)
    asked = [node for node in holders if known.get(node, math.inf) >= storage]
    return tuple(sorted(asked, key=lambda node: -known.get(node, math.inf)))
