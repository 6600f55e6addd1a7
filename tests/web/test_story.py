"""The story that is read from a journal is the supervisor's own; and the report of it, live, from a folder and from an archive."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scene import form
from stub_agent import eventually

from regrow import wire
from regrow.supervisor import documents
from regrow.supervisor.stats import source
from regrow.supervisor.stats.story import Story

PHASES = ("fenced", "stopped", "started", "rendezvous", "restored")


async def regrow(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "regrow", *arguments]
    return await asyncio.to_thread(lambda: subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False))


async def two_incidents(cluster: Any) -> None:
    """A node that is lost, then a program error of rank 1."""
    await form(cluster, "n0", "n1", "n2", "n3")
    for step in (1, 2, 3, 4):
        await cluster.step(step, seconds=0.2)
    cluster.members()[0].committed(2)
    await eventually(lambda: 2 in cluster.job().checkpoints, "committed")
    await cluster.agents["n2"].die()
    await _go_on(cluster, 2, (3, 4, 5))
    cluster.members()[0].exit(1, exit_code=1, error="Traceback\nValueError: a bug")
    for agent in cluster.members():
        agent.live = False
    await _go_on(cluster, 3, (3, 4, 5, 6))


async def _go_on(cluster: Any, generation: int, steps: tuple[int, ...]) -> None:
    await cluster.generation(generation)
    for agent in cluster.members():
        for phase in PHASES:
            agent.phase(phase)
    for step in steps:
        await cluster.step(step, seconds=0.2)


async def test_incidents_of_the_journal_are_those_of_the_view(cluster: Any) -> None:
    await two_incidents(cluster)
    story = Story().read(cluster.leader.journal.since(0, limit=20_000))
    told = [documents.incident_document(case.incident) for case in story.jobs["train"].cases]
    own = [documents.incident_document(item) for item in cluster.job().incidents if item.cause != "planned"]
    assert len(own) == 2
    for mine, theirs in zip(told, own, strict=True):
        assert mine.pop("phases") == pytest.approx(theirs.pop("phases"), abs=1e-6)
        for name in ("seconds", "restart_seconds", "at"):
            assert mine.pop(name) == pytest.approx(theirs.pop(name), abs=1e-6)
        assert mine == theirs
    lost, bug = story.jobs["train"].cases
    assert [item.kind for item in lost.evidence] == ["node_disconnected"]
    assert "ladder: shrink" in lost.reason
    assert "ValueError: a bug" in bug.traceback
    assert bug.device == "GPU-n0-1"
    assert bug.version


async def test_report_of_a_live_job_a_folder_and_an_archive(cluster: Any, tmp_path: Path) -> None:
    await two_incidents(cluster)
    url = f"http://{cluster.leader.http_address}"
    live = await regrow("report", "train", "--supervisor", url, "--json")
    assert live.returncode == 0, live.stderr
    document = json.loads(live.stdout)
    assert document["failures"]["unplanned"] == 2
    lost, bug = document["journal_incidents"]
    assert (lost["kind"], lost["node"], lost["confidence"], lost["lost_steps"]) == ("node_lost", "n2", "low", 2)
    assert lost["first_bad_event"]["kind"] == "node_disconnected"
    assert bug["class"].endswith("/ program")
    assert bug["confidence"] == "high"
    assert sum(lost["phases"].values()) == pytest.approx(lost["lost_seconds"], rel=1e-6)
    archive = Path(cluster.leader.config.state) / "journal.sqlite"

    def archived() -> bool:
        found = source.load(archive).history.failures
        return len([item for item in found if not item.planned]) == 2

    await eventually(archived, "the archive's thread has written")
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    offline = await regrow("report", str(archive), "--html", str(page), "--markdown", str(text), "--price", "2")
    assert offline.returncode == 0, offline.stderr
    assert max(map(len, offline.stdout.splitlines())) <= 80
    assert "node lost (n2), recovered" in offline.stdout
    assert "ValueError: a bug" in page.read_text()
    assert "http://" not in page.read_text().replace("http://www.w3.org/", "")
    assert "## train-g1: node lost" in text.read_text()
    faults = archive.parent / "faults.json"
    faults.write_text(json.dumps([{"kind": "node_kill", "node": "n2", "at": lost["at"] - 7.0, "incident": lost["id"]}]))
    folder = json.loads((await regrow("report", str(archive.parent), "--json")).stdout)
    assert folder["failures"]["unplanned"] == 2
    assert folder["journal_incidents"][0]["injected_at"] == lost["at"] - 7.0
    assert "injected_at" not in folder["journal_incidents"][1]
    detected = [{one["incident"]: one["detect_seconds"] for one in said["incidents"]} for said in (document, folder)]
    assert detected[1][lost["id"]] == pytest.approx(detected[0][lost["id"]] + 7.0, abs=1e-3), "known from the fault itself"
    assert detected[1][bug["id"]] == pytest.approx(detected[0][bug["id"]], abs=1e-3)
    assert any("in 1 of 2 incidents" in line for line in folder["warnings"])
    faults.write_text('[{"kind": 1}]')
    assert (await regrow("report", str(archive.parent), "--json")).returncode == 2


async def test_report_of_what_is_not_there(cluster: Any) -> None:
    await form(cluster, "n0")
    url = f"http://{cluster.leader.http_address}"
    unknown = await regrow("report", "nope", "--supervisor", url, "--json")
    assert unknown.returncode == 2
    assert "train" in json.loads(unknown.stdout)["error"]["hint"]
    missing = await regrow("report", "no/such/folder", "--json")
    assert missing.returncode == 2


def test_a_worker_that_was_torn_down_is_no_evidence() -> None:
    from regrow.supervisor.journal import Entry
    from regrow.supervisor.stats.parts import speaks

    def entry(**how: Any) -> Entry:
        found = wire.WorkerExit(rank=0, local_rank=0, pid=1, **how)
        return Entry(id=1, epoch=1, at=0.0, time="", kind="workers_exited", data={"exits": [{"torn_down": found.torn_down}]})

    assert not speaks(entry(torn_down=True))
    assert speaks(entry(signal=9))
