"""J07: the right GPU, or none. K05: the number of series does not grow with restarts and ids."""

from __future__ import annotations

import time
from pathlib import Path

from regrow import telemetry
from regrow.agent import metrics_page
from regrow.agent.health import assign, base, policy
from regrow.agent.health.attribution import NodeEvidence, RankEvidence, attribute
from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.agent.health.history import History
from regrow.agent.health.prober import probe_once
from regrow.agent.health.sample import DeviceSample, NodeSample
from regrow.agent.health.xid import XidSeen
from regrow.agent.watch import NoHealth
from regrow.wire import Device, WorkerExit

U = tuple(f"GPU-{letter}-1111" for letter in "abc")
BUSES = ("0000:1b:00.0", "0000:3b:00.0", "0000:5d:00.0")


def j07_state(fake: FakeNvml) -> None:
    """NVML lists u2, u0, u1; CUDA orders by PCI address: u0, u1, u2."""
    devices = [{"uuid": U[i], "pci_bus_id": BUSES[i], "minor": 7 - i} for i in (2, 0, 1)]
    fake.write(devices=0)
    fake.set(devices=devices)


def test_j07_a_fault_blames_the_rank_that_uses_the_gpu_or_no_rank(fake: FakeNvml) -> None:
    j07_state(fake)
    found = [one.device for one in probe_once(fake_state=fake.path).devices]
    assert [one.uuid for one in found] == [U[2], U[0], U[1]]
    mine = assign.visible(found, "1,2")
    assert [one.uuid for one in mine] == [U[1], U[2]], "local rank 0 is on u1, 1 on u2"
    for broken, causes in ((U[0], ()), (U[1], (0,)), (U[2], (1,))):
        j07_state(fake)
        fake.set_xid(broken, 48)
        sample = probe_once(fake_state=fake.path)
        now = time.time()
        xids = tuple(XidSeen(code=one.data, at=now, uuid=one.uuid) for one in sample.events)
        outcome = base.evaluate(base.Observation(at=now, sample=sample, xids=xids), History(), policy.default())
        assert outcome.verdict.device_uuids == (broken,)
        ranks = [
            RankEvidence(rank=k, node="n", device_uuid=one.uuid, exit=WorkerExit(rank=k, local_rank=k, pid=k, exit_code=1))
            for k, one in enumerate(mine)
        ]
        assert attribute(ranks, [NodeEvidence(node="n", health=outcome.verdict)]).cause_ranks == causes


def test_visible_devices_as_cuda_reads_them() -> None:
    devices = [Device(uuid=U[i], pci_bus_id=BUSES[i], index=index) for index, i in enumerate((2, 0, 1))]

    def names(text: str | None) -> list[str]:
        return [one.uuid for one in assign.visible(devices, text)]

    assert names(None) == [U[0], U[1], U[2]]
    assert names("2, 0") == [U[2], U[0]]
    assert names(f"{U[1]},GPU-c") == [U[1], U[2]]
    assert names("0,7,1") == [U[0]], "an entry that names nothing ends the list"
    assert names("GPU-") == [], "an ambiguous name is no name"
    assert names("") == names("-1") == []


def test_k05_series_stay_constant_over_500_restarts() -> None:
    class Seen(NoHealth):
        def sample(self) -> NodeSample | None:
            return seen.sample

        def history(self) -> History:
            return history

    def page() -> list[str]:
        scraped = telemetry.Page()
        metrics_page.put_gpus(scraped, "node-0", Seen())
        return [line for line in scraped.text().decode().splitlines() if line.startswith(("regrow_agent_gpu", "regrow_agent_probe"))]

    history = History()
    sizes: list[int] = []
    for restart in range(500):
        devices = tuple(DeviceSample(device=Device(uuid=f"GPU-{restart // 100}-{k}"), temperature=40) for k in range(2))
        now = 1e6 + restart * 60
        seen = base.Observation(
            at=now,
            sample=NodeSample(status="ok", boot_id=f"boot-{restart}", count=2, devices=devices),
            xids=tuple(
                XidSeen(code=code, at=now, uuid=devices[0].device.uuid, pid=restart, text=f"pid={restart}")
                for code in (13, 1000 + restart % 7)
            ),
        )
        history = base.evaluate(seen, history, policy.default()).history
        sizes.append(len(page()))
    assert len(set(sizes[20:])) == 1, "GPUs were swapped every hundred restarts, ids changed at each"
    assert sizes[-1] <= 12
    assert 'regrow_agent_gpu_xids_total{node="node-0",device="GPU-4-0",xid="13"} 100.0' in page()


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "fake-nvml.md").read_text(encoding="utf-8")
    state = text.split("```json\n")[1].split("```")[0]
    path = tmp_path / "state.json"
    path.write_text(state, encoding="utf-8")
    sample = probe_once(fake_state=path)
    assert (sample.status, sample.count) == ("ok", 2)
    assert [link.link for link in sample.devices[1].links if not link.up] == [7]
    assert [one.data for one in sample.events] == [74]
