"""Writes the state file of the fake library. Every change is one atomic replace; readers see the old world or the new.

A change is read, changed and written under a lock file, so several writers (demo, chaos, tests) can share one state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "REGROW_FAKE_NVML"
"""Environment variable with the path of the state file."""

EVENT_XID = 8
EVENT_DOUBLE_BIT = 2
EVENT_RECOVERY_ACTION = 0x8000


def uuid_of(number: int, node: int = 0) -> str:
    """A UUID for a fake GPU, unique per (node, number)."""
    return f"GPU-fa4e{node:04x}-0000-4000-8000-{number:012d}"


class FakeNvml:
    """One fake driver, that is one state file."""

    def __init__(self, state_path: Path) -> None:
        self.path = state_path

    def write(self, *, devices: int = 8, node: int = 0, **top: Any) -> None:
        """Start over with `devices` healthy GPUs and the given top-level keys (docs/fake-nvml.md)."""
        listed = [{"uuid": uuid_of(i, node), "serial": f"1650{node:04d}{i:04d}"} for i in range(devices)]
        self._replace({"boot_id": f"fake-boot-{node}-1", "reboots": 0, "devices": listed, "events": [], **top})

    def read(self) -> dict[str, Any]:
        """The state as plain data."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the state in one step."""
        with self._locked():
            state = self.read()
            change(state)
            self._replace(state)

    def set(self, **top: Any) -> None:
        """Set top-level keys: count, hang, errors, delay_seconds, missing_symbols, now, driver_version ..."""
        self.update(lambda state: state.update(top))

    def set_device(self, device: int | str, **keys: Any) -> None:
        """Set keys of one device, named by position in the file or by UUID."""
        self.update(lambda state: _device(state, device).update(keys))

    def set_fault(
        self, device: int | str, *, heals_after_resets: int | None = None, heals_after_reboots: int | None = None, **keys: Any
    ) -> None:
        """Lay keys over a device that go away after so many more resets (or reboots) of it; without either, for good."""

        def change(state: dict[str, Any]) -> None:
            one = _device(state, device)
            one["fault"] = dict(keys)
            one.pop("heals_after_resets", None)
            one.pop("heals_after_reboots", None)
            if heals_after_resets is not None:
                one["heals_after_resets"] = one.get("resets", 0) + heals_after_resets
            if heals_after_reboots is not None:
                one["heals_after_reboots"] = state.get("reboots", 0) + heals_after_reboots

        self.update(change)

    def set_xid(self, device: int | str, *xids: int) -> None:
        """Append XID events of one device to the event log."""
        for xid in xids:
            self.add_event(device, EVENT_XID, xid)

    def add_event(self, device: int | str, kind: int, data: int) -> None:
        """Append one event (kind: NVML's event type bit) to the event log."""

        def change(state: dict[str, Any]) -> None:
            events = state.setdefault("events", [])
            seq = events[-1]["seq"] + 1 if events else 1
            events.append({"seq": seq, "device": _device(state, device)["uuid"], "type": kind, "data": data})

        self.update(change)

    def lose(self, device: int | str, *, xid: int | None = 79) -> None:
        """The GPU falls off the bus: calls on it say GPU_IS_LOST, and XID 79 is in the event log."""
        if xid is not None:
            self.set_xid(device, xid)
        self.set_device(device, lost=True)

    def ramp(self, device: int | str, counter: str, per_second: float, *, start: float = 0.0, since: float | None = None) -> None:
        """Let a counter grow with time (CLOCK_BOOTTIME seconds, or the state's own `now`)."""
        now = self.read().get("now")
        begin = since if since is not None else (now if now is not None else _boottime())
        self.set_device(device, **{counter: {"start": start, "per_second": per_second, "since": begin}})

    def hang(self, *calls: str) -> None:
        """Block these calls (default: all) until `resume`."""
        self.set(hang=list(calls) or ["*"])

    def resume(self) -> None:
        """End `hang`."""
        self.set(hang=[])

    def reset(self, device: int | str) -> None:
        """What nvidia-smi --gpu-reset does: one reset more, volatile counters and the lost flag gone, remaps active."""

        def change(state: dict[str, Any]) -> None:
            one = _device(state, device)
            one["resets"] = one.get("resets", 0) + 1
            _clear_volatile(one)

        self.update(change)

    def reboot(self) -> None:
        """The host boots again: a new boot id, every device reset, the event log empty."""

        def change(state: dict[str, Any]) -> None:
            state["reboots"] = state.get("reboots", 0) + 1
            base = str(state.get("boot_id", "fake-boot-1")).rsplit("-", 1)[0]
            state["boot_id"] = f"{base}-{state['reboots'] + 1}"
            state["events"] = []
            for one in state["devices"]:
                _clear_volatile(one)

        self.update(change)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        with open(f"{self.path}.lock", "w", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _replace(self, state: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        with os.fdopen(fd, "w", encoding="utf-8") as handle:
            json.dump(state, handle, indent=1)
        Path(name).replace(self.path)


def _device(state: dict[str, Any], device: int | str) -> dict[str, Any]:
    if isinstance(device, int):
        return state["devices"][device]
    return next(one for one in state["devices"] if one["uuid"] == device)


def _clear_volatile(one: dict[str, Any]) -> None:
    one["lost"] = False
    for key in ("ecc_corrected_volatile", "ecc_uncorrected_volatile", "recovery_action", "remap_pending", "retired_pages_pending"):
        one.pop(key, None)


def _boottime() -> float:
    import time

    return time.clock_gettime(time.CLOCK_BOOTTIME)
