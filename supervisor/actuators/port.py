"""What an actuator is: a way to tell somebody outside that a node is out, or that it is back."""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from regrow.errors import OperationalError

Direction = Literal["out", "in"]
MARK = "regrow: "
"""Begins every reason that we leave behind: what does not begin with it is somebody else's and stays as it is."""
_MOST_REASON = 200
_UNSAFE = re.compile(r"[^\w .,:;()/+*%@=-]+", re.ASCII)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One order to an actuator. The same order may come twice: after a failure, after a change of leader."""

    node: str
    direction: Direction
    reason: str
    """Why the node is out; printable ASCII without quotes, at most 200 characters."""
    hardware: str
    """Key of the quarantine: a GPU's UUID, a chassis serial, or node:NAME."""
    id: str
    """The same for every attempt at one order: lets the other side see that it has it already."""


class LeftAlone(msgspec.Struct, frozen=True):
    """The node is out by somebody else's order: nothing was done, and nothing will be undone."""

    detail: str


class Done(msgspec.Struct, frozen=True):
    """It is as ordered."""

    detail: str


class ActuatorError(OperationalError):
    """An attempt that failed. It is repeated."""


class Actuator(Protocol):
    """One way out."""

    name: str

    async def act(self, call: Call) -> Done | LeftAlone:
        """Make it so; idempotent.

        Raises:
            ActuatorError: it could not be done now.
        """
        ...

    def preview(self, call: Call) -> str:
        """What `act` would do, as a line for people."""
        ...


def safe_reason(text: str) -> str:
    """A reason that can be an argument, an annotation and a log line; it never begins with a dash."""
    return _UNSAFE.sub("_", text.strip()).lstrip("-")[:_MOST_REASON] or "quarantined"
