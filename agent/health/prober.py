"""The parent's side of the probe child: asks with a deadline; no answer is an answer (status `hung`).

A child that a driver call holds in the kernel cannot be reaped. It is killed, left alone, and no further child is
started while two such remain: a hung driver must not cost a process a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow.agent.health.boot import boot_id
from regrow.agent.health.probe import CURSOR_VARIABLE, FAKE_VARIABLE, Reply
from regrow.agent.health.sample import NodeSample, XidEvent

log = logging.getLogger("regrow.health")

_MODULE = "regrow.agent.health.probe"
_MAX_STUCK = 2
_START_SECONDS = 60.0
"""For starting Python on an overloaded host: being late there is no sign of a hung driver."""
_REAP_SECONDS = 5.0
_LINE_BYTES = 4 * 1024 * 1024
DEFAULT_DEADLINE_SECONDS = 10.0
"""A healthy node with eight GPUs answers in well under a second; the first call of a cold driver may take several."""


def child_environment(fake_state: Path | None, *, from_start: bool = False) -> dict[str, str]:
    """Environment of a probe child: the fake's state file, and where its event log is read from."""
    environment = dict(os.environ)
    if fake_state is not None:
        environment[FAKE_VARIABLE] = str(fake_state)
    if from_start:
        environment[CURSOR_VARIABLE] = "0"
    return environment


def probe_once(*, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS, fake_state: Path | None = None) -> NodeSample:
    """Start a probe child, wait for its sample, at most `deadline_seconds`. Never raises for what the GPUs do."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(fake_state, from_start=True),
    )
    try:
        out, err = child.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - began
        _give_up(child)
        return hung(seconds)
    return _parse(out, child.returncode, err)


def _give_up(child: subprocess.Popen[bytes]) -> None:
    """Kill it and, unless the kernel holds it, reap it."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_REAP_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def hung(seconds: float) -> NodeSample:
    """The sample of a driver that did not answer."""
    return NodeSample(status="hung", boot_id=boot_id(), seconds=seconds, detail=f"NVML gave no answer within {seconds:.1f} s")


def _parse(out: bytes, code: int, err: bytes) -> NodeSample:
    try:
        return msgspec.json.decode(out, type=NodeSample)
    except msgspec.DecodeError:
        return NodeSample(status="crashed", error=code, boot_id=boot_id(), detail=err.decode(errors="replace")[-400:])


class Prober:
    """A serving probe child, started when needed and thrown away when it fails. One probe at a time."""

    def __init__(self, *, fake_state: Path | None = None, on_events: Callable[[tuple[XidEvent, ...]], None] | None = None) -> None:
        self._fake_state = fake_state
        self._on_events = on_events
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[NodeSample] | None = None
        self._up = asyncio.Event()
        self._stuck: list[asyncio.subprocess.Process] = []
        self.num_started = 0

    async def probe(self, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> NodeSample:
        """A sample, or one that says hung or crashed. Takes at most the deadline and a few seconds more once the child is up."""
        began = time.monotonic()
        self._stuck = [one for one in self._stuck if one.returncode is None]
        if len(self._stuck) >= _MAX_STUCK:
            return hung(0.0)
        child = await self._ready()
        self._answer = asyncio.get_running_loop().create_future()
        try:
            assert child.stdin is not None
            child.stdin.write(b"probe\n")
            async with asyncio.timeout(_START_SECONDS):
                await self._up.wait()
            async with asyncio.timeout(deadline_seconds):
                sample = await self._answer
        except TimeoutError:
            started = self._up.is_set()
            await self._throw_away()
            if started:
                return hung(time.monotonic() - began)
            return NodeSample(status="crashed", boot_id=boot_id(), detail="the probe child did not start in time")
        except (ConnectionError, OSError) as error:
            sample = NodeSample(status="crashed", boot_id=boot_id(), detail=str(error))
        finally:
            self._answer = None
        if sample.status != "ok":
            await self._throw_away()
        return sample

    async def close(self) -> None:
        """Stop the child."""
        await self._throw_away()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._throw_away()
        self._up.clear()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            "--serve",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(self._fake_state),
            limit=_LINE_BYTES,
        )
        self.num_started += 1
        self._reader = asyncio.create_task(self._read(self._child), name="regrow-probe-reader")
        return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            try:
                reply = msgspec.json.decode(line, type=Reply)
            except msgspec.DecodeError:
                log.warning("probe child wrote a line that is not a reply: %r", line[:120])
                continue
            if reply.ready:
                self._up.set()
            if reply.events and self._on_events is not None:
                self._on_events(reply.events)
            if reply.sample is not None:
                self._settle(reply.sample)
        code = await child.wait()
        self._settle(NodeSample(status="crashed", error=code, boot_id=boot_id(), detail=f"the probe child ended with {code}"))

    def _settle(self, sample: NodeSample) -> None:
        self._up.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(sample)

    async def _throw_away(self) -> None:
        child, reader, self._child, self._reader = self._child, self._reader, None, None
        if reader is not None:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        try:
            async with asyncio.timeout(_REAP_SECONDS):
                await child.wait()
        except TimeoutError:
            log.warning("probe child does not die: pid=%d, held by the driver", child.pid)
            self._stuck.append(child)
        transport = getattr(child, "_transport", None)
        if transport is not None:
            transport.close()
