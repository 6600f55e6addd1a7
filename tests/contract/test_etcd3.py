"""What etcd3 0.12 does with a part of the contract: the reason for a client of our own (docs/adr/0001)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.store.embedded import EmbeddedEtcd

TRIAL = Path(__file__).with_name("etcd3_trial.py")


@pytest.fixture(scope="session")
def python_with_etcd3(tmp_path_factory: pytest.TempPathFactory) -> str:
    venv = tmp_path_factory.mktemp("etcd3") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "etcd3==0.12.0"], check=True)
    imported = subprocess.run([python, "-c", "import etcd3"], check=False, capture_output=True, text=True)
    assert imported.returncode != 0, "it cannot be imported with a protobuf of today"
    assert "Descriptors cannot be created directly" in imported.stderr
    subprocess.run([python, "-m", "pip", "install", "--quiet", "protobuf<4"], check=True)
    return python


@pytest.mark.soak
async def test_etcd3_on_a_part_of_the_contract(python_with_etcd3: str, etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    trial = await asyncio.create_subprocess_exec(
        python_with_etcd3, str(TRIAL), str(etcd.client_port), str(control), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    talking = asyncio.create_task(trial.communicate())
    async with asyncio.timeout(150):
        while not (control / "restart").exists() and not talking.done():  # noqa: ASYNC110  (another program's file)
            await asyncio.sleep(0.05)
        await etcd.kill()
        await etcd.restart()
        (control / "restart.done").touch()
        output, errors = await talking
    found = json.loads(output) if output else {"error": errors.decode()}
    assert found == {
        "basics": True,
        "watch from a compacted revision": "raises RevisionCompactedError",
        "backlog of 9 MB": "raises _MultiThreadedRendezvous",
        "watch over a restart": "tells _MultiThreadedRendezvous",
    }
