"""The health policy as frozen settings, read from policy.toml or from a file of the operator's."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from regrow.errors import ConfigurationError

DEFAULT = Path(__file__).with_name("policy.toml")
Action = Literal["none", "watch", "restart_app", "reset", "reboot", "replace"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ProbePolicy(_Section, frozen=True, kw_only=True):
    """How often the GPUs are looked at and when a silent driver is hung."""

    period_seconds: float
    absent_period_seconds: float
    deadline_seconds: float
    hung_probes: int


class XidPolicy(_Section, frozen=True, kw_only=True):
    """Which XIDs belong together and for how long they count."""

    chain_seconds: float
    quiet_seconds: float
    teardown_grace_seconds: float


class EscalationPolicy(_Section, frozen=True, kw_only=True):
    """When the same fault again asks for more."""

    hours: float
    replace_after: int


class MemoryPolicy(_Section, frozen=True, kw_only=True):
    """GPU memory errors."""

    corrected_per_hour: float
    retired_pages_replace: int


class ThermalPolicy(_Section, frozen=True, kw_only=True):
    """Temperatures and throttling."""

    near_slowdown_celsius: int
    near_slowdown_seconds: float
    over_slowdown_seconds: float
    throttle_share_watch: float
    throttle_share_bad: float
    clock_reason_seconds: float
    sw_thermal_seconds: float


class LinkPolicy(_Section, frozen=True, kw_only=True):
    """PCI Express, NVLink and the fabric."""

    pcie_replays_per_minute: float
    generation_busy_percent: int
    fabric_seconds: float


class PowerPolicy(_Section, frozen=True, kw_only=True):
    """Busy without drawing power: waiting in a collective."""

    stalled_utilization_percent: int
    stalled_power_share: float
    stalled_seconds: float


class ProcessPolicy(_Section, frozen=True, kw_only=True):
    """Processes left on a GPU after the job."""

    leftover_seconds: float


class HostPolicy(_Section, frozen=True, kw_only=True):
    """The machine around the GPUs."""

    memory_available_share: float
    disk_free_share: float
    file_handles_share: float
    zombies: int
    clock_offset_seconds: float


class KernelRule(_Section, frozen=True, kw_only=True):
    """A class of kernel lines: what it asks for once it came `times` within `seconds`."""

    action: Action
    times: int = 1
    seconds: float = 60.0
    ours_only: bool = False


class Policy(_Section, frozen=True, kw_only=True):
    """All of policy.toml."""

    version: int
    probe: ProbePolicy
    xid: XidPolicy
    escalation: EscalationPolicy
    memory: MemoryPolicy
    thermal: ThermalPolicy
    link: LinkPolicy
    power: PowerPolicy
    process: ProcessPolicy
    host: HostPolicy
    kernel: dict[str, KernelRule]


@functools.cache
def default() -> Policy:
    """The policy that ships with the package."""
    return load(DEFAULT)


def load(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        ConfigurationError: unreadable, not TOML, an unknown key or a value of a wrong type, with its place.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Policy)
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=str(path), hint="check --policy") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(str(error), where=str(path), hint=f"compare with {DEFAULT.name} of the package") from error
