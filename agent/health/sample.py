"""What one look at a node's GPUs found. Plain data: made by the probe child, read by the policy.

None means that the driver or the GPU does not offer the value; the call and its NVML error code are then in `errors`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow.wire import Device


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A compute process on a GPU."""

    pid: int
    memory_bytes: int = 0


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One NVLink: state and counters since the last driver load or reset."""

    link: int
    up: bool
    recovery: int = 0
    recovery_failed: int = 0
    replay: int = 0


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Temperatures in degrees Celsius, power in watts, times in nanoseconds since driver load."""

    device: Device
    minor: int | None = None
    memory_used_bytes: int | None = None
    temperature: int | None = None
    memory_temperature: int | None = None
    temperature_slowdown: int | None = None
    temperature_shutdown: int | None = None
    temperature_margin: int | None = None
    clock_sm: int | None = None
    clock_sm_max: int | None = None
    clock_event_reasons: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_percent: int | None = None
    performance_state: int | None = None
    ecc_mode: int | None = None
    ecc_mode_pending: int | None = None
    persistence_mode: int | None = None
    mig_mode: int | None = None
    ecc_corrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    sram_uncorrected: int | None = None
    sram_threshold_exceeded: bool | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    retired_pages: int | None = None
    retired_pages_pending: bool | None = None
    channel_repair_pending: bool | None = None
    tpc_repair_pending: bool | None = None
    recovery_action: int | None = None
    """Field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 recover IMEX domain, 6 bus reset, 7 system reboot."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    pcie_fatal_errors: int | None = None
    pcie_nonfatal_errors: int | None = None
    pcie_correctable_errors: int | None = None
    throttle_sw_thermal_ns: int | None = None
    throttle_hw_thermal_ns: int | None = None
    throttle_power_brake_ns: int | None = None
    violation_thermal_ns: int | None = None
    fabric_state: int | None = None
    fabric_status: int | None = None
    fabric_health_mask: int | None = None
    fabric_health_summary: int | None = None
    links: tuple[LinkSample, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    lost: bool = False
    """A call said GPU_IS_LOST (or an unknown error on the handle): the other values are then not to be read."""
    errors: dict[str, int] = {}


class XidEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An NVML event. XIDs carry no text; pid, link and sub-code stand in the kernel log only."""

    uuid: str
    kind: int
    data: int


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all GPUs of a node."""

    status: Literal["ok", "no_driver", "init_failed", "hung", "crashed"]
    """no_driver: no NVML library, or no NVIDIA driver loaded; hung: no answer before the deadline; crashed: the probe died."""
    error: int = 0
    detail: str = ""
    boot_id: str = ""
    driver_version: str = ""
    nvml_version: str = ""
    count: int = 0
    unreachable: tuple[int, ...] = ()
    """Indices whose handle could not be had: lost GPUs of which NVML will not even tell the UUID."""
    devices: tuple[DeviceSample, ...] = ()
    events: tuple[XidEvent, ...] = ()
    seconds: float = 0.0
    """Duration of the probe."""

    def lost_uuids(self) -> tuple[str, ...]:
        """UUIDs of GPUs that answered as lost."""
        return tuple(one.device.uuid for one in self.devices if one.lost)

    def memory_ratio(self) -> float:
        """Memory in use on the fullest GPU, as a share; 0 where nothing is known."""
        shares = (
            one.memory_used_bytes / one.device.memory_bytes
            for one in self.devices
            if one.memory_used_bytes is not None and one.device.memory_bytes > 0
        )
        return max(shares, default=0.0)
