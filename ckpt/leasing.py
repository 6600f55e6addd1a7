"""What a rank gets of this node's memory, and what is left out where that is short."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from regrow.ckpt.arenas import Arena, ArenaPool
from regrow.ckpt.protocol import ARENAS_PER_PRODUCER

log = logging.getLogger("regrow.ckpt.arenas")
HINT = "save with more nodes or fewer ranks a node, leave --peer-memory out, or make room; `regrow interval --node-state-gb` counts it"


class Leased(msgspec.Struct, frozen=True):
    """Arenas, two if there is memory for them; with one a save is skipped while the one before is written."""

    arenas: list[Arena]
    problem: str = ""
    """Why there are fewer, and what to try."""


def lease(pool: ArenaPool, make_room: Callable[[int], int], num_bytes: int, prefer: Callable[[Arena], bool]) -> Leased:
    """Arenas for one rank. Blocking: new pages are allocated here.

    For the first one copies of other nodes' files go: without it nothing is saved at all. For the second one they do not.

    Args:
        pool: Of the node.
        make_room: Gives up copies of so many bytes; returns how many files they were.
        num_bytes: Of each arena.
        prefer: Of free ones that fit, which to take.
    """
    arenas: list[Arena] = []
    while len(arenas) < ARENAS_PER_PRODUCER:
        try:
            arenas.append(pool.take(num_bytes, prefer))
        except OSError as error:
            if not arenas and (num_files := make_room(num_bytes)):
                log.warning("copies of other nodes given up for an arena files=%d", num_files)
                continue
            left_out = "a second arena, so a save is skipped while the one before is written" if arenas else "arenas"
            problem = f"no memory for {left_out}: {error.strerror}; {HINT}"
            log.warning("%s", problem)
            return Leased(arenas, problem)
    return Leased(arenas)
