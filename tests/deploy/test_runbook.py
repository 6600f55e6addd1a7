"""The runbook "A supervisor's disk is lost", followed to the letter on a real cluster with TLS, tokens and a password of the store;
and no secret of that cluster is anywhere it must not be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.deploy.slurm import free_ports

from regrow import certificates
from regrow.store.embedded import EmbeddedEtcd

ROOT = Path(__file__).parents[2]
LIMIT = 90.0
PASSWORD = "correct-horse-battery"
PROGRAM = """
import json, os, pathlib, time
pathlib.Path(__file__).with_name(f"environ-{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
while True:
    time.sleep(1)
"""


def runbook() -> list[str]:
    """The commands of the section, as they stand there."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text.split("## A supervisor's disk is lost")[1].split("\n## ")[0]
    return [line[4:] for line in section.splitlines() if line.startswith("    ")]


class Site:
    """One etcd with a password, one supervisor, one agent that runs a program without torch; all folders under `root`."""

    def __init__(self, root: Path, store: str) -> None:
        self.root = root
        self.beat, self.http, self.metrics = free_ports(3)
        self.store = f"{store}?user=regrow&password-file={root}/password"
        self.children: list[asyncio.subprocess.Process] = []
        self.supervisors: list[int] = []
        (root / "password").write_text(PASSWORD + "\n")
        (root / "password").chmod(0o600)
        (root / "agent.toml").write_text(
            f'[agent]\ncluster = "prod"\nstore = "{self.store}"\nnode = "n1"\nwarm = false\nkernel_log = ""\nhealth_seconds = 0\n'
            f'metrics = "127.0.0.1:{self.metrics}"\ntls_certificate = "{root}/pki/n1.pem"\ntls_key = "{root}/pki/n1.key"\ntls_ca = "{root}/pki/ca.pem"\n'
        )
        self.bin = Path(sys.executable).parent
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
        self.environment = kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def here(self, command: str) -> str:
        """A command of the runbook with this site's folders and addresses."""
        for old, new in (
            ("/etc/regrow", f"{self.root}/etc"),
            ("/var/lib/regrow", f"{self.root}/state"),
            ("https://10.0.0.1:7071", f"https://127.0.0.1:{self.http}"),
            ("10.0.0.1", "127.0.0.1"),
            ("deploy/systemd/supervisor.toml", f"{self.root}/backup/supervisor.toml"),
        ):
            command = command.replace(old, new)
        return command

    def settings(self) -> str:
        """deploy/systemd/supervisor.toml with this site's store, cluster and addresses."""
        text = self.here((ROOT / "deploy/systemd/supervisor.toml").read_text(encoding="utf-8"))
        text = re.sub(r'^store = ".*"$', f'store = "{self.store}"', text, flags=re.MULTILINE)
        return text.replace("0.0.0.0:7070", f"127.0.0.1:{self.beat}").replace("0.0.0.0:7071", f"127.0.0.1:{self.http}")

    async def follow(self, commands: list[str]) -> str:
        """What a shell that gets these lines says. Its background process lives on."""
        script = "set -eu\n" + "\n".join(map(self.here, commands)).replace(
            " &\n", f" >>{self.root}/supervisor.log 2>&1 & echo $! >>{self.root}/pids\n"
        )
        child = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            script,
            env=self.environment,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        out, _ = await asyncio.wait_for(child.communicate(), LIMIT)
        assert child.returncode == 0, out.decode() + self.log()
        return out.decode()

    def supervisor(self) -> int:
        return int((self.root / "pids").read_text().split()[-1])

    async def agent(self) -> None:
        log = (self.root / "agent.log").open("ab")
        command = (str(self.bin / "regrow"), "agent", "--config", f"{self.root}/agent.toml", "--state", f"{self.root}/node")
        self.children.append(
            await asyncio.create_subprocess_exec(*command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        )
        log.close()

    def ask(self, *words: str) -> Any:
        """A command of an operator, as JSON."""
        secrets = {"REGROW_CA": f"{self.root}/etc/tls/ca.pem", "REGROW_TOKEN_FILE": f"{self.root}/alice.token"}
        address = ("--supervisor", f"https://127.0.0.1:{self.http}", "--json")
        done = subprocess.run(
            [str(self.bin / "regrow"), *words, *address], env=self.environment | secrets, capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout or "{}")

    def log(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.root.glob("*.log")))

    async def until(self, what: str, condition: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(LIMIT):
                while not (found := await condition()):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                return found
        except TimeoutError:
            pytest.fail(f"did not see {what}\n{self.log()}")

    def family(self) -> list[psutil.Process]:
        """All processes of the site, workers included: they carry its folder in their command line or environment."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if str(self.root) in " ".join(process.cmdline()) or process.environ().get("REGROW_NODE_STATE", "").startswith(
                    str(self.root)
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.pid != os.getpid()]

    def workers(self) -> dict[int, dict[str, str]]:
        """Environment of each worker that runs, as it has told it: a forked process has no own one in /proc."""
        told = {int(path.stem.split("-")[1]): path for path in self.root.glob("environ-*.json")}
        return {pid: json.loads(path.read_text()) for pid, path in told.items() if psutil.pid_exists(pid) and path.read_text()}

    async def stop(self) -> None:
        for process in self.family():
            if process.name() != "etcd":
                process.kill()
        for child in self.children:
            await child.wait()


async def _with_password(etcd: EmbeddedEtcd) -> None:
    """A user with the rights that the deploy page names, then authentication is switched on."""
    async with httpx.AsyncClient(base_url=f"http://{etcd.endpoint}/v3/auth", timeout=LIMIT, trust_env=False) as http:
        for path, body in (
            ("role/add", {"name": "root"}),
            ("user/add", {"name": "root", "password": PASSWORD}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "regrow"}),
            ("role/grant", {"name": "regrow", "perm": {"permType": "READWRITE", "key": "L3JlZ3Jvdy8=", "range_end": "L3JlZ3JvdzA="}}),
            ("user/add", {"name": "regrow", "password": PASSWORD}),
            ("user/grant", {"user": "regrow", "role": "regrow"}),
            ("enable", {}),
        ):
            answer = await http.post(f"/{path}", json=body)
            assert answer.status_code == 200, answer.text


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    await _with_password(etcd)
    root = tmp_path / "site"
    (root / "backup").mkdir(parents=True)
    made = Site(root, etcd.url)
    certificates.make_authority(root / "pki", days=2)
    certificates.issue(root / "pki", "node", "n1", hosts=("127.0.0.1",), days=2)
    (root / "backup" / "supervisor.toml").write_text(made.settings())
    (root / "program.py").write_text(PROGRAM)
    try:
        yield made
    finally:
        await made.stop()
        await etcd.stop()


@pytest.mark.timeout(300)
async def test_the_disk_of_the_supervisor_is_lost(site: Site) -> None:
    assert len(runbook()) == 8, "what is run here is what is written there"
    await site.follow([line.replace("--role operate", "--role admin") for line in runbook()])
    await site.agent()
    (site.root / "job.json").write_text(json.dumps({"job": "j", "argv": [f"{site.root}/program.py"]}))

    async def submitted() -> bool:
        return (await asyncio.to_thread(site.ask, "job", "submit", f"{site.root}/job.json")).get("submitted", False)

    async def works() -> dict[int, dict[str, str]]:
        return site.workers()

    async def generation() -> int:
        shown = await asyncio.to_thread(site.ask, "job", "show", "j")
        return shown.get("generation", 0) if shown.get("state") in ("running", "starting") else 0

    await site.until("the job is taken", submitted)
    before = await site.until("a worker", works)
    number = await site.until("a generation", generation)
    old_token = (site.root / "alice.token").read_text().strip()
    _no_secret_is_anywhere(site, (old_token, PASSWORD))

    os.kill(site.supervisor(), signal.SIGKILL)
    for folder in ("state", "etc"):
        shutil.rmtree(site.root / folder)
    shown = await site.follow(runbook())
    assert "j" in shown
    assert await site.until("the job again", generation) == number
    assert (await works()).keys() == before.keys(), "training did not notice"
    token = (site.root / "alice.token").read_text().strip()
    assert token != old_token
    _no_secret_is_anywhere(site, (token, old_token, PASSWORD))
    refused = await asyncio.to_thread(site.ask, "job", "submit", f"{site.root}/job.json")
    assert "has role operate" in refused["error"]["what"], "the new token has the role that the runbook gives"


def _no_secret_is_anywhere(site: Site, secrets: tuple[str, ...]) -> None:
    """Logs, argument lists, environments of workers, metrics, the journal, what agents and supervisors keep on disk."""
    seen: dict[str, str] = {}
    for process in site.family():
        seen[f"argv of {process.pid}"] = " ".join(process.cmdline())
    workers = site.workers()
    assert workers
    for pid, environment in workers.items():
        assert "REGROW_SPEC" in environment
        assert not [name for name in environment if name.startswith(("REGROW_TOKEN", "REGROW_STORE", "REGROW_AGENT_STORE", "ETCD"))]
        assert "password-file" not in str(environment), f"worker {pid} does not know how to reach the store"
    for path in site.root.rglob("*"):
        if path.is_file() and path.name not in ("password", "alice.token"):
            seen[str(path)] = path.read_bytes().decode(errors="replace")
    tls = certificates_of(site)
    with httpx.Client(verify=tls, trust_env=False, headers={"authorization": f"Bearer {secrets[0]}"}) as client:
        for name in ("metrics", "v1/events", "v1/status", "v1/jobs/j"):
            answer = client.get(f"https://127.0.0.1:{site.http}/{name}")
            assert answer.status_code == 200, answer.text
            seen[name] = answer.text
        seen["agent's metrics"] = client.get(f"http://127.0.0.1:{site.metrics}/metrics").text
    assert len(seen) > 15
    assert any("supervisor.log" in name for name in seen)
    for secret in secrets:
        assert [name for name, text in seen.items() if secret in text] == []


def certificates_of(site: Site) -> Any:
    import ssl

    return ssl.create_default_context(cafile=str(site.root / "etc/tls/ca.pem"))
