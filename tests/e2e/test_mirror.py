"""A second tier behind a URL: copied while the job runs, complete at its end, and what a machine without any checkpoint goes on from.

S3 is moto's server here, an emulator.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import Run

from regrow import wire
from regrow.ckpt.remote import Tier
from regrow.errors import OperationalError
from regrow.local.job import DEGRADED, closing_line, last_copy

TOY = Path(__file__).with_name("toy.py")
URL = "s3://second/toy"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """An empty bucket, and the environment that points this process and what it starts at it."""
    moto: Any = importlib.import_module("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files: Any = importlib.import_module("fsspec").filesystem("s3")
    files.clear_instance_cache()
    importlib.import_module("fsspec").filesystem("s3").mkdir("second")
    yield
    server.stop()


def test_a_job_goes_on_from_the_second_storage_when_the_first_is_gone(bucket: None, launch: Callable[..., Run], tmp_path: Path) -> None:
    del bucket
    flags = ("--local", "1", "--nproc-per-node", "1", "--global-batch", "8", "--job", "toy", "--mirror", URL, "--mirror-keep", "2")
    run = launch(*flags, str(TOY), "--steps", "60", "--log", str(tmp_path / "one"))
    early = run.until(lambda: [one.record.step for one in Tier(URL).scan()], "a copy")
    assert early[0] < 60, "the agent copies while the job trains"
    assert run.wait() == 0, run.story()
    assert Tier(URL).scan()[0].record.step == 60
    assert len(Tier(URL).scan()) <= 2
    shutil.rmtree(run.root)
    again = launch(*flags, str(TOY), "--steps", "62", "--log", str(tmp_path / "two"))
    assert again.wait() == 0, again.story()
    (log,) = (tmp_path / "two").glob("g*-r0.jsonl")
    begin = json.loads(log.read_text().splitlines()[0])
    assert begin["restored"] == 60
    assert Tier(URL).scan()[0].record.step == 62


def test_a_job_that_is_done_without_its_copy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Tier) -> list[Any]:
        raise OperationalError("cannot be listed", where=self.url)

    monkeypatch.setattr(Tier, "scan", refuses)
    policy = wire.CheckpointPolicy(path=str(tmp_path), mirror_url=f"file://{tmp_path}/second")
    document: dict[str, Any] = {"job": "toy", "state": "done", "step": 5}
    assert last_copy(policy, 0, document) == DEGRADED
    assert "not in the second storage" in closing_line(document)
    assert last_copy(policy, 1, document) == 1
    assert last_copy(wire.CheckpointPolicy(path=str(tmp_path)), 0, {}) == 0
