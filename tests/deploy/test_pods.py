"""The JobSet form, run: its pods' command lines, environment, secrets and probes as a kubelet would make them, with real TLS and tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.kubelet import LIMIT, Cluster, Pod
from tests.deploy.manifests import jobs, of_kind, pods
from tests.deploy.slurm import free_ports

from regrow import certificates
from regrow.supervisor import auth

API = ("regrow-api", "regrow-api.regrow.svc")
AGENTS = ("regrow-agent-0", "regrow-agent-1")
SIZES = {"REGROW_AGENT_SLOTS": "2", "REGROW_AGENT_WARM": "false", "REGROW_AGENT_HEALTH_SECONDS": "0", "OMP_NUM_THREADS": "1"}
PROGRAM = """
import os, pathlib
pathlib.Path(__file__).with_name("rank" + os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Path]:
    """As the page says: all pairs in one Secret, the tokens in another, one token for who submits."""
    pki = tmp_path / "pki"
    certificates.make_authority(pki, days=2)
    certificates.issue(pki, "supervisor", "supervisor", hosts=(*API, "127.0.0.1"), days=2)
    for name in AGENTS:
        certificates.issue(pki, "node", name, hosts=("127.0.0.1",), days=2)
    certificates.issue(pki, "etcd", "etcd", hosts=("127.0.0.1",), days=2)
    (pki / "ca.key").unlink()
    made = {"regrow-tls": pki, "regrow-tokens": tmp_path / "tokens", "regrow-submit": tmp_path / "submit"}
    for folder in made.values():
        folder.mkdir(exist_ok=True)
    token = auth.make_token(made["regrow-tokens"] / "tokens", "submit", "admin")
    (made["regrow-submit"] / "token").write_text(token)
    return made


@pytest.fixture
def etcd(secrets: dict[str, Path], tmp_path: Path) -> Iterator[int]:
    """A member with TLS that asks for client certificates; its client port."""
    program = shutil.which("etcd")
    assert program is not None, "etcd is missing: tools/system.sh installs it"
    client, peer = free_ports(2)
    pki = secrets["regrow-tls"]
    urls = ("--listen-client-urls", f"https://127.0.0.1:{client}", "--advertise-client-urls", f"https://127.0.0.1:{client}")
    peers = ("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}")
    tls = ("--client-cert-auth", "--cert-file", f"{pki}/etcd.pem", "--key-file", f"{pki}/etcd.key", "--trusted-ca-file", f"{pki}/ca.pem")
    with (tmp_path / "etcd.log").open("wb") as log:
        command = [program, "--data-dir", str(tmp_path / "data"), *urls, *peers, "--initial-cluster", f"default=http://127.0.0.1:{peer}"]
        running = subprocess.Popen([*command, *tls], stdout=log, stderr=log)
    end = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", client)):
            break
        assert running.poll() is None, (tmp_path / "etcd.log").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    yield client
    running.kill()
    running.wait()


def smaller(pod: dict[str, Any]) -> dict[str, Any]:
    """The same pod with a job for two nodes of two."""
    text = json.dumps(pod).replace('"8:10"', '"2:2"').replace('"--nproc-per-node", "8"', '"--nproc-per-node", "2"')
    return json.loads(text)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[list[Pod]]:
    started: list[Pod] = []
    yield started
    for pod in reversed(started):
        if pod.process is not None:
            await pod.stop()


async def test_a_jobset_trains_and_ends(secrets: dict[str, Path], etcd: int, running: list[Pod], tmp_path: Path) -> None:
    beat, api, *own = free_ports(6)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "train.py").write_text(PROGRAM)
    cluster = Cluster(
        secrets=secrets,
        config={item["metadata"]["name"]: item["data"] for item in of_kind("jobset", "ConfigMap")},
        claims={"regrow-checkpoints": tmp_path / "shared"},
        hosts={"etcd.regrow.svc:2379": f"127.0.0.1:{etcd}", "regrow-api.regrow.svc:7071": f"127.0.0.1:{api}"},
        sizes=SIZES,
    )
    supervisor, *_ = pods("jobset")
    fields = {"metadata.name": "regrow-supervisor-x", "status.podIP": "127.0.0.1"}
    running.append(Pod(tmp_path / "supervisor", supervisor, cluster, fields, {7070: beat, 7071: api}))
    await running[0].start()
    agent = jobs("jobset")["agents"]["spec"]["template"]["spec"]
    for number in range(len(AGENTS)):
        fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(number), "status.podIP": "127.0.0.1"}
        peer, metrics = own[2 * number : 2 * number + 2]
        running.append(Pod(tmp_path / f"agent{number}", agent, cluster, fields, {7072: peer, 9464: metrics}))
        await running[-1].start()
    await asyncio.gather(*(pod.ready() for pod in running))
    run = smaller(jobs("jobset")["run"]["spec"]["template"]["spec"])
    running.append(Pod(tmp_path / "run", run, cluster, {}, {}))
    await running[-1].start()
    code = await running[-1].ends()
    assert code == 0, "\n".join(f"== {pod.root.name}\n{pod.log()[-3000:]}" for pod in running)
    assert {path.name: path.read_text() for path in (tmp_path / "shared").glob("rank*")} == {f"rank{rank}": "4" for rank in range(4)}
    assert [await pod.stop() for pod in reversed(running)] == [0, 0, 0, 0]


@pytest.mark.parametrize("form", ["daemonset", "statefulset"])
def test_agents_of_the_other_forms_differ_by_their_name_alone(form: str) -> None:
    """So that what is run above is run for them, too."""

    def shape(pod: dict[str, Any]) -> dict[str, Any]:
        made = yaml.safe_load(yaml.safe_dump(pod))
        (container,) = made["containers"]
        made.pop("restartPolicy", None)
        container["env"] = [entry for entry in container["env"] if entry["name"] not in ("NAME", "INDEX")]
        return made

    assert shape(pods(form)[1]) == shape(jobs("jobset")["agents"]["spec"]["template"]["spec"])
    named = next(entry for entry in pods(form)[1]["containers"][0]["env"] if entry["name"] == "NAME")
    wanted = {"daemonset": "spec.nodeName", "statefulset": "metadata.name"}[form]
    assert named["valueFrom"]["fieldRef"]["fieldPath"] == wanted
