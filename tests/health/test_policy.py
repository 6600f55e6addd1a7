"""The policy as tables: what was seen and remembered in, verdict out. No processes, no clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.agent.health import base, policy, xid
from regrow.agent.health.base import KernelEvent, Observation, Outcome, evaluate
from regrow.agent.health.findings import Finding
from regrow.agent.health.history import History
from regrow.agent.health.sample import DeviceSample, GpuProcess, LinkSample, NodeSample, XidEvent
from regrow.agent.health.xid import XidSeen
from regrow.errors import ConfigurationError
from regrow.wire import Device

POLICY = policy.default()
START = 1_000_000.0
A, B = "GPU-a", "GPU-b"


def gpu(uuid: str = A, **values: Any) -> DeviceSample:
    buses = {A: "0000:1b:00.0", B: "0000:3b:00.0"}
    healthy: dict[str, Any] = {
        "ecc_uncorrected_volatile": 0,
        "ecc_uncorrected_aggregate": 5,
        "ecc_corrected_volatile": 0,
        "recovery_action": 0,
        "temperature": 50,
        "temperature_slowdown": 90,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_replays": 0,
        "pcie_fatal_errors": 0,
        "throttle_hw_thermal_ns": 0,
        "fabric_state": 3,
        "fabric_status": 0,
        "fabric_health_summary": 1,
        "links": tuple(LinkSample(link=link, up=True) for link in range(4)),
    }
    return DeviceSample(device=Device(uuid=uuid, pci_bus_id=buses.get(uuid, "")), **{**healthy, **values})


def sample(*devices: DeviceSample, boot: str = "boot-1", **values: Any) -> NodeSample:
    return NodeSample(**{"status": "ok", "boot_id": boot, "count": len(devices), "devices": devices, **values})


class Node:
    """Feeds one observation after the other."""

    def __init__(self) -> None:
        self.history = History()
        self.at = START
        self.last: Outcome | None = None

    def see(self, *devices: DeviceSample, after: float = 5.0, node: NodeSample | None = None, boot: str = "boot-1", **seen: Any) -> Outcome:
        self.at += after
        if node is None and devices:
            node = sample(*devices, boot=boot)
        seen["xids"] = tuple(msgspec.structs.replace(one, at=self.at + one.at) for one in seen.get("xids", ()))
        self.last = evaluate(Observation(at=self.at, sample=node, **seen), self.history, POLICY)
        self.history = self.last.history
        return self.last


def xids(*codes: int, uuid: str = A, **values: Any) -> tuple[XidSeen, ...]:
    return tuple(XidSeen(code=code, at=0.001 * number, uuid=uuid, **values) for number, code in enumerate(codes))


def kinds(outcome: Outcome) -> set[tuple[str, str]]:
    return {(one.uuid, one.kind) for one in outcome.history.conditions}


@pytest.fixture
def node() -> Node:
    made = Node()
    assert made.see(gpu(A), gpu(B)).verdict.state == "healthy"
    return made


class TestSignals:
    @pytest.mark.parametrize(
        ("values", "kind", "state", "action"),
        [
            ({"recovery_action": 1}, "gpu_recovery_action", "unhealthy", "reset"),
            ({"recovery_action": 2}, "gpu_recovery_action", "unhealthy", "reboot"),
            ({"ecc_uncorrected_volatile": 1}, "gpu_mem_uncorrectable", "unhealthy", "reset"),
            ({"ecc_uncorrected_aggregate": 6}, "gpu_mem_uncorrectable", "unhealthy", "reset"),
            ({"sram_threshold_exceeded": True}, "gpu_sram", "unhealthy", "replace"),
            ({"remap_failure": True}, "gpu_mem_remap_failed", "unhealthy", "replace"),
            ({"remap_pending": True}, "gpu_mem_remap_pending", "unhealthy", "reset"),
            ({"retired_pages_pending": True}, "gpu_mem_remap_pending", "unhealthy", "reset"),
            ({"channel_repair_pending": True}, "gpu_repair_pending", "unhealthy", "reset"),
            ({"retired_pages": 60}, "gpu_mem_remap_failed", "unhealthy", "replace"),
            ({"pcie_width": 8}, "pcie_link_degraded", "degraded", "watch"),
            ({"pcie_generation": 1, "utilization_percent": 90}, "pcie_link_degraded", "degraded", "watch"),
            ({"pcie_fatal_errors": 1}, "pcie_uncorrected", "unhealthy", "reboot"),
            ({"links": (LinkSample(link=0, up=True), LinkSample(link=1, up=False))}, "nvlink_fault", "unhealthy", "reset"),
            ({"links": tuple(LinkSample(link=link, up=True, recovery=1) for link in range(4))}, "nvlink_degraded", "degraded", "watch"),
            ({"fabric_health_summary": 2}, "fabric", "unhealthy", "reset"),
            ({"fabric_status": 999}, "fabric", "unhealthy", "reset"),
            ({"throttle_hw_thermal_ns": 100_000_000}, "gpu_throttled", "degraded", "watch"),
            ({"throttle_hw_thermal_ns": 2_000_000_000}, "gpu_throttled", "unhealthy", "watch"),
            ({"lost": True}, "gpu_lost", "unhealthy", "reboot"),
        ],
    )
    def test_a_bad_signal(self, node: Node, values: dict[str, Any], kind: str, state: str, action: str) -> None:
        outcome = node.see(gpu(A, **values), gpu(B))
        assert kinds(outcome) == {(A, kind)}
        assert (outcome.verdict.state, outcome.verdict.action, outcome.verdict.device_uuids) == (state, action, (A,))

    @pytest.mark.parametrize(
        "values",
        [
            {"pcie_generation": 1, "utilization_percent": 0},
            {"clock_event_reasons": 0x1 | 0x4},
            {"temperature_margin": -3},
            {"links": ()},
            {"links": tuple(LinkSample(link=link, up=False) for link in range(4))},
            {"fabric_state": 0},
            {"ecc_corrected_volatile": 3},
            {"pcie_replays": 5},
            {"recovery_action": None, "ecc_uncorrected_volatile": None, "temperature": None},
        ],
    )
    def test_what_is_normal(self, values: dict[str, Any]) -> None:
        fresh = Node()
        fresh.see(gpu(A, **values))
        assert fresh.see(gpu(A, **values)).verdict.state == "healthy"

    @pytest.mark.parametrize(
        ("values", "lasts", "kind"),
        [
            ({"clock_event_reasons": 0x40}, POLICY.thermal.clock_reason_seconds, "gpu_clocks"),
            ({"temperature": 86}, POLICY.thermal.near_slowdown_seconds, "gpu_thermal"),
            ({"fabric_state": 2}, POLICY.link.fabric_seconds, "fabric"),
            ({"utilization_percent": 100, "power_watts": 100.0, "power_limit_watts": 700.0}, POLICY.power.stalled_seconds, "gpu_stalled"),
        ],
    )
    def test_what_must_last(self, node: Node, values: dict[str, Any], lasts: float, kind: str) -> None:
        assert node.see(gpu(A, **values), gpu(B)).verdict.state == "healthy"
        assert node.see(gpu(A, **values), gpu(B), after=lasts - 1).verdict.state == "healthy"
        assert kinds(node.see(gpu(A, **values), gpu(B), after=2)) == {(A, kind)}
        assert node.see(gpu(A), gpu(B)).verdict.state == "healthy"

    def test_an_interruption_starts_the_wait_again(self, node: Node) -> None:
        hot = gpu(A, clock_event_reasons=0x40)
        node.see(hot, gpu(B))
        node.see(gpu(A), gpu(B), after=50)
        node.see(hot, gpu(B), after=5)
        assert node.see(hot, gpu(B), after=50).verdict.state == "healthy"

    def test_overheated_for_long_is_unhealthy(self, node: Node) -> None:
        hot = gpu(A, temperature=92)
        assert node.see(hot, gpu(B)).verdict.state == "degraded"
        assert node.see(hot, gpu(B), after=POLICY.thermal.over_slowdown_seconds + 1).verdict.state == "unhealthy"

    def test_corrected_errors_count_by_rate(self, node: Node) -> None:
        assert node.see(gpu(A, ecc_corrected_volatile=150), gpu(B), after=7200).verdict.state == "healthy"
        assert kinds(node.see(gpu(A, ecc_corrected_volatile=300), gpu(B), after=60)) == {(A, "gpu_mem_corrected")}

    def test_leftover_processes_on_an_idle_gpu(self, node: Node) -> None:
        held = gpu(A, processes=(GpuProcess(pid=7),))
        node.see(held, gpu(B), idle=False, after=100)
        node.see(held, gpu(B), idle=True)
        assert kinds(node.see(held, gpu(B), idle=True, after=20)) == {(A, "gpu_leftover_process")}


class TestNode:
    def test_hung_is_its_own_verdict_and_ends_when_the_driver_answers(self, node: Node) -> None:
        outcome = node.see(node=NodeSample(status="hung", boot_id="boot-1", detail="no answer"))
        assert (outcome.verdict.state, outcome.verdict.action, outcome.verdict.reason) == (
            "unhealthy",
            "reboot",
            "driver_hung: NVML does not answer",
        )
        assert node.see(gpu(A), gpu(B)).verdict.state == "healthy"

    def test_init_failure(self, node: Node) -> None:
        assert kinds(node.see(node=NodeSample(status="init_failed", error=18, boot_id="boot-1"))) == {("", "driver_failed")}

    def test_no_driver_is_healthy_unless_there_was_one(self, node: Node) -> None:
        gone = NodeSample(status="no_driver", boot_id="boot-1")
        assert Node().see(node=gone).verdict.reason == "no GPUs"
        assert kinds(node.see(node=gone)) == {("", "driver_failed")}

    def test_a_crashing_probe_is_not_held_against_the_node_at_once(self, node: Node) -> None:
        crashed = NodeSample(status="crashed", boot_id="boot-1")
        assert [node.see(node=crashed).verdict.state for _ in range(3)] == ["healthy", "healthy", "degraded"]

    def test_fewer_gpus_than_known(self, node: Node) -> None:
        outcome = node.see(gpu(A))
        assert (kinds(outcome), outcome.verdict.device_uuids) == ({(B, "gpu_lost")}, (B,))

    def test_another_gpu_in_its_place_is_a_repair(self, node: Node) -> None:
        node.see(gpu(A))
        outcome = node.see(gpu(A), gpu("GPU-new"), boot="boot-2")
        assert outcome.verdict.state == "healthy"
        assert set(outcome.history.devices) == {A, "GPU-new"}

    def test_kernel_lines_count_as_the_policy_says(self, node: Node) -> None:
        line = KernelEvent(kind="host_soft_lockup", text="BUG: soft lockup", at=node.at)
        assert node.see(gpu(A), gpu(B), kernel=(line, line)).verdict.state == "healthy"
        assert kinds(node.see(gpu(A), gpu(B), kernel=(line,))) == {("", "host_soft_lockup")}
        machine_check = KernelEvent(kind="host_mce_uncorrected", text="MCE", at=node.at)
        assert node.see(gpu(A), gpu(B), kernel=(machine_check,)).verdict.action == "replace"

    def test_a_bus_error_of_somebody_elses_device_is_only_watched(self, node: Node) -> None:
        line = KernelEvent(kind="pcie_uncorrected", text="AER: Uncorrected (Fatal) error received: 0000:99:00.0", at=node.at)
        assert node.see(gpu(A), gpu(B), kernel=(line,)).verdict.action == "watch"
        ours = msgspec.structs.replace(line, uuid=A)
        assert node.see(gpu(A), gpu(B), kernel=(ours,)).verdict.action == "reboot"

    def test_host_findings_pass_through(self, node: Node) -> None:
        full = Finding(kind="disk_full", action="watch", state="degraded", reason="almost full")
        assert node.see(gpu(A), gpu(B), host=(full,)).verdict.state == "degraded"
        assert node.see(gpu(A), gpu(B)).verdict.state == "healthy"

    def test_nvml_events_without_an_xid(self, node: Node) -> None:
        assert node.see(gpu(A), gpu(B), events=(XidEvent(uuid=B, kind=0x800, data=0),)).verdict.action == "replace"


class TestJ01StickyFaults:
    def test_counts_cause_and_clearing(self, node: Node) -> None:
        """Case J01."""
        first = node.see(gpu(A), gpu(B), xids=xids(31, 31, 62, 45))
        counts = {code: one.count for code, one in first.history.devices[A].xids.items()}
        assert counts == {31: 2, 62: 1, 45: 1}
        assert first.history.devices[A].xids[31].first_at < first.history.devices[A].xids[31].last_at
        assert (first.verdict.action, first.verdict.reason.split(":")[0]) == ("reset", "gpu_firmware")
        assert xid.cause(xids(31, 31, 62, 45)).code == 62
        assert any("Xid 45" in line and "follows" in line for line in first.explained)
        quiet = node.see(gpu(A), gpu(B), after=POLICY.xid.quiet_seconds)
        assert kinds(quiet) == {(A, "gpu_firmware")}, "the program's own fault is over, the firmware's is not"
        node.history = base.note_reset(node.history, uuid=A, at=node.at)
        assert node.see(gpu(A), gpu(B)).verdict.state == "healthy"
        assert {code: one.count for code, one in node.history.devices[A].xids.items()} == counts

    def test_two_equal_errors_are_two(self, node: Node) -> None:
        """Case J01."""
        node.see(gpu(A), gpu(B), xids=xids(31))
        assert node.see(gpu(A), gpu(B), xids=xids(31)).history.devices[A].xids[31].count == 2

    def test_the_same_xid_of_nvml_and_of_the_kernel_log_is_one(self, node: Node) -> None:
        kernel = xid.parse("NVRM: Xid (PCI:0000:1b:00): 48, pid=7, name=python3, DBE", 0.4)
        assert kernel is not None
        outcome = node.see(gpu(A), gpu(B), xids=(*xids(48), kernel))
        assert outcome.history.devices[A].xids[48].count == 1
        assert any("DBE" in line for line in outcome.verdict.evidence), "the kernel's text is kept"


class TestJ03ResetPending:
    def test_not_admitted_while_a_reset_is_pending(self) -> None:
        """Case J03."""
        for value in ({"recovery_action": 1}, {"remap_pending": True}, {"retired_pages_pending": True}):
            verdict = Node().see(gpu(A, **value), gpu(B)).verdict
            assert (verdict.state, verdict.action, verdict.device_uuids) == ("unhealthy", "reset", (A,))

    def test_a_running_job_may_finish_with_a_remap_pending(self, node: Node) -> None:
        pending = gpu(A, remap_pending=True)
        assert node.see(pending, gpu(B), idle=False).verdict.state == "degraded"
        idle = node.see(pending, gpu(B), idle=True)
        assert (idle.verdict.state, idle.verdict.action) == ("unhealthy", "reset")


class TestJ05WayBack:
    @pytest.mark.parametrize("code", [48, 79, 74, 119])
    def test_a_new_boot_id_clears(self, node: Node, code: int) -> None:
        """Case J05."""
        assert node.see(gpu(A), gpu(B), xids=xids(code)).verdict.state == "unhealthy"
        assert node.see(gpu(A), gpu(B), after=1e5).verdict.state == "unhealthy", "time alone does not"
        outcome = node.see(gpu(A), gpu(B), boot="boot-2")
        assert outcome.verdict.state == "healthy"
        assert [(one.by, one.uuid) for one in outcome.cleared] == [("reboot", A)]

    def test_an_operator_clears_and_it_is_recorded(self, node: Node) -> None:
        """Case J05."""
        incident = node.see(gpu(A), gpu(B), xids=xids(64)).verdict.incident
        assert node.see(gpu(A), gpu(B), boot="boot-2").verdict.action == "replace", "a reboot does not mend a worn GPU"
        node.history = base.clear(node.history, incident=incident, by="alice", why="memory test passed", at=node.at)
        outcome = node.see(gpu(A), gpu(B), boot="boot-2")
        assert outcome.verdict.state == "healthy"
        entry = outcome.history.audit[-1]
        assert (entry.incident, entry.by, entry.why) == (incident, "alice", "memory test passed")

    def test_the_driver_no_longer_asking_is_evidence_of_the_reset(self, node: Node) -> None:
        node.see(gpu(A, recovery_action=1), gpu(B), xids=xids(119))
        outcome = node.see(gpu(A), gpu(B))
        assert outcome.verdict.state == "healthy"
        assert {one.by for one in outcome.cleared} == {"level", "reset"}

    def test_what_still_holds_is_found_again(self, node: Node) -> None:
        node.see(gpu(A, remap_failure=True), gpu(B))
        outcome = node.see(gpu(A, remap_failure=True), gpu(B), boot="boot-2")
        assert outcome.verdict.action == "replace"
        assert len({one.incident for one in outcome.cleared} | {outcome.verdict.incident}) == 2


class TestJ07WhichGpu:
    def test_a_lost_gpu_is_one_incident_for_all_checks(self, node: Node) -> None:
        lost = gpu(A, lost=True, remap_failure=True, recovery_action=2, errors={"nvmlDeviceGetRemappedRows": 15})
        outcome = node.see(lost, gpu(B), xids=xids(79))
        assert kinds(outcome) == {(A, "gpu_lost")}
        assert node.see(gpu(B), node=sample(gpu(B), unreachable=(0,), count=2)).verdict.incident == outcome.verdict.incident

    def test_the_kernels_address_names_the_uuid(self, node: Node) -> None:
        kernel = xid.parse("NVRM: Xid (PCI:0000:3b:00): 48, pid=7, DBE", 0.0)
        assert node.see(gpu(A), gpu(B), xids=(kernel,)).verdict.device_uuids == (B,)

    def test_an_address_of_no_gpu_here_blames_nobody(self, node: Node) -> None:
        kernel = xid.parse("NVRM: Xid (PCI:0000:99:00): 79, GPU has fallen off the bus.", 0.0)
        verdict = node.see(gpu(A), gpu(B), xids=(kernel,)).verdict
        assert (verdict.state, verdict.action, verdict.device_uuids) == ("degraded", "watch", ())

    def test_indices_that_moved_do_not_move_the_history(self, node: Node) -> None:
        node.see(gpu(A), gpu(B), xids=xids(13, uuid=B))
        outcome = node.see(gpu(B), gpu(A))
        assert 13 in outcome.history.devices[B].xids
        assert outcome.history.devices[A].xids == {}


class TestJ09StaleCancel:
    def test_ending_fault_a_never_ends_fault_b(self, node: Node) -> None:
        """Case J09."""
        for _ in range(100):
            first = node.see(gpu(A), gpu(B), after=0.02, xids=xids(119)).verdict.incident
            cleared = base.clear(node.history, incident=first, by="repair", why="", at=node.at)
            node.history = cleared
            second = node.see(gpu(A), gpu(B), after=0.02, xids=xids(119)).verdict
            assert second.state == "unhealthy"
            assert second.incident != first
            node.history = base.clear(node.history, incident=first, by="repair, late", why="", at=node.at)
            assert base.verdict_of(node.history).state == "unhealthy", "the late end of A is nothing to B"
            node.history = base.clear(node.history, incident=second.incident, by="repair", why="", at=node.at)

    def test_a_fault_in_the_turn_that_sees_the_reset_stays(self, node: Node) -> None:
        node.see(gpu(A, recovery_action=1), gpu(B), xids=xids(48))
        outcome = node.see(gpu(A), gpu(B), xids=xids(48))
        assert outcome.verdict.state == "unhealthy"


class TestOwnTeardown:
    @pytest.mark.parametrize("code", [13, 31, 43, 45])
    def test_what_a_kill_produces_is_not_a_fault(self, node: Node, code: int) -> None:
        window = ((node.at, node.at + 10),)
        outcome = node.see(gpu(A), gpu(B), xids=xids(code), teardowns=window)
        assert outcome.verdict.state == "healthy"
        count = outcome.history.devices[A].xids[code]
        assert (count.count, count.teardown, count.times) == (1, 1, ())

    @pytest.mark.parametrize("code", [48, 62, 74, 79, 95, 119])
    def test_a_kill_does_not_excuse_hardware(self, node: Node, code: int) -> None:
        assert node.see(gpu(A), gpu(B), xids=xids(code), teardowns=((node.at, node.at + 10),)).verdict.state == "unhealthy"

    def test_the_window_ends(self, node: Node) -> None:
        window = ((node.at, node.at + 1),)
        late = node.see(gpu(A), gpu(B), xids=xids(31), teardowns=window, after=1 + POLICY.xid.teardown_grace_seconds + 1)
        assert late.verdict.action == "restart_app"


class TestEscalation:
    def test_repeats_on_one_gpu(self, node: Node) -> None:
        assert [node.see(gpu(A), gpu(B), xids=xids(13), after=3600).verdict.action for _ in range(3)] == [
            "restart_app",
            "restart_app",
            "reset",
        ]

    def test_lost_twice_in_thirty_days_is_a_replacement(self, node: Node) -> None:
        node.see(gpu(A), gpu(B), xids=xids(79))
        node.see(gpu(A), gpu(B), boot="boot-2")
        assert node.see(gpu(A), gpu(B), boot="boot-2", xids=xids(79), after=86400 * 29).verdict.action == "replace"

    def test_lost_again_much_later_is_not(self, node: Node) -> None:
        node.see(gpu(A), gpu(B), xids=xids(79))
        node.see(gpu(A), gpu(B), boot="boot-2")
        assert node.see(gpu(A), gpu(B), boot="boot-2", xids=xids(79), after=86400 * 31).verdict.action == "reboot"

    def test_reset_then_reboot_then_replace(self, node: Node) -> None:
        asked: list[str] = []
        for number in range(3):
            asked.append(node.see(gpu(A), gpu(B), xids=xids(62), boot=f"boot-{number}", after=3600).verdict.action)
            node.history = base.note_reset(node.history, uuid=A, at=node.at)
            node.see(gpu(A), gpu(B), boot=f"boot-{number + 1}")
        assert asked == ["reset", "reboot", "replace"]

    def test_a_link_that_flaps_by_itself_is_never_a_replacement(self, node: Node) -> None:
        down = gpu(A, links=(LinkSample(link=0, up=False), LinkSample(link=1, up=True)))
        for _ in range(20):
            assert node.see(down, gpu(B)).verdict.action == "reset"
            assert node.see(gpu(A), gpu(B)).verdict.state == "healthy"


def test_recovery_action_in_the_text_of_154(node: Node) -> None:
    line = "NVRM: Xid (PCI:0000:1b:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x{} ({})"
    for number, words, action in ((1, "GPU Reset Required", "reset"), (2, "Node Reboot Required", "reboot"), (0, "None", "none")):
        seen = xid.parse(line.format(number, words), 0.0)
        assert seen is not None
        assert xid.action_of(seen) == action


def test_nvlink5_severity() -> None:
    fatal = xid.parse("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 04 (0x1)", 0.0)
    mild = xid.parse("NVRM: Xid (PCI:0009:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 04 (0x1)", 0.0)
    assert fatal is not None
    assert mild is not None
    assert (xid.action_of(fatal), xid.action_of(mild)) == ("reset", "watch")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([8, 13, 31, 43, 45, 48, 62, 63, 64, 74, 79, 94, 95, 119, 154, 9999]),
            st.sampled_from([A, B, "GPU-x", ""]),
            st.booleans(),
            st.sampled_from(["boot-1", "boot-2"]),
        ),
        max_size=12,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_sequence_gives_a_consistent_verdict(steps: list[tuple[int, str, bool, str]]) -> None:
    node = Node()
    node.see(gpu(A), gpu(B))
    for code, uuid, lost, boot in steps:
        outcome = node.see(gpu(A, lost=lost), gpu(B), xids=xids(code, uuid=uuid), boot=boot)
        verdict = outcome.verdict
        assert verdict.action in xid.ACTIONS
        assert (verdict.state == "healthy") == (not outcome.history.conditions)
        assert set(verdict.device_uuids) <= {A, B, "GPU-x"}
        incidents = [one.incident for one in (*outcome.history.conditions, *outcome.history.audit)]
        assert len(incidents) == len(set(incidents)), "an incident id names one condition for ever"
        assert msgspec.json.decode(msgspec.json.encode(outcome.history), type=History) == outcome.history


def test_a_policy_file_is_checked(tmp_path: Path) -> None:
    text = policy.DEFAULT.read_text(encoding="utf-8")
    path = tmp_path / "policy.toml"
    path.write_text(text.replace("hung_probes = 1 ", "hung_probes = 3 "), encoding="utf-8")
    assert policy.load(path).probe.hung_probes == 3
    for wrong in (
        text + "\n[nonsense]\n",
        text.replace("hung_probes", "hung_proves"),
        text.replace("period_seconds = 5.0", 'period_seconds = "x"'),
        "[",
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ConfigurationError):
            policy.load(path)
    with pytest.raises(ConfigurationError):
        policy.load(tmp_path / "absent.toml")


def test_every_class_in_the_policy_is_a_class_of_log_lines() -> None:
    from regrow.agent.health.classify import classes

    assert set(POLICY.kernel) <= classes()
