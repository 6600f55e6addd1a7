"""deploy/slurm on a real Slurm: a node is lost and training goes on; a notice leads to a save and a requeue; a bad job is not requeued."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.slurm import Slurm

from regrow.store.embedded import EmbeddedEtcd

ROOT = Path(__file__).parents[2]
LIMIT = 240.0
STEPS = 80


@pytest.fixture
async def slurm() -> AsyncIterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="rgs-", dir="/tmp") as folder:  # short: sockets are in it
        made = Slurm(Path(folder))
        etcd = EmbeddedEtcd(made.root / "etcd")
        await etcd.start()
        made.environment |= {
            "REGROW_STORE": etcd.url,
            "REGROW": str(Path(sys.executable).with_name("regrow")),
            "REGROW_ROOT": folder,
            "REGROW_STATE": f"{folder}/nodes",
            "REGROW_BEAT": "127.0.0.1:0",
            "REGROW_SUPERVISOR_ADVERTISE": "127.0.0.1",
            "REGROW_AGENT_ADDRESS": "127.0.0.1",
            "REGROW_AGENT_KERNEL_LOG": "",
            "REGROW_AGENT_HEALTH_SECONDS": "0",
            "REGROW_AGENT_WARM": "0",
            "OMP_NUM_THREADS": "1",
        }
        made.start()
        try:
            yield made
        finally:
            made.stop()
            await etcd.stop()


async def until(slurm: Any, what: str, condition: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Wait for a condition on files or on the controller's answer."""
    try:
        async with asyncio.timeout(limit):
            while True:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"did not see {what}\n{slurm.logs()}")


def seen(folder: Path) -> list[dict[str, Any]]:
    """All lines that rank 0 wrote, generation by generation."""
    files = sorted(folder.glob("g*-r0.jsonl"), key=lambda path: int(path.name[1:].split("-")[0]))
    return [json.loads(line) for path in files for line in path.read_text().splitlines() if line.endswith("}")]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_lost_node_a_notice_and_a_job_that_cannot_run(slurm: Any) -> None:
    template, log = str(ROOT / "deploy/slurm/regrow.sbatch"), slurm.root / "steps"
    common = ("sbatch", "--parsable", f"--chdir={slurm.root}", f"--output={slurm.root}/%j.out")
    await until(slurm, "two idle nodes", lambda: _idle(slurm, 2))

    script = (str(ROOT / "tests/e2e/toy.py"), "--steps", str(STEPS), "--log", str(log), "--pause", "0.1")
    submitted = await slurm.ask(*common, "--nodes=2", template, "--nnodes", "1:2", "--global-batch", "8", *script)
    number = submitted.strip().split(";")[0]

    def trains(world: int, after: int = 0) -> bool:
        lines = seen(log)
        worlds = [line["world"] for line in lines if "world" in line]
        return bool(worlds) and worlds[-1] == world and max((line.get("step", 0) for line in lines), default=0) > after

    await until(slurm, "steps on two nodes", lambda: trains(2))
    batch_host = (await slurm.job(number))["BatchHost"]
    victim = "n2" if batch_host == "n1" else "n1"
    before = max(line.get("step", 0) for line in seen(log))
    slurm.kill_node(victim)
    await until(slurm, "new steps on one node", lambda: trains(1, before))
    assert (await slurm.job(number))["JobState"] == "RUNNING"

    await slurm.ask("scancel", "--batch", "--signal=USR1", number)
    await until(slurm, "the job is requeued", lambda: _restarts(slurm, number))
    reached = max(line.get("step", 0) for line in seen(log))
    assert before < reached < STEPS
    slurm.start_node(victim)
    await until(slurm, "the requeued job waits", lambda: _state(slurm, number, "PENDING"))
    await slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm's own pause before a second start is two minutes
    await until(slurm, "the end", lambda: _state(slurm, number, "COMPLETED"))
    restored = [line["restored"] for line in seen(log) if "restored" in line]
    assert restored[-1] >= reached, "the requeued job goes on from the save of the notice"
    assert seen(log)[-1]["step"] == STEPS

    bad = (await slurm.ask(*common, "--nodes=1", template, "/nowhere/train.py")).strip()
    await until(slurm, "the bad job fails", lambda: _state(slurm, bad, "FAILED"))
    shown = await slurm.job(bad)
    assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0")


async def _idle(slurm: Any, count: int) -> bool:
    return (await slurm.ask("sinfo", "-h", "-N", "-o", "%t", check=False)).split() == ["idle"] * count


async def _state(slurm: Any, number: str, state: str) -> bool:
    return (await slurm.job(number))["JobState"] == state


async def _restarts(slurm: Any, number: str) -> bool:
    return int((await slurm.job(number))["Restarts"]) == 1
