"""The probe child: `python -m regrow.agent.health.probe --json` looks once; `--serve` answers until stdin ends.

It is disposable. Its parent kills it when it misses the deadline; it dies with its parent even when a driver call
holds it. With REGROW_FAKE_NVML=<state file> it reads the fake library (docs/fake-nvml.md) through the same pynvml.

Serving: each line on stdin asks for a sample; one JSON line `{"sample": ...}` answers. Between requests the events of
the driver are told as `{"events": [...]}` within a quarter of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.agent.health.sample import NodeSample, XidEvent

if TYPE_CHECKING:
    from regrow.agent.health.nvml import Events

FAKE_VARIABLE = "REGROW_FAKE_NVML"
CURSOR_VARIABLE = "REGROW_FAKE_NVML_CURSOR"
_EVENT_POLL_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


class Reply(msgspec.Struct, omit_defaults=True):
    """One line of the child."""

    ready: bool = False
    """First line of a serving child: Python is up; from here on only the driver can be slow."""
    sample: NodeSample | None = None
    events: tuple[XidEvent, ...] = ()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 whatever the GPUs are like, since the answer is on stdout."""
    words = sys.argv[1:] if arguments is None else arguments
    _die_with_parent()
    if FAKE_VARIABLE in os.environ:
        preload_fake(Path(os.environ[FAKE_VARIABLE]))
    if "--serve" in words:
        serve()
    else:
        sys.stdout.buffer.write(msgspec.json.encode(look_once()) + b"\n")
        sys.stdout.flush()
    return 0


def preload_fake(state: Path) -> None:
    """Load the fake library under NVML's name, so that pynvml's own dlopen finds it."""
    from regrow.agent.health.fake_nvml import build

    missing = _fake_state(state).get("missing_symbols", ())
    ctypes.CDLL(str(build.library(missing=missing)), mode=ctypes.RTLD_GLOBAL)


def look_once() -> NodeSample:
    """Open NVML, read all, close. With the fake library the event log is read from its start."""
    from regrow.agent.health import nvml

    os.environ.setdefault(CURSOR_VARIABLE, "0")
    closed = nvml.open_nvml()
    if closed is not None:
        return _with_boot_id(closed)
    events = nvml.Events()
    with contextlib.suppress(nvml.pynvml.NVMLError):
        events.open()
    seen = events.drain()
    return _with_boot_id(msgspec.structs.replace(nvml.read_node(), events=seen))


def serve() -> None:
    """Answer requests until stdin ends, or until NVML fails as a whole: the parent then starts a fresh child."""
    from regrow.agent.health import nvml

    _write(Reply(ready=True))
    events = nvml.Events()
    closed = nvml.open_nvml()
    if closed is None:
        with contextlib.suppress(nvml.pynvml.NVMLError):
            events.open()
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], _EVENT_POLL_SECONDS if closed is None else None)
        if not ready:
            _tell_events(events)
            continue
        got = os.read(0, 4096)
        if not got:
            return
        buffer += got
        while b"\n" in buffer:
            _, _, buffer = buffer.partition(b"\n")
            sample = closed if closed is not None else nvml.read_node()
            if sample.status == "ok":
                events.remember(sample)
            _write(Reply(sample=_with_boot_id(sample), events=events.drain()))
            if sample.status != "ok":
                return


def _tell_events(events: Events) -> None:
    waiting = events.drain()
    if waiting:
        _write(Reply(events=waiting))


def _write(reply: Reply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.flush()


def _with_boot_id(sample: NodeSample) -> NodeSample:
    state = os.environ.get(FAKE_VARIABLE)
    faked = _fake_state(Path(state)).get("boot_id") if state else None
    return msgspec.structs.replace(sample, boot_id=str(faked)) if faked else sample


def _fake_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
