"""A program of the site's own: for Redfish, a cloud's replace call, a ticket. An argument list with places to fill, never a shell."""

from __future__ import annotations

import re
import shlex

from regrow.errors import ConfigurationError
from regrow.supervisor.actuators import programs
from regrow.supervisor.actuators.port import MARK, ActuatorError, Call, Done, LeftAlone, safe_reason

PLACES = ("node", "reason", "hardware", "id", "direction")
_PLACE = re.compile(r"\{(\w*)\}")
_HARDWARE = re.compile(r"[^\w.:-]+", re.ASCII)


def check_template(argv: tuple[str, ...], where: str) -> None:
    """Every place is known and the program is fixed.

    Raises:
        ConfigurationError: it is not so.
    """
    if not argv or not argv[0]:
        raise ConfigurationError("no program is given", where=where, hint='for example ["/usr/local/bin/ticket", "{node}", "{reason}"]')
    if _PLACE.search(argv[0]):
        raise ConfigurationError("the program itself must be fixed", where=where, hint=f"{argv[0]!r} has a place to fill")
    for word in argv:
        for name in _PLACE.findall(word):
            if name not in PLACES:
                raise ConfigurationError(f"{{{name}}} is not known", where=where, hint=f"known: {', '.join(PLACES)}")


def fill(argv: tuple[str, ...], call: Call) -> tuple[str, ...]:
    """The arguments of one call. A value stays within its argument, whatever is in it."""
    values = {
        "node": call.node,
        "reason": f"{MARK}{safe_reason(call.reason)}",
        "hardware": _HARDWARE.sub("_", call.hardware)[:200],
        "id": call.id,
        "direction": call.direction,
    }
    return tuple(_PLACE.sub(lambda found: values[found[1]], word) for word in argv)


class Command:
    """Exit code 0: done; 75 (EX_TEMPFAIL) and all others: again later. The same {id} for every attempt at one order."""

    name = "command"

    def __init__(self, out: tuple[str, ...], back: tuple[str, ...], timeout_seconds: float) -> None:
        """`back` may be empty: nobody is told that a node is back.

        Raises:
            ConfigurationError: a template is not usable.
        """
        check_template(out, "[actuators] command_out")
        if back:
            check_template(back, "[actuators] command_in")
        self._argv = {"out": out, "in": back}
        self._timeout_seconds = timeout_seconds

    def preview(self, call: Call) -> str:
        """The command."""
        argv = self._argv[call.direction]
        return shlex.join(fill(argv, call)) if argv else "nothing: command_in is not set"

    async def act(self, call: Call) -> Done | LeftAlone:
        """Run it.

        Raises:
            ActuatorError: it did not end with 0.
        """
        argv = self._argv[call.direction]
        if not argv:
            return Done("command_in is not set")
        extra = {
            f"REGROW_ORDER_{name.upper()}": value for name, value in zip(PLACES, fill(tuple(f"{{{p}}}" for p in PLACES), call), strict=True)
        }
        done = await programs.run(fill(argv, call), timeout_seconds=self._timeout_seconds, extra=extra)
        if done.status:
            raise ActuatorError(f"{argv[0]} ended with {done.status}: {done.output[-300:]}", where=argv[0])
        return Done(done.output[-300:] or "ended with 0")
