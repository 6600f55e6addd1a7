"""`regrow doctor` says what the forms of deployment need, and needs none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrow.cli import checks


def test_tools_that_are_missing_are_named_and_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.cluster_tools()
    assert found.status == "note"
    assert found.detail == "found: Slurm; not here: systemd (systemctl), Kubernetes (kubectl), etcd backup (etcdctl)"
    assert checks.exit_code([found]) == 0


def test_certificates_can_be_made_here() -> None:
    assert checks.certificates().status == "ok"
