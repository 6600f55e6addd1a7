"""What is remembered of a node between probes, agents and boots. Plain data, saved in the agent's state folder.

Instants here are this host's own wall clock (they must outlive a boot); they are never compared with another host's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from regrow.agent.health.xid import XidSeen
from regrow.wire import Device

MAX_AUDIT = 200
MAX_TIMES = 32


class XidCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one XID came on one GPU. `times` keeps the last few instants for repeat rules."""

    count: int = 0
    teardown: int = 0
    """So many of them in our own kill windows."""
    first_at: float | None = None
    last_at: float | None = None
    times: tuple[float, ...] = ()


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong now. Keyed by (uuid, kind); uuid "" is the node itself."""

    incident: str
    kind: str
    uuid: str = ""
    action: str
    state: Literal["degraded", "unhealthy"]
    reason: str
    evidence: tuple[str, ...] = ()
    boot_id: str = ""
    since_at: float
    last_at: float
    clears: Literal["level", "quiet", "reset", "reboot", "operator"] = "level"
    """level: when a probe no longer finds it; quiet: after a time without a repeat; reset / reboot: when that was seen to happen."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """An audit entry: which incident ended, why and by whom."""

    incident: str
    kind: str
    uuid: str
    action: str
    at: float
    by: str
    """reboot, reset, level, quiet, test or the operator's name."""
    why: str = ""


class DeviceHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as it was seen last. Counters hold within one boot and driver load: a lower value is a new start."""

    device: Device
    boot_id: str = ""
    at: float = 0.0
    counters: dict[str, int] = {}
    links_up: tuple[int, ...] = ()
    xids: dict[int, XidCount] = {}


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Everything remembered."""

    version: int = 1
    boot_id: str = ""
    devices: dict[str, DeviceHistory] = {}
    conditions: tuple[Condition, ...] = ()
    pending: dict[str, float] = {}
    """Findings that must last before they count: "uuid kind" -> since when."""
    kernel: dict[str, tuple[float, ...]] = {}
    """Class of kernel line -> when it came."""
    recent: tuple[XidSeen, ...] = ()
    """XIDs of the last seconds: the other source may tell the same one a moment later."""
    hung_probes: int = 0
    next_incident: int = 1
    audit: tuple[Cleared, ...] = ()


class ClearRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks the running agent for, through a file in its state folder. incident "": all that are open."""

    incident: str = ""
    by: str
    why: str


CLEAR_REQUEST = "health-clear.json"
"""Name of that file; the agent removes it when it has acted."""


def request_clear(state_dir: Path, request: ClearRequest) -> None:
    """Leave a request for the agent of this state folder."""
    _replace(state_dir / CLEAR_REQUEST, msgspec.json.encode(request))


def take_clear_request(state_dir: Path) -> ClearRequest | None:
    """The request, when there is one; it is gone afterwards. One that cannot be read is dropped."""
    path = state_dir / CLEAR_REQUEST
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        path.unlink()
        return msgspec.json.decode(data, type=ClearRequest)
    except (OSError, msgspec.DecodeError):
        return None


def load(path: Path) -> History:
    """The saved history; an absent or unreadable one is a fresh start (the GPUs themselves tell what still holds)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except (OSError, msgspec.DecodeError):
        return History()


def save(path: Path, history: History) -> None:
    """Replace the file in one step."""
    _replace(path, msgspec.json.encode(history))


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
