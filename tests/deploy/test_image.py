"""The container images: built without an index of packages on a Debian of their own, and run; the health check against a real supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from regrow.store.embedded import EmbeddedEtcd
from regrow.store.memory import MemoryStore
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.service import Supervisor

ROOT = Path(__file__).parents[2]
HEALTHY = ROOT / "deploy" / "docker" / "healthy.py"
LIMIT = 60.0


def healthy(state: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
    environment = kept | {"REGROW_SUPERVISOR_STATE": str(state), "REGROW_AGENT_STATE": str(state)}
    return subprocess.run([sys.executable, str(HEALTHY)], env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)


async def test_the_health_check_tells_a_supervisor_that_serves_from_one_that_does_not(tmp_path: Path) -> None:
    assert healthy(tmp_path).returncode == 1, "nothing has begun to serve"
    config = SupervisorConfig(cluster="t", store="memory://", state=str(tmp_path), ttl=2.0, name="s0")
    ready, store = asyncio.Event(), MemoryStore()
    made = Supervisor(config, Policy(), store=store, on_serving=lambda _: ready.set())
    running = asyncio.create_task(made.run())
    await asyncio.wait_for(ready.wait(), LIMIT)
    done = await asyncio.to_thread(healthy, tmp_path)
    assert done.returncode == 0, done.stderr
    announced = (tmp_path / "supervisor.json").read_text()
    made.stop()
    await running
    await store.close()
    (tmp_path / "supervisor.json").write_text(announced)  # as after a crash
    done = await asyncio.to_thread(healthy, tmp_path)
    assert done.returncode == 1
    assert "refused" in done.stderr


class Buildah:
    """buildah with everything in one folder, without a daemon and without user namespaces."""

    def __init__(self, folder: Path) -> None:
        tool = shutil.which("buildah")
        assert tool is not None, "buildah is missing: tools/system.sh installs it"
        self._command = [tool, "--storage-driver", "vfs", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def __call__(self, *words: str, check: bool = True) -> str:
        done = subprocess.run([*self._command, *words], capture_output=True, text=True, check=False, timeout=600)
        assert not check or done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return (done.stdout + done.stderr).strip()


EXTRAS = {"supervisor": "security", "agent": "train,security"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """localhost/supervisor and localhost/agent, from the wheel of this tree and wheels that are fetched beforehand."""
    folder = tmp_path_factory.mktemp("image")
    buildah, context = Buildah(folder), folder / "context"
    debootstrap = shutil.which("mmdebstrap")
    assert debootstrap is not None, "mmdebstrap is missing: tools/system.sh installs it"
    subprocess.run(
        [debootstrap, "--quiet", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(folder / "base.tar")], check=True
    )
    base = buildah("from", "scratch").splitlines()[-1]
    buildah("add", base, str(folder / "base.tar"), "/")
    buildah("commit", "--rm", base, "localhost/base")
    shutil.copytree(ROOT / "deploy" / "docker", context / "deploy" / "docker")
    shutil.copy(ROOT / ".dockerignore", context)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(context / "dist")], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = (context / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(context / "wheels")]
    torch = f"torch=={version('torch').partition('+')[0]}"  # as it is here: the newest one may bring gigabytes for GPUs
    for name, extras in EXTRAS.items():
        subprocess.run([*pip, f"{wheel}[{extras}]", *([torch] if "train" in extras else [])], check=True, capture_output=True)
        arguments = {"BASE": "localhost/base", "EXTRAS": extras, "PIP_ARGS": "--no-index --find-links /context/wheels"}
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        file = str(context / "deploy/docker/Dockerfile")
        buildah("bud", "--isolation", "chroot", "--format", "docker", *given, "-f", file, "-t", f"localhost/{name}", str(context))
    yield buildah
    buildah("rm", "--all", check=False)
    buildah("rmi", "--all", "--force", check=False)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_image_runs_as_nobody_without_torch_and_leads(image: Buildah) -> None:
    shown = json.loads(image("inspect", "--type", "image", "localhost/supervisor"))["Docker"]["config"]
    assert shown["User"] == "10001:10001"
    assert shown["Entrypoint"] == ["regrow"]
    assert shown["Healthcheck"]["Test"] == ["CMD", "python3", "/opt/regrow/healthy.py"]
    container = image("from", "localhost/supervisor").splitlines()[-1]

    def run(*words: str, check: bool = True) -> str:
        return image("run", "--isolation", "chroot", container, "--", *words, check=check)

    assert run("id", "-u") == "10001"
    assert run("sh", "-c", "touch /opt/regrow/x 2>/dev/null || echo kept") == "kept"
    probe = "import importlib.util as u; print([n for n in ('torch', 'pip', 'cryptography', 'regrow') if u.find_spec(n)])"
    assert run("/opt/regrow/bin/python", "-c", probe) == "['cryptography', 'regrow']"
    assert run("regrow", "--version").startswith("regrow ")
    listed = {part["name"] for part in json.loads(run("cat", "/opt/regrow/sbom.cdx.json"))["components"]}
    assert {"msgspec", "cryptography", "libc6", "python3"} <= listed
    assert not {"torch", "pip", "pytest"} & listed
    script = (
        "regrow supervisor --store memory:// --cluster t >/state/log 2>&1 & p=$!; "
        "for i in $(seq 600); do python3 /opt/regrow/healthy.py 2>/dev/null && break; sleep 0.1; done; "
        "python3 /opt/regrow/healthy.py && echo alive; kill -9 $p; wait $p; python3 /opt/regrow/healthy.py || echo dead; cat /state/log"
    )
    said = run("sh", "-c", script)
    assert "alive" in said.splitlines(), said
    assert "dead" in said.splitlines(), said


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_an_agents_image_trains_under_a_supervisors_image(image: Buildah, tmp_path: Path) -> None:
    """Both as containers that share this machine's network, with an etcd outside of them; the job is submitted from the supervisor's."""
    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    agent, control = (image("from", f"localhost/{name}").splitlines()[-1] for name in ("agent", "supervisor"))

    shared = tmp_path / "shared"
    shared.mkdir()

    def run(container: str, script: str) -> str:
        return image("run", "--isolation", "chroot", "-v", f"{shared}:/shared:ro", container, "--", "sh", "-c", script, check=False)

    joined = (
        f"regrow agent --node n1 --cluster t --store {etcd.url} --slots 2 --kernel-log '' --health-seconds 0 >/state/log 2>&1 & p=$!; "
        "for i in $(seq 1200); do [ -e /state/agent.sock ] && python3 /opt/regrow/healthy.py 2>/dev/null && break; sleep 0.1; done; "
        "python3 /opt/regrow/healthy.py && echo alive; id -u; "
        "for i in $(seq 4000); do [ -e /shared/over ] && break; sleep 0.1; done; kill $p; wait $p; echo ended $?; cat /state/log"
    )
    controlled = (
        f"regrow supervisor --store {etcd.url} --cluster t >/state/log 2>&1 & p=$!; "
        "for i in $(seq 600); do python3 /opt/regrow/healthy.py 2>/dev/null && break; sleep 0.1; done; "
        f"regrow run --plain --store {etcd.url} --cluster t --job j --run-dir /state/j --nproc-per-node 2 --global-batch 16 --micro-batch 2 -m regrow.chaos.job --steps 20; "
        "echo trained $?; kill $p; wait $p; cat /state/log"
    )
    try:
        agents = asyncio.create_task(asyncio.to_thread(run, agent, joined))
        said = await asyncio.to_thread(run, control, controlled)
        (shared / "over").touch()
        told = await agents
    finally:
        await etcd.stop()
    assert "trained 0" in said.splitlines(), said + told
    assert {"alive", "10001", "ended 0"} <= set(told.splitlines()), told
