"""Drain and undrain in Slurm, with scontrol. Only drains that carry our mark are undone."""

from __future__ import annotations

import re
import shlex

from regrow.supervisor.actuators import programs
from regrow.supervisor.actuators.port import MARK, ActuatorError, Call, Done, LeftAlone, safe_reason

_STATE = re.compile(r"\bState=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: \[[^\[\]]*\])?(?= \w+=|$)")


class Slurm:
    """One cluster, as scontrol of this host finds it (SLURM_CONF, slurm.conf)."""

    name = "slurm"

    def __init__(self, scontrol: str, timeout_seconds: float) -> None:
        self._scontrol = scontrol
        self._timeout_seconds = timeout_seconds

    def preview(self, call: Call) -> str:
        """The command."""
        return shlex.join(self._update(call))

    async def act(self, call: Call) -> Done | LeftAlone:
        """Look, act, look again: what counts is what Slurm shows.

        Raises:
            ActuatorError: scontrol failed, or the node is not as ordered afterwards.
        """
        drained, reason = await self._look(call.node)
        ours = reason.startswith(MARK)
        if call.direction == "out":
            if drained:
                return Done(f"is drained: {reason}") if ours else LeftAlone(f"was drained by somebody else: {reason or 'no reason'}")
        elif not drained:
            return Done("is not drained")
        elif not ours:
            return LeftAlone(f"stays drained by somebody else: {reason or 'no reason'}")
        await self._ask(*self._update(call)[1:])
        drained, reason = await self._look(call.node)
        if drained != (call.direction == "out"):
            raise ActuatorError(f"scontrol succeeded, and the node is {'' if drained else 'not '}drained", where=call.node)
        return Done(f"drained: {reason}" if drained else "undrained")

    def _update(self, call: Call) -> tuple[str, ...]:
        what = ("State=DRAIN", f"Reason={MARK}{safe_reason(call.reason)}") if call.direction == "out" else ("State=UNDRAIN",)
        return (self._scontrol, "update", f"NodeName={call.node}", *what)

    async def _look(self, node: str) -> tuple[bool, str]:
        """(drained or draining, reason)."""
        text = await self._ask("-o", "show", "node", node)
        state, reason = _STATE.search(text), _REASON.search(text)
        if state is None:
            raise ActuatorError(f"scontrol shows no state: {text[:200]}", where=node, hint="is it named in Slurm as in Regrow?")
        return "DRAIN" in state[1].upper(), reason[1] if reason is not None else ""

    async def _ask(self, *arguments: str) -> str:
        done = await programs.run((self._scontrol, *arguments), timeout_seconds=self._timeout_seconds)
        if done.status:
            raise ActuatorError(f"scontrol {arguments[0]} ended with {done.status}: {done.output[:300]}", where=self._scontrol)
        return done.output
