"""XIDs: the table, reading them from kernel lines, and telling causes from what follows them.

NVML events carry the number only; the kernel log carries pid, link and sub-code, and sometimes XIDs that NVML missed.
The same XID of both is one event.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

_TABLE = Path(__file__).with_name("xid.toml")

NVLINK5 = frozenset(range(144, 151))
"""XIDs whose severity stands in the text (NVLink 5)."""

ACTIONS = ("none", "watch", "restart_app", "reset", "reboot", "replace")
"""What a node may need, mildest first."""

_LINE = re.compile(r"\bXid\b\s*\((?:PCI:)?([0-9a-fA-F:.]+)\)\s*:\s*(\d+)(?:,\s*(.*))?$")
_PID = re.compile(r"\bpid='?(\d+)")
_RECOVERY = re.compile(r"changed from 0x[0-9a-f]+ \([^)]*\) to 0x([0-9a-f]+)", re.IGNORECASE)

RECOVERY_ACTIONS: dict[int, str] = {0: "none", 1: "reset", 2: "reboot", 3: "reset", 4: "reset", 5: "reset", 6: "reset", 7: "reboot"}
"""NVML_GPU_RECOVERY_ACTION_* in our words (3 drain P2P, 4 drain and reset, 5 recover IMEX domain, 6 bus reset)."""


class Xid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of xid.toml; the file's head explains the fields."""

    code: int
    meaning: str
    action: str
    log_class: str
    log_action: str
    role: Literal["initiating", "cascade"] = "initiating"
    vendor: str = ""
    gpud: str = ""
    advice: str = ""
    killed: bool = False
    at_idle: bool = False
    escalate: tuple[tuple[int, float, str], ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    xid: tuple[Xid, ...]


class XidSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One XID on one GPU. `at`: seconds of this host's boot clock. `source`: nvml, kernel, or both."""

    code: int
    at: float
    uuid: str = ""
    pci_bus_id: str = ""
    pid: int = 0
    text: str = ""
    source: Literal["nvml", "kernel", "both"] = "nvml"


@functools.cache
def _file() -> _File:
    return msgspec.convert(tomllib.loads(_TABLE.read_text(encoding="utf-8")), _File)


def version() -> int:
    """Version of the table."""
    return _file().version


@functools.cache
def table() -> dict[int, Xid]:
    """The table by code."""
    return {one.code: one for one in _file().xid}


def known(code: int) -> Xid:
    """The row of a code; an unknown code is to be watched."""
    row = table().get(code)
    return row or Xid(code=code, meaning="not in the table", action="watch", log_class="gpu_unknown_xid", log_action="watch")


def parse(text: str, at: float) -> XidSeen | None:
    """The XID in a kernel line, or None."""
    match = _LINE.search(text.rstrip())
    if match is None:
        return None
    pid = _PID.search(text)
    bus = normal_bus_id(match.group(1))
    return XidSeen(
        code=int(match.group(2)), at=at, pci_bus_id=bus, pid=int(pid.group(1)) if pid else 0, text=match.group(3) or "", source="kernel"
    )


def normal_bus_id(text: str) -> str:
    """A PCI address in one form: `0000:1b:00.0`, whatever domain width and case NVML or the kernel use."""
    parts = text.strip().lower().split(":")
    if len(parts) != 3:
        return text.strip().lower()
    tail = parts[2] if "." in parts[2] else f"{parts[2]}.0"
    return f"{int(parts[0], 16):04x}:{parts[1]}:{tail}"


def recovery_action(text: str) -> str:
    """What an XID 154 line asks for, in our words; watch when the text does not say."""
    match = _RECOVERY.search(text)
    return RECOVERY_ACTIONS.get(int(match.group(1), 16), "watch") if match else "watch"


def action_of(seen: XidSeen) -> str:
    """What this XID asks for when it comes alone."""
    row = known(seen.code)
    if seen.code == 154:
        return recovery_action(seen.text)
    if seen.code in NVLINK5 and re.search(r"\bnon-?fatal\b", seen.text, re.IGNORECASE):
        return "restart_app" if re.search(r"\b[RT]LW_", seen.text) else "watch"
    return row.action


MERGE_SECONDS = 5.0
"""NVML and the kernel log tell the same XID within this time of each other."""


def merge(events: Iterable[XidSeen], recent: Iterable[XidSeen] = ()) -> tuple[list[XidSeen], tuple[XidSeen, ...]]:
    """Deduplicate: one NVML event and one kernel line of the same XID on the same GPU are one.

    Two events of the same source stay two: repeats are evidence. `recent` are events that were counted before.

    Returns:
        The events that are new, and the `recent` for the next call.
    """
    kept = list(recent)
    num_known = len(kept)
    for event in sorted(events, key=lambda one: one.at):
        twin = next((i for i in range(len(kept) - 1, -1, -1) if _twins(kept[i], event)), None)
        if twin is None:
            kept.append(event)
        else:
            kept[twin] = _joined(kept[twin], event)
    newest = max((one.at for one in kept), default=0.0)
    return kept[num_known:], tuple(one for one in kept if one.at >= newest - MERGE_SECONDS)


def _twins(a: XidSeen, b: XidSeen) -> bool:
    same_gpu = (a.uuid and a.uuid == b.uuid) or (a.pci_bus_id and a.pci_bus_id == b.pci_bus_id)
    return bool(same_gpu) and a.code == b.code and abs(b.at - a.at) <= MERGE_SECONDS and {a.source, b.source} == {"nvml", "kernel"}


def _joined(a: XidSeen, b: XidSeen) -> XidSeen:
    kernel, nvml = (a, b) if a.source == "kernel" else (b, a)
    return msgspec.structs.replace(kernel, at=min(a.at, b.at), uuid=nvml.uuid or kernel.uuid, source="both")


def rank(action: str) -> int:
    """Severity of an action: its place in ACTIONS."""
    return ACTIONS.index(action)


def cause(events: Sequence[XidSeen]) -> XidSeen | None:
    """The cause among XIDs that belong together: the worst initiating one, the earliest of equals; None without one."""
    initiating = [one for one in events if known(one.code).role == "initiating" and action_of(one) != "none"]
    if not initiating:
        return None
    worst = max(rank(action_of(one)) for one in initiating)
    return min((one for one in initiating if rank(action_of(one)) == worst), key=lambda one: one.at)
