"""Reads GPUs through NVIDIA's own pynvml. Runs in the probe child only: any call may hang or kill its process.

A call that a GPU or driver does not have gives None and its error code; one that says "GPU is lost" ends the reading
of that GPU. Which calls and thresholds: docs/health.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from regrow.agent.health.boot import boot_id
from regrow.agent.health.sample import DeviceSample, GpuProcess, LinkSample, NodeSample, XidEvent
from regrow.agent.health.xid import normal_bus_id
from regrow.wire import Device

T = TypeVar("T")

LOST_CODES = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_NOT_FOUND)
_ABSENT_CODES = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

_EVENT_TYPES = (
    pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypeSingleBitEccErrorStorm
    | pynvml.nvmlEventTypeDramRetirementEvent
    | pynvml.nvmlEventTypeDramRetirementFailure
    | pynvml.nvmlEventTypeNonFatalPoisonError
    | pynvml.nvmlEventTypeFatalPoisonError
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)

_FIELDS: dict[str, int] = {
    "memory_temperature": pynvml.NVML_FI_DEV_MEMORY_TEMP,
    "recovery_action": pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    "pcie_fatal_errors": pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR,
    "pcie_nonfatal_errors": pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR,
    "pcie_correctable_errors": pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS,
    "throttle_sw_thermal_ns": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
    "throttle_hw_thermal_ns": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
    "throttle_power_brake_ns": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
}
"""Values read through nvmlDeviceGetFieldValues, by the name they have in the sample."""

_LINK_FIELDS: dict[str, int] = {
    "replay": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    "recovery_failed": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
}
_OLD_LINK_COUNTERS = {"replay": pynvml.NVML_NVLINK_ERROR_DL_REPLAY, "recovery": pynvml.NVML_NVLINK_ERROR_DL_RECOVERY}


class _LostError(Exception):
    """This GPU is gone: its other values mean nothing."""


class _Reader:
    """One GPU's calls, with the error code of each that failed."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.errors: dict[str, int] = {}

    def get(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The call's value, or None with its error noted.

        Raises:
            _LostError: NVML says that the GPU is lost.
        """
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            code: int = error.value  # type: ignore[attr-defined]
            self.errors[call.__name__] = code
            if code in LOST_CODES:
                raise _LostError from error
            return None


def open_nvml() -> NodeSample | None:
    """Initialise NVML. None: it is open; else the sample that says why there is nothing to read."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code: int = error.value  # type: ignore[attr-defined]
        status = "no_driver" if code in _ABSENT_CODES else "init_failed"
        return NodeSample(status=status, error=code, detail=str(error), boot_id=boot_id())
    return None


def read_node() -> NodeSample:
    """Read every GPU. NVML must be open.

    A failure of enumeration itself is a sample with status init_failed, never an exception.
    """
    began = time.monotonic()
    try:
        count = pynvml.nvmlDeviceGetCount()
        driver = pynvml.nvmlSystemGetDriverVersion()
        version = pynvml.nvmlSystemGetNVMLVersion()
    except pynvml.NVMLError as error:
        return NodeSample(status="init_failed", error=error.value, detail=str(error), boot_id=boot_id())  # type: ignore[attr-defined]
    devices: list[DeviceSample] = []
    unreachable: list[int] = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid: str = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError:
            unreachable.append(index)
            continue
        devices.append(read_device(handle, uuid, index))
    return NodeSample(
        status="ok",
        boot_id=boot_id(),
        driver_version=driver,
        nvml_version=version,
        count=count,
        unreachable=tuple(unreachable),
        devices=tuple(devices),
        seconds=time.monotonic() - began,
    )


def read_device(handle: Any, uuid: str, index: int) -> DeviceSample:
    """Read one GPU; a lost one comes back with `lost` and what was read before."""
    reader = _Reader(handle)
    found: dict[str, Any] = {}
    identity = Device(uuid=uuid, index=index)
    lost = False
    try:
        identity = _identity(reader, uuid, index, found)
        for part in (_plain, _thermal, _memory_errors, _pcie, _fields, _fabric, _links, _processes):
            part(reader, found)
    except _LostError:
        lost = True
    return DeviceSample(device=identity, lost=lost, errors=reader.errors, **found)


def _identity(reader: _Reader, uuid: str, index: int, found: dict[str, Any]) -> Device:
    pci = reader.get(pynvml.nvmlDeviceGetPciInfo)
    memory = reader.get(pynvml.nvmlDeviceGetMemoryInfo)
    found["minor"] = reader.get(pynvml.nvmlDeviceGetMinorNumber)
    if memory is not None:
        found["memory_used_bytes"] = int(memory.used)
    return Device(
        uuid=uuid,
        serial=reader.get(pynvml.nvmlDeviceGetSerial) or "",
        name=reader.get(pynvml.nvmlDeviceGetName) or "",
        pci_bus_id=normal_bus_id(str(pci.busId)) if pci is not None else "",
        index=index,
        memory_bytes=int(memory.total) if memory is not None else 0,
    )


def _plain(reader: _Reader, found: dict[str, Any]) -> None:
    power = reader.get(pynvml.nvmlDeviceGetPowerUsage)
    limit = reader.get(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    rates = reader.get(pynvml.nvmlDeviceGetUtilizationRates)
    ecc = reader.get(pynvml.nvmlDeviceGetEccMode)
    mig = reader.get(pynvml.nvmlDeviceGetMigMode)
    found["power_watts"] = None if power is None else power / 1000
    found["power_limit_watts"] = None if limit is None else limit / 1000
    found["utilization_percent"] = None if rates is None else int(rates.gpu)
    found["ecc_mode"], found["ecc_mode_pending"] = (None, None) if ecc is None else ecc
    found["mig_mode"] = None if mig is None else mig[0]
    found["persistence_mode"] = reader.get(pynvml.nvmlDeviceGetPersistenceMode)
    found["performance_state"] = reader.get(pynvml.nvmlDeviceGetPerformanceState)
    found["clock_sm"] = reader.get(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
    found["clock_sm_max"] = reader.get(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    found["clock_event_reasons"] = reader.get(pynvml.nvmlDeviceGetCurrentClocksEventReasons)


def _thermal(reader: _Reader, found: dict[str, Any]) -> None:
    temperature = reader.get(pynvml.nvmlDeviceGetTemperatureV, pynvml.NVML_TEMPERATURE_GPU)
    if temperature is None:
        temperature = reader.get(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    found["temperature"] = temperature
    found["temperature_slowdown"] = reader.get(pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    found["temperature_shutdown"] = reader.get(pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
    found["temperature_margin"] = reader.get(pynvml.nvmlDeviceGetMarginTemperature)
    violation = reader.get(pynvml.nvmlDeviceGetViolationStatus, pynvml.NVML_PERF_POLICY_THERMAL)
    found["violation_thermal_ns"] = None if violation is None else int(violation.violationTime)


def _memory_errors(reader: _Reader, found: dict[str, Any]) -> None:
    kinds = {"corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
    for kind, number in kinds.items():
        found[f"ecc_{kind}_volatile"] = reader.get(pynvml.nvmlDeviceGetTotalEccErrors, number, pynvml.NVML_VOLATILE_ECC)
        found[f"ecc_{kind}_aggregate"] = reader.get(pynvml.nvmlDeviceGetTotalEccErrors, number, pynvml.NVML_AGGREGATE_ECC)
    sram: Any = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    if reader.get(_into(pynvml.nvmlDeviceGetSramEccErrorStatus), sram) is not None:
        found["sram_uncorrected"] = int(sram.aggregateUncParity + sram.aggregateUncSecDed)
        found["sram_threshold_exceeded"] = bool(sram.bThresholdExceeded)
    rows = reader.get(pynvml.nvmlDeviceGetRemappedRows)
    if rows is not None:
        found["remapped_correctable"], found["remapped_uncorrectable"] = int(rows[0]), int(rows[1])
        found["remap_pending"], found["remap_failure"] = bool(rows[2]), bool(rows[3])
    else:  # before Ampere
        causes = (pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
        pages = [reader.get(pynvml.nvmlDeviceGetRetiredPages_v2, cause) for cause in causes]
        found["retired_pages"] = None if None in pages else sum(len(one) for one in pages if one is not None)
    pending = reader.get(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    found["retired_pages_pending"] = None if pending is None else bool(pending)
    repair = reader.get(pynvml.nvmlDeviceGetRepairStatus)
    if repair is not None:
        found["channel_repair_pending"], found["tpc_repair_pending"] = bool(repair[0]), bool(repair[1])


def _pcie(reader: _Reader, found: dict[str, Any]) -> None:
    found["pcie_generation"] = reader.get(pynvml.nvmlDeviceGetCurrPcieLinkGeneration)
    found["pcie_generation_max"] = reader.get(pynvml.nvmlDeviceGetMaxPcieLinkGeneration)
    found["pcie_width"] = reader.get(pynvml.nvmlDeviceGetCurrPcieLinkWidth)
    found["pcie_width_max"] = reader.get(pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    found["pcie_replays"] = reader.get(pynvml.nvmlDeviceGetPcieReplayCounter)


def _fields(reader: _Reader, found: dict[str, Any]) -> None:
    values = reader.get(pynvml.nvmlDeviceGetFieldValues, list(_FIELDS.values()))
    if values is None:
        return
    for name, value in zip(_FIELDS, values, strict=True):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            found[name] = field_number(value)
        else:
            reader.errors[f"field {name}"] = int(value.nvmlReturn)


def field_number(value: Any) -> int:
    """The number in a field value's union, by its type tag."""
    tags = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }
    return int(getattr(value.value, tags.get(value.valueType, "ullVal")))


def _fabric(reader: _Reader, found: dict[str, Any]) -> None:
    call = _into(pynvml.nvmlDeviceGetGpuFabricInfoV)
    info: Any = pynvml.c_nvmlGpuFabricInfo_v3_t()
    if reader.get(call, info) is None:
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        if reader.get(call, info) is None:
            return
    found["fabric_state"] = int(info.state)
    found["fabric_status"] = int(info.status)
    found["fabric_health_mask"] = int(info.healthMask)
    found["fabric_health_summary"] = int(getattr(info, "healthSummary", 0))


def _links(reader: _Reader, found: dict[str, Any]) -> None:
    links: list[LinkSample] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        up = reader.get(pynvml.nvmlDeviceGetNvLinkState, link)
        if up is None:
            break
        links.append(LinkSample(link=link, up=bool(up), **_link_counters(reader, link)))
    if links:
        reader.errors.pop(pynvml.nvmlDeviceGetNvLinkState.__name__, None)
    found["links"] = tuple(links)


def _link_counters(reader: _Reader, link: int) -> dict[str, int]:
    values = reader.get(pynvml.nvmlDeviceGetFieldValues, [(number, link) for number in _LINK_FIELDS.values()])
    counters: dict[str, int] = {}
    for name, value in zip(_LINK_FIELDS, values if values is not None else (), strict=False):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            counters[name] = field_number(value)
    for name, number in _OLD_LINK_COUNTERS.items():
        if name not in counters:
            counters[name] = int(reader.get(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, number) or 0)
    return counters


def _processes(reader: _Reader, found: dict[str, Any]) -> None:
    running = reader.get(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
    found["processes"] = tuple(GpuProcess(pid=int(one.pid), memory_bytes=int(one.usedGpuMemory or 0)) for one in running or ())


def _into(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that fills a struct given by reference and returns NVML_SUCCESS."""
    from ctypes import byref

    def filled(handle: Any, struct: Any) -> int:
        return call(handle, byref(struct))

    filled.__name__ = call.__name__
    return filled


class Events:
    """The event set of one probe child: what the driver reported since it was opened."""

    def __init__(self) -> None:
        self._set: Any = None
        self._uuids: dict[str, str] = {}

    def open(self) -> None:
        """Register for the events of every GPU that offers them; a GPU that does not is left out."""
        self._set = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                wanted = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _EVENT_TYPES
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            except pynvml.NVMLError:
                continue

    def drain(self, most: int = 256) -> tuple[XidEvent, ...]:
        """Events that wait now; an event whose GPU is lost has the UUID it had before."""
        found: list[XidEvent] = []
        if self._set is None:
            return ()
        while len(found) < most:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                break
            found.append(XidEvent(uuid=self._uuid(event.device), kind=int(event.eventType), data=int(event.eventData)))
        return tuple(found)

    def remember(self, sample: NodeSample) -> None:
        """Keep the UUIDs of handles, for events of a GPU that will not tell its own any more."""
        for one in sample.devices:
            try:
                self._uuids[_address(pynvml.nvmlDeviceGetHandleByUUID(one.device.uuid.encode()))] = one.device.uuid
            except pynvml.NVMLError:
                continue

    def close(self) -> None:
        """Give the event set back."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)
            self._set = None

    def _uuid(self, handle: Any) -> str:
        known = self._uuids.get(_address(handle))
        if known:
            return known
        try:
            return str(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError:
            return ""


def _address(handle: Any) -> str:
    from ctypes import c_void_p, cast

    return str(cast(handle, c_void_p).value)
