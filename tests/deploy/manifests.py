"""The Kubernetes forms as kustomize renders them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"


@cache
def render(form: str) -> tuple[dict[str, Any], ...]:
    tool = shutil.which("kubectl")
    assert tool is not None, "kubectl is missing: tools/system.sh installs it"
    done = subprocess.run([tool, "kustomize", str(ROOT / form)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(form: str, *kinds: str) -> list[dict[str, Any]]:
    return [item for item in render(form) if item["kind"] in kinds]


def jobs(form: str) -> dict[str, dict[str, Any]]:
    """The Jobs that a JobSet makes, by name."""
    return {one["name"]: one["template"] for item in of_kind(form, "JobSet") for one in item["spec"]["replicatedJobs"]}


def templates(form: str) -> list[dict[str, Any]]:
    found = [item["spec"]["template"] for item in of_kind(form, "Deployment", "DaemonSet", "StatefulSet")]
    return found + [job["spec"]["template"] for job in jobs(form).values()]


def pods(form: str) -> list[dict[str, Any]]:
    return [item["spec"] for item in templates(form)]
