"""The backup and restore drill on a real etcd of three members with TLS: all disks are lost, and the keys come back from the file."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.deploy.slurm import free_ports

from regrow import certificates
from regrow.store.base import StoreError
from regrow.store.open import open_store

SCRIPTS = Path(__file__).parents[2] / "deploy" / "etcd"
LIMIT = 60.0
NAMES = ("m1", "m2", "m3")


class Trio:
    """Three members on this machine, TLS between them and to clients, client certificates asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self.pki = root, root / "pki"
        certificates.make_authority(self.pki, days=2)
        certificates.issue(self.pki, "etcd", "member", hosts=("127.0.0.1",), days=2)
        certificates.issue(self.pki, "client", "root", hosts=(), days=2)
        certificates.issue(self.pki, "client", "daemon", hosts=(), days=2)
        ports = free_ports(6)
        self.clients = dict(zip(NAMES, ports[:3], strict=True))
        self.peers = {name: f"https://127.0.0.1:{port}" for name, port in zip(NAMES, ports[3:], strict=True)}
        self.cluster = ",".join(f"{name}={url}" for name, url in self.peers.items())
        self._members: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """As the daemons have it: any certificate of the authority, and a user."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.clients.values())
        pair = f"cacert={self.pki}/ca.pem&cert={self.pki}/daemon.pem&key={self.pki}/daemon.key"
        return f"etcds://{hosts}?{pair}&user=regrow&password-file={self.pki}/regrow.password"

    @property
    def environment(self) -> dict[str, str]:
        tls = {"ETCDCTL_CACERT": "ca.pem", "ETCDCTL_CERT": "root.pem", "ETCDCTL_KEY": "root.key"}
        return {
            **os.environ,
            **{name: str(self.pki / file) for name, file in tls.items()},
            "ETCDCTL_ENDPOINTS": f"https://127.0.0.1:{self.clients['m1']}",
        }

    def folder(self, name: str) -> Path:
        return self.root / f"data-{name}"

    def start(self) -> None:
        etcd = shutil.which("etcd")
        assert etcd is not None, "etcd is missing: tools/system.sh installs it"
        pair = (f"{self.pki}/member.pem", f"{self.pki}/member.key", f"{self.pki}/ca.pem")
        for name in NAMES:
            client = f"https://127.0.0.1:{self.clients[name]}"
            log = (self.root / f"{name}.log").open("ab")
            command = [
                *(etcd, "--name", name, "--data-dir", str(self.folder(name)), "--initial-cluster", self.cluster),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", self.peers[name], "--initial-advertise-peer-urls", self.peers[name]),
                *("--client-cert-auth", "--cert-file", pair[0], "--key-file", pair[1], "--trusted-ca-file", pair[2]),
                *("--peer-client-cert-auth", "--peer-cert-file", pair[0], "--peer-key-file", pair[1], "--peer-trusted-ca-file", pair[2]),
                *("--heartbeat-interval", "300", "--election-timeout", "3000"),
            ]
            self._members.append(subprocess.Popen(command, stdout=log, stderr=log))
            log.close()

    def until_it_leads(self) -> None:
        """etcdctl waits for no leader by itself."""
        health = ["etcdctl", "endpoint", "health", "--dial-timeout=1s"]
        end = time.monotonic() + LIMIT
        while subprocess.run(health, env=self.environment, capture_output=True, check=False, cwd=self.pki).returncode:
            assert time.monotonic() < end, "no leader"

    def kill(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()
        self._members.clear()

    def with_users(self) -> None:
        """The page's commands, in the folder with the certificates."""
        page = (SCRIPTS.parents[1] / "docs" / "deploy-etcd.md").read_text(encoding="utf-8")
        section = page.split("## A user and a password besides")[1].split("\n## ")[0]
        commands = [line[4:] for line in section.splitlines() if line.startswith("    ")]
        assert len(commands) == 9
        script = "set -eu\n" + "\n".join(commands).replace("https://10.0.0.1:2379", f"https://127.0.0.1:{self.clients['m1']}")
        done = subprocess.run(["bash", "-c", script], cwd=self.pki, capture_output=True, text=True, check=False, timeout=LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr


async def read(trio: Trio, prefix: str) -> dict[str, bytes]:
    store = open_store(trio.url, timeout=LIMIT)
    try:
        return {item.key: item.value for item in await store.get_prefix(prefix)}
    finally:
        await store.close()


async def test_all_disks_are_lost_and_the_keys_come_back(tmp_path: Path) -> None:
    assert shutil.which("etcdctl"), "etcdctl is missing: tools/system.sh installs it"
    trio = Trio(tmp_path)
    trio.start()
    try:
        await asyncio.to_thread(trio.until_it_leads)
        await asyncio.to_thread(trio.with_users)
        store = open_store(trio.url, timeout=LIMIT)
        with pytest.raises(StoreError, match="permission denied"):
            await store.put("/other/key", b"")
        for step in range(20):
            await store.put(f"/regrow/t/jobs/j/checkpoints/{step}", str(step).encode())
        await store.close()
        before = await read(trio, "/regrow/")
        assert len(before) == 20

        def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(SCRIPTS / script), *arguments], env=trio.environment, capture_output=True, text=True, check=False, timeout=LIMIT
            )

        file = tmp_path / "etcd.snapshot"
        saved = await asyncio.to_thread(run, "backup.sh", str(file))
        assert saved.returncode == 0, saved.stderr
        assert '"totalKey"' in saved.stdout
        trio.kill()
        refused = await asyncio.to_thread(run, "restore.sh", str(file), str(trio.folder("m1")), "m1", trio.peers["m1"], trio.cluster)
        assert refused.returncode == 2, "a data folder that is there is never overwritten"
        for name in NAMES:
            shutil.rmtree(trio.folder(name))
            restored = await asyncio.to_thread(run, "restore.sh", str(file), str(trio.folder(name)), name, trio.peers[name], trio.cluster)
            assert restored.returncode == 0, restored.stderr
        trio.start()
        assert await read(trio, "/regrow/") == before
    finally:
        trio.kill()


def test_a_failed_backup_leaves_the_older_one(tmp_path: Path) -> None:
    file = tmp_path / "etcd.snapshot"
    file.write_bytes(b"yesterday")
    environment = {**os.environ, "ETCDCTL_ENDPOINTS": f"http://127.0.0.1:{free_ports(1)[0]}", "ETCDCTL_DIAL_TIMEOUT": "1s"}
    done = subprocess.run(
        [str(SCRIPTS / "backup.sh"), str(file)], env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode != 0
    assert file.read_bytes() == b"yesterday"
    assert [path.name for path in tmp_path.iterdir()] == ["etcd.snapshot"]
