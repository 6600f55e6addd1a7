"""The journal of a simulation: every turn with its events and actions. Its digest is the run's fingerprint; its lines are a test."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import Turn, turn
from regrow.supervisor.core.view import View

if TYPE_CHECKING:
    from regrow.supervisor.sim.leader import Leader

_encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one leader."""

    leader: str
    now: float
    events: tuple[e.Event, ...]
    actions: tuple[tuple[int, a.Action], ...]
    reason: str
    wake_at: float | None = None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a journal file."""

    policy: Policy
    seed: str = ""


class Journal:
    """Digest of all turns, and the turns themselves when somebody wants them."""

    def __init__(self, *, short: bool) -> None:
        self._short = short
        self._hash = hashlib.sha256()
        self._file: TextIO | None = None
        self.num_turns = 0

    def write_to(self, file: TextIO, head: Head) -> None:
        """Also write every turn as a line of JSON."""
        self._file = file
        file.write(_encode(head).decode() + "\n")

    def turn(self, now: float, leader: Leader, events: tuple[e.Event, ...], result: Turn) -> None:
        """Add one turn."""
        self.num_turns += 1
        text = b""
        if self._file is not None or not self._short:
            line = Line(
                leader=leader.name,
                now=now,
                events=events,
                actions=result.actions,
                reason=result.decision.reason,
                wake_at=result.decision.wake_at,
            )
            text = _encode(line)
            if self._file is not None:
                self._file.write(text.decode() + "\n")
        if self._short:
            text = _encode([leader.name, now, _brief(events), len(result.actions), result.decision.reason, result.decision.wake_at])
        self._hash.update(text)

    @property
    def digest(self) -> str:
        """SHA-256 of all turns, hex."""
        return self._hash.hexdigest()


def _brief(events: tuple[e.Event, ...]) -> list[Any]:
    """Events of a large cluster without what is the same a thousand times."""
    if len(events) > 64:
        return [len(events)]
    return [[event.__struct_config__.tag, event.at] for event in events]


def replay(path: Path) -> int:
    """Feed a recorded journal to the production `turn` and compare every decision. Returns the number of turns.

    Raises:
        ConfigurationError: the file is not a journal.
        AssertionError: a decision differs; the text names the turn.
    """
    try:
        lines = path.read_bytes().splitlines()
        head = msgspec.json.decode(lines[0], type=Head)
        turns = [msgspec.json.decode(line, type=Line) for line in lines[1:]]
    except (OSError, IndexError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"is not a simulator's journal: {error}", where=str(path), hint="write one with --journal") from error
    views: dict[str, View] = {}
    for number, line in enumerate(turns, start=1):
        result = turn(views.get(line.leader, View()), line.events, head.policy, line.now)
        views[line.leader] = result.view
        same = _encode([result.actions, result.decision.reason, result.decision.wake_at]) == _encode(
            [line.actions, line.reason, line.wake_at]
        )
        if not same:
            raise AssertionError(f"turn {number} at {line.now:.3f} s decides {result.decision.reason!r}, recorded is {line.reason!r}")
    return len(turns)
