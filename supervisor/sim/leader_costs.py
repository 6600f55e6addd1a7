"""What things cost a leader, in CPU seconds of its one thread: from leader.toml, or measured anew by benchmarks/aggregators.py."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.sim.constants import shipped

_SHIPPED = "leader.toml"


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds of the leader's process, each from a measurement. Nodes have eight ranks."""

    beat: float
    """One beat of one node on a TLS connection of its own: wake-up, record, decoding, tables."""
    word: float
    """The same beat inside a frame of an aggregator: decoding and tables."""
    report: float
    """One node's reports of a step on its own connection."""
    report_word: float
    """The same reports inside a frame."""
    greeting: float
    """One TLS handshake with its hello and welcome."""
    abandoned: float
    """A connection whose node has given up before it was taken."""
    step_turn: float
    """The turn that follows a completed step, per thousand nodes."""
    worst_turn: float
    """The longest turn of a recovery, per thousand nodes."""
    look: float
    """One look of the failure detector, per thousand nodes."""


def load(file: Path | None = None) -> Costs:
    """The shipped costs; or those of `file`: TOML like leader.toml, or what `benchmarks/aggregators.py --json` printed.

    Raises:
        ConfigurationError: it cannot be read, a cost is missing, unknown, negative or not finite.
    """
    where = str(file or _SHIPPED)
    try:
        made = msgspec.convert(_table(shipped(_SHIPPED) if file is None else _text(file), where), Costs)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"wrong costs: {error}", where=where, hint="see docs/simulator.md") from error
    for name in made.__struct_fields__:
        value = getattr(made, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigurationError(f"{name} is {value}", where=where, hint="give CPU seconds of at least 0")
    return made


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}", where=str(file), hint="check --costs") from error


def _table(text: str, where: str) -> dict[str, Any]:
    """{name: seconds}."""
    if text.lstrip().startswith("{"):
        try:
            return dict(msgspec.json.decode(text)["samples"]["costs_seconds"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"is not what the benchmark prints: {error}", where=where, hint="benchmarks/aggregators.py --json > FILE"
            ) from error
    try:
        return {name: entry["seconds"] if isinstance(entry, dict) else entry for name, entry in tomllib.loads(text).items()}
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigurationError(f"is not TOML with seconds: {error}", where=where, hint="see leader.toml") from error
