"""What an agent knows of itself, its host and its GPUs, as samples. Nothing is kept between two scrapes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from regrow import telemetry
from regrow.agent.health.history import History
from regrow.agent.health.sample import DeviceSample
from regrow.agent.health.xid import table
from regrow.agent.watch import HealthSource
from regrow.telemetry import Page

if TYPE_CHECKING:
    from regrow.agent.driver import Agent

OTHER = "other"
"""Label of XIDs that are not in the table: the set of labels stays closed."""


def put_agent(page: Page, node: str, agent: Agent) -> None:
    """The agent itself."""
    beat, local = agent.beat, agent.state.current
    page.put("regrow_agent_up", 1.0, node)
    page.put("regrow_agent_connected", float(beat.connected), node)
    page.put("regrow_agent_store_up", float(agent.registry.store_up), node)
    if beat.last_beat_at is not None:
        page.put("regrow_agent_beat_age_seconds", asyncio.get_running_loop().time() - beat.last_beat_at, node)
    page.put("regrow_agent_kept_messages", beat.num_kept, node)
    page.put("regrow_agent_dropped_messages", beat.num_dropped, node)
    page.put("regrow_agent_shim_up", float(agent.launcher.ready is not None), node)
    page.put("regrow_agent_writer_up", float(agent.checkpoints.writer_pid > 0), node)
    status = agent.checkpoints.buddies.status
    if status is not None:
        page.put("regrow_agent_copies_held_bytes", status.copies_held_bytes, node)
        page.put("regrow_agent_copy_seconds", status.last_copy_seconds or None, node)
        for outcome, count in (("sent", status.copies_sent), ("failed", status.copies_failed), ("refused_here", status.copies_refused)):
            page.put("regrow_agent_copies", count, node, outcome)
        for left_out, count in status.memory_short.items():
            page.put("regrow_agent_memory_short", count, node, left_out)
    for outcome, count in agent.checkpoints.mirror.counts.items():
        page.put("regrow_agent_mirrors", count, node, outcome)
    page.put("regrow_agent_workers", len(local.live) if local is not None else 0, node)
    page.put("regrow_agent_teardown", float(agent.health.in_teardown()), node)


def put_host(page: Page, node: str, state: Path, cpu_ratio: float) -> None:
    """Memory, CPU and disk."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(state))
    page.put("regrow_agent_host_memory_available_bytes", memory.available, node)
    page.put("regrow_agent_host_memory_bytes", memory.total, node)
    page.put("regrow_agent_host_cpu_ratio", cpu_ratio, node)
    page.put("regrow_agent_host_disk_free_bytes", disk.free, node)
    page.put("regrow_agent_host_disk_bytes", disk.total, node)


def put_gpus(page: Page, node: str, health: HealthSource) -> None:
    """The verdict on the node and what the last probe saw. XIDs are counted over restarts of the agent."""
    history = health.history()
    page.enum("regrow_agent_health", telemetry.HEALTH_STATES, health.verdict().state, node)
    page.put("regrow_agent_conditions", len(history.conditions), node)
    sample = health.sample()
    if sample is None or sample.status == "no_driver":
        return
    page.put("regrow_agent_probe_seconds", sample.seconds, node)
    page.put("regrow_agent_probe_ok", float(sample.status == "ok"), node)
    page.put("regrow_agent_gpus", sum(not one.lost for one in sample.devices), node)
    for one in sample.devices:
        _put_gpu(page, node, one)
    here = {one.device.uuid for one in sample.devices} if sample.status == "ok" else set(history.devices)
    _put_xids(page, node, history, here)


def _put_gpu(page: Page, node: str, one: DeviceSample) -> None:
    uuid = one.device.uuid
    page.put("regrow_agent_gpu_lost", float(one.lost), node, uuid)
    if one.lost:
        return
    page.put("regrow_agent_gpu_temperature_celsius", one.temperature, node, uuid)
    page.put("regrow_agent_gpu_slowdown_celsius", one.temperature_slowdown, node, uuid)
    page.put("regrow_agent_gpu_memory_used_bytes", one.memory_used_bytes, node, uuid)
    page.put("regrow_agent_gpu_memory_bytes", one.device.memory_bytes or None, node, uuid)
    page.put("regrow_agent_gpu_power_watts", one.power_watts, node, uuid)
    page.put("regrow_agent_gpu_busy_ratio", one.utilization_percent / 100.0 if one.utilization_percent is not None else None, node, uuid)
    page.put("regrow_agent_gpu_ecc_errors", one.ecc_corrected_volatile, node, uuid, "corrected")
    page.put("regrow_agent_gpu_ecc_errors", one.ecc_uncorrected_volatile, node, uuid, "uncorrected")


def _put_xids(page: Page, node: str, history: History, here: set[str]) -> None:
    """Counters of GPUs that are here. The age leaves out codes that came in our own kill windows only."""
    now, codes = time.time(), table()
    for uuid, device in history.devices.items():
        counts: dict[str, int] = {}
        ages: dict[str, float] = {}
        for code, seen in device.xids.items() if uuid in here else ():
            label = str(code) if code in codes else OTHER
            counts[label] = counts.get(label, 0) + seen.count
            if seen.last_at is not None and seen.count > seen.teardown:
                ages[label] = min(ages.get(label, float("inf")), max(0.0, now - seen.last_at))
        for label, count in counts.items():
            page.put("regrow_agent_gpu_xids", count, node, uuid, label)
        for label, age in ages.items():
            page.put("regrow_agent_gpu_xid_age_seconds", age, node, uuid, label)
