"""From one sample and what is remembered to findings: what is wrong with which GPU, and what that asks for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from regrow.agent.health.history import DeviceHistory
from regrow.agent.health.policy import Policy
from regrow.agent.health.sample import DeviceSample
from regrow.agent.health.xid import RECOVERY_ACTIONS

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x08, 0x20, 0x40, 0x80
FABRIC_COMPLETED = 3
SECOND_NS = 1_000_000_000

COUNTERS = (
    "ecc_corrected_volatile",
    "ecc_uncorrected_volatile",
    "ecc_uncorrected_aggregate",
    "sram_uncorrected",
    "remapped_correctable",
    "remapped_uncorrectable",
    "pcie_replays",
    "pcie_fatal_errors",
    "throttle_hw_thermal_ns",
    "throttle_power_brake_ns",
    "link_recovery",
    "link_recovery_failed",
)
"""Counters whose growth is evidence, by their name in the sample (links summed)."""

LASTING = frozenset({"ecc_uncorrected_aggregate", "sram_uncorrected", "remapped_correctable", "remapped_uncorrectable"})
"""Counters that a reboot does not start over: they live in the GPU's InfoROM."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong that a probe shows now. `kind` uses the words of `regrow health --classify` where they fit."""

    kind: str
    action: str
    reason: str
    uuid: str = ""
    state: Literal["degraded", "unhealthy"] = "unhealthy"
    clears: Literal["level", "quiet", "reset", "reboot"] = "level"
    after_seconds: float = 0.0
    """It must have been so for this long before it counts."""
    evidence: tuple[str, ...] = ()


class Context(msgspec.Struct, frozen=True):
    """What the checks of one GPU look at."""

    sample: DeviceSample
    before: DeviceHistory | None
    seconds: float
    """Since `before` was taken; 0 without one."""
    policy: Policy
    idle: bool | None
    """True: no job of ours should be on this GPU; None: not known."""

    def grown(self, counter: str) -> int:
        """Growth since the last sample; a counter that fell was reset, so its whole value is new."""
        now = counters_of(self.sample).get(counter)
        if now is None or self.before is None or counter not in self.before.counters:
            return 0
        then = self.before.counters[counter]
        return now - then if now >= then else now


def counters_of(sample: DeviceSample) -> dict[str, int]:
    """The counters to remember."""
    found: dict[str, int] = {}
    for name in COUNTERS:
        value = getattr(sample, name, None)
        if isinstance(value, int):
            found[name] = value
    if sample.links:
        found["link_recovery"] = sum(one.recovery for one in sample.links)
        found["link_recovery_failed"] = sum(one.recovery_failed for one in sample.links)
    return found


def of_device(context: Context) -> tuple[Finding, ...]:
    """All findings of one GPU. A lost GPU is one finding: its other readings mean nothing."""
    uuid = context.sample.device.uuid
    if context.sample.lost:
        return (lost(uuid, context.sample.errors),)
    return tuple(msgspec.structs.replace(one, uuid=uuid) for check in _CHECKS for one in check(context))


def lost(uuid: str, errors: dict[str, int] | None = None) -> Finding:
    """A GPU that NVML says is gone, or no longer lists."""
    evidence = tuple(f"{call}: NVML error {code}" for call, code in (errors or {}).items() if code in (15, 28, 999))
    return Finding(kind="gpu_lost", action="reboot", reason="the GPU does not answer", uuid=uuid, clears="reboot", evidence=evidence)


def _recovery(context: Context) -> Iterator[Finding]:
    value = context.sample.recovery_action
    if value:
        action = RECOVERY_ACTIONS.get(value, "reset")
        yield Finding(kind="gpu_recovery_action", action=action, reason=f"the driver asks for recovery action {value} ({action})")


def _memory(context: Context) -> Iterator[Finding]:
    sample, policy = context.sample, context.policy.memory
    grown = max(context.grown("ecc_uncorrected_volatile"), context.grown("ecc_uncorrected_aggregate"))
    first_sight = context.before is None and (sample.ecc_uncorrected_volatile or 0) > 0
    if grown or first_sight:
        number = grown or sample.ecc_uncorrected_volatile
        yield Finding(
            kind="gpu_mem_uncorrectable",
            action="reset",
            reason="uncorrectable ECC errors",
            clears="reset",
            evidence=(f"{number} uncorrectable errors more",),
        )
    if sample.sram_threshold_exceeded:
        yield Finding(kind="gpu_sram", action="replace", reason="SRAM uncorrectable errors above NVIDIA's threshold")
    if sample.remap_failure:
        yield Finding(kind="gpu_mem_remap_failed", action="replace", reason="row remapping failed: no spare rows left")
    if sample.remap_pending:
        yield _at_idle(context, "gpu_mem_remap_pending", "a row remap waits for a GPU reset")
    if sample.retired_pages_pending:
        yield _at_idle(context, "gpu_mem_remap_pending", "a page retirement waits for a GPU reset")
    if sample.channel_repair_pending or sample.tpc_repair_pending:
        yield _at_idle(context, "gpu_repair_pending", "a channel or TPC repair waits for a GPU reset")
    if (sample.retired_pages or 0) >= policy.retired_pages_replace:
        yield Finding(kind="gpu_mem_remap_failed", action="replace", reason=f"{sample.retired_pages} retired pages")
    corrected = context.grown("ecc_corrected_volatile")
    if context.seconds > 0 and corrected > policy.corrected_per_hour and corrected * 3600 / context.seconds > policy.corrected_per_hour:
        yield _watch("gpu_mem_corrected", "corrected ECC errors at a high rate", clears="quiet")
    if sample.ecc_mode is not None and sample.ecc_mode_pending is not None and sample.ecc_mode != sample.ecc_mode_pending:
        yield _watch("gpu_configuration", "a change of the ECC mode waits for a reset")


def _at_idle(context: Context, kind: str, reason: str) -> Finding:
    """Work that needs a reset but not now: a busy GPU goes on, an idle one is not given to a job before."""
    busy = context.idle is False or (context.idle is None and bool(context.sample.processes))
    return Finding(kind=kind, action="reset", reason=reason, state="degraded" if busy else "unhealthy")


def _thermal(context: Context) -> Iterator[Finding]:
    sample, policy = context.sample, context.policy.thermal
    if sample.temperature is not None and sample.temperature_slowdown:
        if sample.temperature >= sample.temperature_slowdown:
            hot = "at or above its slowdown temperature"
            yield _watch("gpu_thermal", hot)
            yield Finding(kind="gpu_overheated", action="watch", reason=hot, after_seconds=policy.over_slowdown_seconds)
        elif sample.temperature >= sample.temperature_slowdown - policy.near_slowdown_celsius:
            yield _watch("gpu_thermal", "near its slowdown temperature", after=policy.near_slowdown_seconds)
    reasons = sample.clock_event_reasons or 0
    named = [
        name
        for bit, name in ((HW_SLOWDOWN, "hardware slowdown"), (HW_THERMAL, "hardware thermal"), (POWER_BRAKE, "power brake"))
        if reasons & bit
    ]
    if named:
        yield _watch("gpu_clocks", f"clocks held down: {', '.join(named)}", after=policy.clock_reason_seconds)
    if reasons & SW_THERMAL:
        yield _watch("gpu_thermal", "clocks held down by software thermal limit", after=policy.sw_thermal_seconds)
    for counter, name in (("throttle_hw_thermal_ns", "hardware thermal"), ("throttle_power_brake_ns", "power brake")):
        share = context.grown(counter) / SECOND_NS / context.seconds if context.seconds > 0 else 0.0
        if share > policy.throttle_share_bad:
            yield Finding(kind="gpu_throttled", action="watch", reason=f"much of the time throttled: {name}")
        elif share > policy.throttle_share_watch:
            yield _watch("gpu_throttled", f"throttled at times: {name}")


def _pcie(context: Context) -> Iterator[Finding]:
    sample, policy = context.sample, context.policy.link
    if sample.pcie_width and sample.pcie_width_max and sample.pcie_width < sample.pcie_width_max:
        yield _watch("pcie_link_degraded", f"PCIe link x{sample.pcie_width} of x{sample.pcie_width_max}")
    busy = (sample.utilization_percent or 0) >= policy.generation_busy_percent
    if busy and sample.pcie_generation and sample.pcie_generation_max and sample.pcie_generation < sample.pcie_generation_max:
        yield _watch("pcie_link_degraded", f"PCIe generation {sample.pcie_generation} of {sample.pcie_generation_max} under load")
    if context.grown("pcie_fatal_errors"):
        yield Finding(kind="pcie_uncorrected", action="reboot", reason="fatal PCIe errors", clears="reboot")
    replays = context.grown("pcie_replays")
    if context.seconds > 0 and replays > policy.pcie_replays_per_minute and replays * 60 / context.seconds > policy.pcie_replays_per_minute:
        yield _watch("pcie_corrected", "PCIe replays at a high rate", clears="quiet")


def _links(context: Context) -> Iterator[Finding]:
    sample = context.sample
    up = {one.link for one in sample.links if one.up}
    known_up = set(context.before.links_up) if context.before else set[int]()
    down = [one.link for one in sample.links if not one.up and (up or one.link in known_up)]
    if down:
        names = ", ".join(str(link) for link in down)
        yield Finding(kind="nvlink_fault", action="reset", reason=f"NVLink {names} down")
    if context.grown("link_recovery_failed"):
        yield Finding(kind="nvlink_fault", action="reset", reason="NVLink recovery failed", clears="reset")
    elif context.grown("link_recovery"):
        yield _watch("nvlink_degraded", "NVLink recoveries", clears="quiet")
    state = sample.fabric_state
    if state in (1, 2):
        yield Finding(
            kind="fabric", action="reset", reason="not registered with the NVLink fabric", after_seconds=context.policy.link.fabric_seconds
        )
    elif state == FABRIC_COMPLETED and sample.fabric_status:
        yield Finding(kind="fabric", action="reset", reason=f"fabric registration failed with {sample.fabric_status}")
    if sample.fabric_health_summary == 2:
        yield Finding(kind="fabric", action="reset", reason="the NVLink fabric reports this GPU as unhealthy")
    elif sample.fabric_health_summary == 3:
        yield _watch("fabric", "the NVLink fabric has limited capacity")


def _activity(context: Context) -> Iterator[Finding]:
    sample, policy = context.sample, context.policy.power
    busy = (sample.utilization_percent or 0) >= policy.stalled_utilization_percent
    if busy and sample.power_watts is not None and sample.power_watts < policy.stalled_power_share * (sample.power_limit_watts or 0.0):
        yield _watch("gpu_stalled", "busy at low power: waiting in a collective", after=policy.stalled_seconds)
    if context.idle and sample.processes:
        pids = ", ".join(str(one.pid) for one in sample.processes[:8])
        yield Finding(
            kind="gpu_leftover_process",
            action="restart_app",
            state="degraded",
            reason=f"processes left on the GPU: {pids}",
            after_seconds=context.policy.process.leftover_seconds,
        )


def _watch(kind: str, reason: str, *, after: float = 0.0, clears: Literal["level", "quiet"] = "level") -> Finding:
    return Finding(kind=kind, action="watch", reason=reason, state="degraded", after_seconds=after, clears=clears)


_CHECKS: tuple[Callable[[Context], Iterator[Finding]], ...] = (_recovery, _memory, _thermal, _pcie, _links, _activity)
