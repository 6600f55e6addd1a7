"""Keeps an eye on one node: probes the GPUs, reads the kernel log and the host, tells changes of the verdict.

The agent daemon owns one. Nothing here acts: the verdict names the action, the supervisor decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from regrow.agent.health import base, host, network
from regrow.agent.health import history as histories
from regrow.agent.health.base import KernelEvent, Observation, Outcome
from regrow.agent.health.classify import classify
from regrow.agent.health.findings import Finding
from regrow.agent.health.kmsg import KernelLine, KernelLog
from regrow.agent.health.policy import Policy, default
from regrow.agent.health.preflight_report import Preflight, findings_of
from regrow.agent.health.prober import Prober, probe_once
from regrow.agent.health.sample import NodeSample, XidEvent
from regrow.agent.health.xid import XidSeen
from regrow.agent.health.xid import parse as parse_xid
from regrow.clock import Clock, SystemClock
from regrow.wire import Device, HealthVerdict

log = logging.getLogger("regrow.health")

_TICK_SECONDS = 0.25
_LONG_TICK_SECONDS = 1.0
"""Where the kernel log says itself that it has news."""
_DRIVER = Path("/proc/driver/nvidia/version")
_ABSENT_PROBE_SECONDS = 600.0
"""Between two probes where there is no driver, each of them a process; a driver that is loaded is probed at the next look."""
_HOST_PERIOD_SECONDS = 10.0
_PROCESSES_PERIOD_SECONDS = 60.0
_SAVE_PERIOD_SECONDS = 60.0
_KEPT_LINES = 200
_SURE_SOURCES = ("kernel", "fabricmanager", "bmc")

Report = Callable[[HealthVerdict], Awaitable[None]]


class HealthMonitor:
    """Health of this node. All methods belong to one event loop.

    Args:
        state_dir: the agent's state folder; history is kept in health.json there.
        period_seconds: between two probes; None: the policy's.
        fake_state: state file of the fake NVML instead of the real driver.
        kmsg: kernel log to follow (/dev/kmsg or a file); None: none.
        observe_only: verdicts are logged, never reported.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        period_seconds: float | None = None,
        fake_state: Path | None = None,
        kmsg: Path | None = None,
        clock: Clock | None = None,
        policy: Policy | None = None,
        deadline_seconds: float | None = None,
        observe_only: bool = False,
    ) -> None:
        self._state_dir = state_dir
        self._policy = policy or default()
        self._period = period_seconds or self._policy.probe.period_seconds
        self._deadline = deadline_seconds or self._policy.probe.deadline_seconds
        self._fake_state = fake_state
        self._clock = clock or SystemClock()
        self._observe_only = observe_only
        self._kernel = KernelLog(kmsg) if kmsg is not None else None
        self._prober = Prober(fake_state=fake_state, on_events=self._take_events)
        self._path = state_dir / "health.json"
        self._history = histories.load(self._path)
        self._verdict = base.verdict_of(self._history)
        self._devices: tuple[Device, ...] | None = None
        self._events: list[XidEvent] = []
        self._xids: list[XidSeen] = []
        self._teardowns: list[tuple[float, float]] = []
        self._busy: bool | None = None
        self._wake = asyncio.Event()
        self._stir = asyncio.Event()
        self._probed_at = 0.0
        self._links = network.read_links()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._unread: list[KernelLine] = []
        self._host_at: float | None = None
        self._processes_at: float | None = None
        self._saved_at: float | None = None
        self._host_findings: tuple[Finding, ...] = ()
        self._standing: tuple[Finding, ...] = ()
        self.sample: NodeSample | None = None
        """The last sample, for metrics."""
        self.host: host.HostSample | None = None
        """The last look at the host, for metrics."""

    # --- what the agent asks and tells ------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """GPUs of this node. Before the first probe of `prepare` or `run` it makes one itself, which blocks until its deadline at most."""
        if self._devices is None:
            self._take_devices(probe_once(deadline_seconds=self._deadline, fake_state=self._fake_state))
        return self._devices or ()

    @property
    def verdict(self) -> HealthVerdict:
        """The verdict as of now."""
        return self._verdict

    @property
    def history(self) -> histories.History:
        """What is remembered: open conditions, XID counts per GPU, audit."""
        return self._history

    def note_teardown(self, seconds: float) -> None:
        """We kill workers now and for so many seconds: XIDs that a kill produces are not faults meanwhile."""
        now = self._clock.wall()
        self._teardowns = [*(one for one in self._teardowns if one[1] > now - 600), (now - 1.0, now + seconds)]

    def note_busy(self, busy: bool) -> None:
        """Whether a job of ours runs on this node: an idle GPU with a reset pending is not given to a job; a busy one goes on."""
        self._busy = busy
        self._rouse()

    def note_preflight(self, report: Preflight) -> None:
        """What the check before joining found holds until the next one, which the next start of the agent makes."""
        self._standing = findings_of(report)
        self._rouse()

    def note_reset(self, uuid: str, *, by: str = "reset") -> None:
        """A GPU was reset by somebody: conditions that a reset ends are over."""
        self._history = base.note_reset(self._history, uuid=uuid, at=self._clock.wall(), by=by)
        self._rouse()

    def clear(self, *, incident: str = "", by: str = "operator", why: str = "") -> int:
        """End one incident, or all that are open now; each end is an audit entry. Returns how many. What still holds is found again."""
        wanted = [one.incident for one in self._history.conditions if incident in ("", one.incident)]
        for one in wanted:
            self._history = base.clear(self._history, incident=one, by=by, why=why, at=self._clock.wall())
        self._rouse()
        return len(wanted)

    async def prepare(self) -> HealthVerdict:
        """The first look, within the deadline: afterwards `devices` and `verdict` are this node's."""
        await self._look()
        return self._verdict

    async def run(self, report: Report) -> None:
        """Watch until cancelled. `report` gets the first verdict and each that differs from the one before."""
        told: HealthVerdict | None = None
        try:
            due = self._clock.monotonic()
            while True:
                news = self._poll_kernel()
                self._poll_operator()
                if news or self._events or self._xids or self._wake.is_set() or self._clock.monotonic() >= due:
                    self._wake.clear()
                    await self._look(news)
                    due = self._clock.monotonic() + self._next_period()
                    if self._verdict != told:
                        told = self._verdict
                        await self._tell(told, report)
                await self._sleep()
        finally:
            await self._prober.close()
            if self._kernel is not None:
                self._kernel.close()

    # --- one look ------------------------------------------------------------------------------------------------------

    async def _look(self, kernel: Sequence[KernelEvent] = ()) -> Outcome:
        sample = await self._probe()
        self._take_devices(sample)
        now = self._clock.wall()
        self._look_at_host()
        events, self._events = self._events, []
        seen = [XidSeen(code=one.data, at=now, uuid=one.uuid) for one in events if one.kind == base.XID_EVENT]
        told, self._xids = self._xids, []
        outcome = base.evaluate(
            Observation(
                at=now,
                sample=sample,
                xids=(*seen, *told),
                events=tuple(one for one in events if one.kind != base.XID_EVENT),
                kernel=tuple(kernel),
                host=(*self._host_findings, *self._standing),
                teardowns=tuple(self._teardowns),
                idle=None if self._busy is None else not self._busy,
            ),
            self._history,
            self._policy,
        )
        self._keep(outcome)
        return outcome

    def _keep(self, outcome: Outcome) -> None:
        changed = bool(outcome.opened or outcome.cleared)
        self._history, self._verdict = outcome.history, outcome.verdict
        for one in outcome.opened:
            log.warning(
                "health condition opened: kind=%s uuid=%s action=%s incident=%s: %s",
                one.kind,
                one.uuid,
                one.action,
                one.incident,
                one.reason,
            )
        for one in outcome.cleared:
            log.info("health condition cleared: kind=%s uuid=%s incident=%s by=%s: %s", one.kind, one.uuid, one.incident, one.by, one.why)
        for line in outcome.explained:
            log.info("health: %s", line)
        now = self._clock.monotonic()
        if changed or outcome.explained or self._saved_at is None or now - self._saved_at >= _SAVE_PERIOD_SECONDS:
            self._saved_at = now
            try:
                histories.save(self._path, self._history)
            except OSError as error:
                log.warning("health history not saved: path=%s: %s", self._path, error.strerror)

    def _take_devices(self, sample: NodeSample) -> None:
        self.sample = sample
        if sample.status == "ok":
            here = {one.device.uuid: one.device for one in sample.devices}
            known = {uuid: one.device for uuid, one in self._history.devices.items()}
            self._devices = tuple({**known, **here}.values()) if len(known) > len(here) else tuple(here.values())
        elif self._devices is None:
            self._devices = tuple(one.device for one in self._history.devices.values()) if sample.status != "no_driver" else ()

    def _take_events(self, events: tuple[XidEvent, ...]) -> None:
        self._events.extend(events)
        self._rouse()

    def kernel_lines(self) -> tuple[str, ...]:
        """The last lines of the kernel log, up to now."""
        self._unread += self._read_kernel()
        return tuple(self._lines)

    def _read_kernel(self) -> list[KernelLine]:
        lines = self._kernel.poll() if self._kernel is not None else []
        self._lines.extend(line.text for line in lines)
        return lines

    def _poll_kernel(self) -> list[KernelEvent]:
        if self._kernel is None:
            return []
        now = self._clock.wall()
        found: list[KernelEvent] = []
        unread, self._unread = self._unread, []
        for line in (*unread, *self._read_kernel()):
            seen = parse_xid(line.text, now)
            if seen is not None:
                self._xids.append(seen)
            else:
                found.extend(self._kernel_event(line, now))
        return found

    def _poll_operator(self) -> None:
        request = histories.take_clear_request(self._state_dir)
        if request is not None:
            number = self.clear(incident=request.incident, by=request.by, why=request.why)
            log.info("health: operator cleared incidents=%d by=%s why=%s", number, request.by, request.why)

    def _kernel_event(self, line: KernelLine, now: float) -> list[KernelEvent]:
        kind = classify(line.text)
        if kind.role != "primary" or kind.source not in _SURE_SOURCES:
            return []
        uuid = next(
            (one.uuid for one in self._devices or () if one.pci_bus_id and one.pci_bus_id.partition(".")[0] in line.text.lower()), ""
        )
        return [KernelEvent(kind=kind.kind, text=line.text, at=now, uuid=uuid)]

    def _look_at_host(self) -> None:
        now = self._clock.monotonic()
        if self._host_at is not None and now - self._host_at < _HOST_PERIOD_SECONDS:
            return
        self._host_at = now
        processes = self._processes_at is None or now - self._processes_at >= _PROCESSES_PERIOD_SECONDS
        if processes:
            self._processes_at = now
        sample = host.read_host(self._state_dir, with_processes=processes)
        if sample.zombies is None and self.host is not None:
            sample = msgspec.structs.replace(sample, zombies=self.host.zombies)
        self.host = sample
        self._host_findings = (*host.findings(sample, self._policy.host), *network.findings(self._links, network.read_links()))

    def _next_period(self) -> float:
        return max(self._policy.probe.absent_period_seconds, self._period) if self._absent else self._period

    @property
    def _absent(self) -> bool:
        return self.sample is not None and self.sample.status == "no_driver"

    async def _probe(self) -> NodeSample:
        now = self._clock.monotonic()
        if self.sample is not None and self._absent and now < self._probed_at + _ABSENT_PROBE_SECONDS and not _driver_is_there():
            return self.sample
        self._probed_at = now
        return await self._prober.probe(self._deadline)

    def _rouse(self) -> None:
        self._wake.set()
        self._stir.set()

    async def _tell(self, verdict: HealthVerdict, report: Report) -> None:
        log.info("health verdict: state=%s action=%s incident=%s: %s", verdict.state, verdict.action, verdict.incident, verdict.reason)
        if not self._observe_only:
            await report(verdict)

    async def _sleep(self) -> None:
        loop, log_device = asyncio.get_running_loop(), self._kernel.device if self._kernel is not None else None
        self._stir.clear()
        if self._wake.is_set():
            return
        if log_device is not None:
            try:
                loop.add_reader(log_device, self._stir.set)
            except OSError:  # no device that can be waited for
                log_device = None
        tick = _LONG_TICK_SECONDS if self._kernel is None or log_device is not None else _TICK_SECONDS
        try:
            # not wait_for: before Python 3.12 it can swallow a cancellation that comes together with the event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick):
                    await self._stir.wait()
        finally:
            if log_device is not None:
                loop.remove_reader(log_device)


def _driver_is_there() -> bool:
    return _DRIVER.exists()
