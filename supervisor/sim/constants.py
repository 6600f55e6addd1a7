"""The delays of the simulated world: from constants.toml, each with its source; a file of the user's replaces single ones."""

from __future__ import annotations

import difflib
import math
import random
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError


class Delay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lognormal delay in seconds whose median grows with the cluster."""

    median: float
    source: str
    per_thousand_nodes: float = 0.0
    sigma: float = 0.0
    values: tuple[float, ...] = ()
    """Measured ones, to draw from in place of the distribution: a start is warm or cold, and never in between."""
    after: dict[str, tuple[float, ...]] = {}
    """Those measured after one kind of fault, in place of `values`: hung processes end otherwise than those whose peer is gone."""

    def at(self, nodes: int) -> float:
        """Median for a cluster of this many nodes."""
        return self.median + self.per_thousand_nodes * nodes / 1000.0

    def sample(self, rng: random.Random, nodes: int = 0, after: str = "") -> float:
        """One draw, after a fault of this kind. One number is taken from `rng`, whatever the parameters."""
        values = self.after.get(after) or self.values
        if values:
            return values[int(rng.random() * len(values))]
        noise = rng.gauss(0.0, 1.0)
        return self.at(nodes) * math.exp(self.sigma * noise)


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All delays. Names are the tables of constants.toml."""

    silence: Delay
    lease: Delay
    peer_error: Delay
    exit_report: Delay
    verdict: Delay
    stacks: Delay
    message: Delay
    record: Delay
    commit: Delay
    stop: Delay
    start: Delay
    start_cold: Delay
    rendezvous: Delay
    restore: Delay
    first_step: Delay
    requeue: Delay
    agent_restart: Delay
    takeover: Delay
    reset: Delay
    replace: Delay
    reboot: Delay
    outage: Delay
    maintenance: Delay
    sdc_seen: Delay
    write_noise: Delay

    def named(self, name: str) -> Delay:
        """The delay of this name."""
        found = getattr(self, name)
        assert isinstance(found, Delay)
        return found


def load(file: Path | None = None, **changes: float) -> Constants:
    """The shipped constants, with those of `file` and then `changes` (medians in seconds, without spread or growth) in their place.

    Raises:
        ConfigurationError: a file that cannot be read, an unknown name, a value that is negative or not finite.
    """
    tables: dict[str, Any] = tomllib.loads(shipped("constants.toml"))
    if file is not None:
        for name, table in _read(file).items():
            if name not in tables:
                near = difflib.get_close_matches(name, tables, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(tables))}"
                raise ConfigurationError(f"unknown delay {name!r}", where=str(file), hint=hint)
            given = table if isinstance(table, dict) else {"median": table, "sigma": 0.0, "per_thousand_nodes": 0.0}
            tables[name] = tables[name] | {"source": str(file)} | given
    for name, value in changes.items():
        tables[name] = {"median": value, "source": "given"}
    try:
        made = msgspec.convert(tables, Constants)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"wrong constants: {error}", where=str(file or "constants.toml"), hint="see docs/simulator.md") from error
    for name in made.__struct_fields__:
        delay = made.named(name)
        for value in (delay.median, delay.sigma, delay.per_thousand_nodes, *delay.values):
            if not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"{name} is {value}", where=str(file or "constants.toml"), hint="give seconds of at least 0")
    return made


def shipped(name: str) -> str:
    """Text of a data file of this package."""
    return resources.files("regrow.supervisor.sim").joinpath(name).read_text(encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=str(file), hint="check --constants") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"is not TOML: {error}", where=str(file), hint="see docs/simulator.md for an example") from error
