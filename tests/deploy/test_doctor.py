"""`regrow doctor` says what the forms of deployment need, and needs none of it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from regrow.cli import checks
from regrow.cli import checks_deploy as deploy
from regrow.store.embedded import EmbeddedEtcd


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return tmp_path


def test_tools_that_are_missing_are_named_and_harmless(only: Path) -> None:
    tool(only, "sbatch", "")
    found = checks.cluster_tools()
    assert found.status == "note"
    assert found.detail == "found: Slurm jobs; not here: etcd backup (etcdctl), container images (buildah)"
    assert checks.exit_code([found]) == 0


def test_certificates_can_be_made_here() -> None:
    assert checks.certificates().status == "ok"


def test_slurm_is_asked_for_its_controller(only: Path) -> None:
    assert (deploy.slurm().status, deploy.slurm().detail) == ("note", "scontrol is not here")
    tool(only, "scontrol", "echo 'Slurmctld(primary) at head is UP'")
    assert deploy.slurm() == checks.Check("slurm", "ok", "Slurmctld(primary) at head is UP")
    tool(only, "scontrol", "echo 'Slurmctld(primary) at head is DOWN'; exit 1")
    assert deploy.slurm().detail == "no controller answers"


def test_kubernetes_is_a_pod_or_what_kubectl_reaches(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deploy.kubernetes().detail == "kubectl is not here"
    tool(only, "kubectl", "echo 'clientVersion: {}'; echo refused >&2; exit 1")
    assert deploy.kubernetes().detail == "kubectl is here and reaches no cluster"
    tool(only, "kubectl", "echo 'serverVersion: {}'")
    assert deploy.kubernetes().status == "ok"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert deploy.kubernetes().detail == "this is a pod, without a token of the API"


def test_what_observing_needs_is_named(only: Path) -> None:
    found = deploy.observing()
    assert (found.status, found.hint.startswith("apt-get install prometheus")) == ("note", True)
    tool(only, "prometheus", "")
    assert "alertmanager is not installed" in deploy.observing().detail
    tool(only, "prometheus-alertmanager", "")
    assert deploy.observing().detail == "alertmanager, prometheus; no container runtime for Grafana (docker or podman)"
    tool(only, "podman", "")
    assert deploy.observing() == checks.Check("observing", "ok", "alertmanager, prometheus; podman could start Grafana")


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        monkeypatch.setattr(deploy, "PORTS", {port: "beats"})
        assert deploy.known_ports().detail == f"in use here: {port} (beats)"
    assert deploy.known_ports().status == "ok"


def test_direct_io_is_tried_where_checkpoints_would_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deploy.direct_io(tmp_path).status in ("ok", "note")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert deploy.direct_io(tmp_path / "nowhere").status == "warn"
    real = os.open

    def refuses(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuses)
    assert "page cache" in deploy.direct_io(tmp_path).detail


async def test_the_store_is_asked_when_it_is_named(tmp_path: Path) -> None:
    import asyncio

    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    found = await asyncio.to_thread(deploy.store, f"{etcd.url}?user=x&password-file=/nowhere")
    assert found.status == "missing"
    found = await asyncio.to_thread(deploy.store, etcd.url)
    assert (found.status, found.detail) == ("ok", f"{etcd.url} answers; it does not have keys of Regrow")
    await etcd.stop()
    assert deploy.store("").status == "note"
