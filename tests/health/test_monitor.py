"""The probe child and the monitor with the real pynvml, the compiled fake and a kernel log file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from regrow.agent.health import history, kmsg, policy
from regrow.agent.health.fake_nvml.control import FakeNvml, uuid_of
from regrow.agent.health.monitor import HealthMonitor
from regrow.agent.health.prober import Prober, probe_once
from regrow.agent.health.sample import NodeSample, XidEvent
from regrow.clock import ManualClock
from regrow.wire import HealthVerdict

WAIT = 60.0
XID_79 = "[3391007.127743] NVRM: Xid (PCI:0000:2b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


class Reports:
    """What a monitor reported."""

    def __init__(self) -> None:
        self.all: list[HealthVerdict] = []
        self._news = asyncio.Condition()

    async def __call__(self, verdict: HealthVerdict) -> None:
        async with self._news:
            self.all.append(verdict)
            self._news.notify_all()

    async def until(self, wanted: Callable[[HealthVerdict], bool]) -> HealthVerdict:
        async with asyncio.timeout(WAIT), self._news:
            await self._news.wait_for(lambda: bool(self.all) and wanted(self.all[-1]))
            return self.all[-1]


@asynccontextmanager
async def watching(monitor: HealthMonitor) -> AsyncIterator[Reports]:
    """Run a monitor until the block ends."""
    reports = Reports()
    task = asyncio.create_task(monitor.run(reports))
    try:
        await reports.until(lambda _: True)
        yield reports
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def monitor_of(fake: FakeNvml, folder: Path, **options: Any) -> HealthMonitor:
    folder.mkdir(exist_ok=True)
    return HealthMonitor(folder, fake_state=fake.path, **{"period_seconds": 0.2, "deadline_seconds": 20.0, **options})


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class TestProber:
    async def test_a_hung_driver_is_a_verdict_within_the_deadline(self, fake: FakeNvml) -> None:
        prober = Prober(fake_state=fake.path)
        assert (await prober.probe()).status == "ok"
        fake.hang("nvmlDeviceGetTotalEccErrors")
        began = time.monotonic()
        sample = await prober.probe(0.5)
        assert sample.status == "hung"
        assert 0.5 <= time.monotonic() - began < 5
        assert children() == [], "the child that hung is gone"
        fake.resume()
        assert (await prober.probe(20)).status == "ok"
        assert prober.num_started == 2
        await prober.close()

    async def test_a_driver_that_hangs_in_init(self, fake: FakeNvml) -> None:
        fake.hang("nvmlInitWithFlags")
        prober = Prober(fake_state=fake.path)
        assert (await prober.probe(0.5)).status == "hung"
        await prober.close()
        assert probe_once(fake_state=fake.path, deadline_seconds=2.0).status == "hung"

    async def test_slow_is_not_hung(self, fake: FakeNvml) -> None:
        fake.set(delay_seconds={"nvmlDeviceGetCount_v2": 0.5})
        prober = Prober(fake_state=fake.path)
        sample = await prober.probe(30)
        assert sample.status == "ok"
        assert sample.seconds >= 0.5
        await prober.close()

    async def test_one_gpu_that_hangs_hangs_the_probe(self, fake: FakeNvml) -> None:
        fake.set_device(2, hang=["nvmlDeviceGetUUID"])
        prober = Prober(fake_state=fake.path)
        assert (await prober.probe(0.5)).status == "hung"
        await prober.close()

    async def test_a_child_that_dies_is_told_and_replaced(self, fake: FakeNvml) -> None:
        prober = Prober(fake_state=fake.path)
        await prober.probe()
        os.kill(children()[0].pid, signal.SIGKILL)
        states = {(await prober.probe()).status, (await prober.probe()).status}
        assert "ok" in states
        assert prober.num_started == 2
        await prober.close()

    async def test_events_come_between_probes(self, fake: FakeNvml) -> None:
        got: asyncio.Queue[tuple[XidEvent, ...]] = asyncio.Queue()
        prober = Prober(fake_state=fake.path, on_events=got.put_nowait)
        await prober.probe()
        fake.lose(1)
        events = await asyncio.wait_for(got.get(), WAIT)
        assert [(one.uuid, one.data) for one in events] == [(uuid_of(1), 79)], "a lost GPU keeps the name it had"
        await prober.close()

    async def test_no_driver(self) -> None:
        prober = Prober()
        assert (await prober.probe()).status == "no_driver"
        await prober.close()
        assert children() == []


class TestMonitor:
    async def test_gpus_are_known_at_once_without_a_running_loop(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a")
        assert [one.uuid for one in monitor.devices()] == [uuid_of(i) for i in range(4)]
        assert monitor.devices()[1].pci_bus_id == "0000:2b:00.0"

    async def test_no_gpus_is_healthy(self, tmp_path: Path) -> None:
        monitor = HealthMonitor(tmp_path)
        async with watching(monitor) as reports:
            assert (reports.all[0].state, reports.all[0].reason) == ("healthy", "no GPUs")
            assert monitor.devices() == ()

    async def test_a_driver_that_is_absent_is_asked_for_seldom_and_one_that_came_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = tmp_path / "version"
        monkeypatch.setattr("regrow.agent.health.monitor._DRIVER", driver)
        clock = ManualClock()
        monitor = HealthMonitor(tmp_path, clock=clock)
        probes = 0

        async def probe(_seconds: float) -> NodeSample:
            nonlocal probes
            probes += 1
            return NodeSample(status="no_driver")

        monkeypatch.setattr(monitor._prober, "probe", probe)
        for after, comes, expected in ((0.0, False, 1), (60.0, False, 1), (539.0, False, 1), (2.0, False, 2), (1.0, True, 3)):
            clock.advance(after)
            if comes:
                driver.touch()
            await monitor.prepare()
            assert probes == expected, (after, comes)
            assert monitor.host is not None

    async def test_the_kernel_log_says_itself_that_it_has_news(
        self, fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("regrow.agent.health.monitor._LONG_TICK_SECONDS", 3600.0)
        side, other = os.openpty()
        monitor = monitor_of(fake, tmp_path / "a", period_seconds=3600.0, kmsg=Path(os.ttyname(other)))
        async with watching(monitor) as reports:
            os.write(side, b"4,1,1,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n")
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert "79" in verdict.reason
        os.close(side)
        os.close(other)

    async def test_an_xid_is_reported_and_the_same_verdict_only_once(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            assert reports.all[0].state == "healthy"
            fake.lose(2)
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert (verdict.action, verdict.device_uuids) == ("reboot", (uuid_of(2),))
            fake.set_xid(0, 31)
            await reports.until(lambda one: len(one.evidence) > len(verdict.evidence))
            assert [one.incident for one in reports.all[1:]] == [verdict.incident] * (len(reports.all) - 1)
            assert len(monitor.devices()) == 4, "a lost GPU is still one of this node's"
        assert children() == []

    async def test_hang_and_return(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a", deadline_seconds=2.0)
        async with watching(monitor) as reports:
            fake.hang()
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert verdict.reason == "driver_hung: NVML does not answer"
            fake.resume()
            await reports.until(lambda one: one.state == "healthy")
        assert [one.kind for one in monitor.history.audit] == ["driver_hung"]

    async def test_count_drop_and_init_failure(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            fake.set(count=3)
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert verdict.device_uuids == (uuid_of(3),)
            fake.set(errors={"nvmlDeviceGetCount_v2": 999})
            await reports.until(lambda one: any("driver_failed" in line for line in one.evidence))

    async def test_history_outlives_the_agent_and_a_reboot_clears(self, fake: FakeNvml, tmp_path: Path) -> None:
        async with watching(monitor_of(fake, tmp_path / "a")) as reports:
            fake.set_xid(1, 119)
            incident = (await reports.until(lambda one: one.state == "unhealthy")).incident
        async with watching(monitor_of(fake, tmp_path / "a")) as reports:
            assert (reports.all[0].state, reports.all[0].incident) == ("unhealthy", incident)
        fake.reboot()
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            assert reports.all[0].state == "healthy"
        saved = history.load(tmp_path / "a" / "health.json")
        assert [(one.incident, one.by) for one in saved.audit] == [(incident, "reboot")]
        assert saved.devices[uuid_of(1)].xids[119].count == 1

    async def test_the_kernel_log_alone_is_enough_and_both_are_one(self, fake: FakeNvml, tmp_path: Path) -> None:
        log = tmp_path / "kmsg"
        log.write_text(XID_79.replace("2b", "1b"), encoding="utf-8")
        monitor = monitor_of(fake, tmp_path / "a", kmsg=log)
        async with watching(monitor) as reports:
            assert reports.all[0].state == "healthy", "what was logged before is not news"
            with log.open("a", encoding="utf-8") as handle:
                handle.write(XID_79)
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert verdict.device_uuids == (uuid_of(1),)
            assert any("fallen off the bus" in line for line in verdict.evidence)
            fake.set_xid(1, 79)
            fake.set_xid(3, 48)
            await reports.until(lambda one: uuid_of(3) in one.device_uuids)
        assert monitor.history.devices[uuid_of(1)].xids[79].count == 1

    async def test_our_own_kill_is_not_a_fault(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            monitor.note_teardown(30.0)
            fake.set_xid(0, 43, 45, 31)
            fake.set_xid(1, 48)
            verdict = await reports.until(lambda one: one.state == "unhealthy")
            assert verdict.device_uuids == (uuid_of(1),)
            counts = monitor.history.devices[uuid_of(0)].xids
            assert {code: (one.count, one.teardown) for code, one in counts.items()} == {43: (1, 1), 45: (1, 1), 31: (1, 1)}

    async def test_an_operator_clears_one_incident(self, fake: FakeNvml, tmp_path: Path) -> None:
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            fake.set_xid(0, 64)
            first = await reports.until(lambda one: one.state == "unhealthy")
            assert monitor.clear(incident="no-such") == 0
            assert monitor.clear(incident=first.incident, by="alice", why="swapped") == 1
            await reports.until(lambda one: one.state == "healthy")
            fake.set_xid(0, 64)
            assert (await reports.until(lambda one: one.state == "unhealthy")).incident != first.incident
        assert [(one.incident, one.by) for one in monitor.history.audit] == [(first.incident, "alice")]

    async def test_an_operator_clears_from_the_command_line(self, fake: FakeNvml, tmp_path: Path) -> None:
        state = tmp_path / "a"
        monitor = monitor_of(fake, state)
        command = (str(Path(sys.executable).with_name("regrow")), "health", "--agent-state", str(state), "--clear")
        async with watching(monitor) as reports:
            fake.set_xid(0, 64)
            incident = (await reports.until(lambda one: one.state == "unhealthy")).incident
            for arguments, code in ((("no-such", "--why", "x"), 2), ((incident,), 2), ((incident, "--why", "swapped"), 0)):
                child = await asyncio.create_subprocess_exec(
                    *command, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
                )
                assert await child.wait() == code
            await reports.until(lambda one: one.state == "healthy")
        entry = monitor.history.audit[-1]
        assert (entry.incident, entry.why) == (incident, "swapped")
        assert entry.by
        assert not (state / history.CLEAR_REQUEST).exists()

    async def test_a_reset_that_heals(self, fake: FakeNvml, tmp_path: Path) -> None:
        fake.set_fault(1, heals_after_resets=1, recovery_action=1)
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            assert (reports.all[0].state, reports.all[0].action) == ("unhealthy", "reset")
            fake.reset(1)
            await reports.until(lambda one: one.state == "healthy")

    async def test_busy_and_idle(self, fake: FakeNvml, tmp_path: Path) -> None:
        fake.set_device(0, remap_pending=True)
        monitor = monitor_of(fake, tmp_path / "a")
        async with watching(monitor) as reports:
            assert reports.all[0].state == "unhealthy"
            monitor.note_busy(True)
            await reports.until(lambda one: one.state == "degraded")
            monitor.note_busy(False)
            await reports.until(lambda one: one.state == "unhealthy")

    async def test_observe_only_reports_nothing(self, fake: FakeNvml, tmp_path: Path) -> None:
        fake.set_device(0, remap_failure=True)
        monitor = monitor_of(fake, tmp_path / "a", observe_only=True)
        reports = Reports()
        assert (await monitor.prepare()).state == "unhealthy"
        task = asyncio.create_task(monitor.run(reports))
        fake.set_xid(1, 79)
        async with asyncio.timeout(WAIT):
            while uuid_of(1) not in monitor.verdict.device_uuids:  # noqa: ASYNC110 - nothing is told, so there is nothing to wait on
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert reports.all == []

    async def test_host_metrics_are_there(self, tmp_path: Path) -> None:
        monitor = HealthMonitor(tmp_path)
        async with watching(monitor):
            assert monitor.host is not None
            assert 0 < monitor.host.memory_available_bytes <= monitor.host.memory_total_bytes
            assert monitor.host.disk_free_bytes > 0
            assert monitor.host.zombies is not None


class TestHost:
    def test_findings(self) -> None:
        from regrow.agent.health import host

        sample = host.HostSample(memory_total_bytes=100, memory_available_bytes=50, cpu_ratio=0.1, disk_total_bytes=100, disk_free_bytes=50)
        rules = policy.default().host
        assert list(host.findings(sample, rules)) == []
        for change, kind in (
            ({"memory_available_bytes": 1}, "host_memory"),
            ({"disk_free_bytes": 0}, "disk_full"),
            ({"state_writable": False}, "fs_error"),
            ({"file_handles": 95, "file_handles_max": 100}, "host_fd_limit"),
            ({"zombies": 1000}, "host_zombies"),
            ({"clock_offset_seconds": -3.0}, "host_clock"),
        ):
            assert [one.kind for one in host.findings(msgspec.structs.replace(sample, **change), rules)] == [kind]

    def test_links(self, tmp_path: Path) -> None:
        from regrow.agent.health import network

        for name, state, physical in (("eth0", "up", True), ("eth1", "down", True), ("veth9", "down", False)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "operstate").write_text(f"{state}\n", encoding="ascii")
            if physical:
                (tmp_path / name / "device").mkdir()
        port = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n", encoding="ascii")
        before = network.read_links(tmp_path, tmp_path / "ib")
        assert before == {"eth0": True, "eth1": False, "mlx5_0:1": True}
        assert list(network.findings(before, before)) == []
        (port / "state").write_text("1: DOWN\n", encoding="ascii")
        down = list(network.findings(before, network.read_links(tmp_path, tmp_path / "ib")))
        assert [one.reason for one in down] == ["link down: mlx5_0:1"]


class TestKernelLog:
    def test_forms_of_a_line(self) -> None:
        text = "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
        assert kmsg.parse(f"4,1234,5678901234,-;{text}\n SUBSYSTEM=pci\n") == kmsg.KernelLine(
            text=text, stamp=5678.901234, level=4, sequence=1234
        )
        assert kmsg.parse(f"<3>[ 12.500000] {text}\n") == kmsg.KernelLine(text=text, stamp=12.5, level=3)
        assert kmsg.parse(f"Nov 28 04:40:51 n kernel: {text}").text.endswith(text)
        assert kmsg.parse("") == kmsg.KernelLine(text="")

    def test_appended_rotated_and_late_files(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        log = kmsg.KernelLog(path)
        assert log.poll() == []
        assert "No such file" in log.problem
        path.write_text("one\ntw", encoding="utf-8")
        assert [line.text for line in log.poll()] == ["one"]
        with path.open("a", encoding="utf-8") as handle:
            handle.write("o\nthree\n")
        assert [line.text for line in log.poll()] == ["two", "three"]
        path.rename(tmp_path / "log.1")
        path.write_text("four\n", encoding="utf-8")
        assert [line.text for line in log.poll()] == ["four"]
        path.write_text("5\n", encoding="utf-8")
        assert [line.text for line in log.poll()] == ["5"]
        log.close()

    def test_an_old_file_is_read_from_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("old\n", encoding="utf-8")
        log = kmsg.KernelLog(path)
        assert log.poll() == []
        with path.open("a", encoding="utf-8") as handle:
            handle.write("new\n")
        assert [line.text for line in log.poll()] == ["new"]
        log.close()
