"""What users get: the wheel and the source archive hold the whole package and nothing else; the site builds without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("supervisor", "agent", "ckpt", "parallel", "dashboards")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def tracked(suffixes: tuple[str, ...]) -> set[str]:
    """Files of the package under version control, as they are named in the wheel."""
    listed = subprocess.run(["git", "ls-files", "src/regrow", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return {f"regrow/{name.removeprefix('src/regrow/')}" for name in listed if name.endswith(suffixes)}


def test_the_wheel_has_every_module_and_data_file_and_no_tests(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    wanted = tracked((".py", ".toml", ".html", ".css", ".js", "py.typed"))
    assert len(wanted) > 200
    assert wanted <= names
    assert not [name for name in names if not name.startswith(("regrow/", "regrow-"))]


def test_the_wheel_runs_where_nothing_else_is(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = "import regrow, sys; from regrow.cli.app import build; build(); print(regrow.__file__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "regrow/__init__.py"), "False"]


def test_the_source_archive_builds_the_same_package(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", *(f"{part}/__init__.py" for part in PARTS)} <= names
    assert not [name for name in names if name.startswith(("tests/", "runs/", ".venv/"))]


def names(requirements: list[str]) -> set[str]:
    """Names of packages, as registries compare them."""
    found = (re.match(r"[A-Za-z0-9._-]+", line.strip()) for line in requirements if line.strip() and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match is not None}


def test_what_is_installed_for_development_is_what_is_declared_and_has_a_locked_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = names(project["dependency-groups"]["dev"])
    assert names((ROOT / "tools" / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()) == declared - {"grpcio-tools"}
    extras = project["project"]["optional-dependencies"]
    needed = declared | names([*project["project"]["dependencies"], *extras["train"], *extras["security"], *extras["objects"]])
    locked = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert needed - names(locked) - {"grpcio-tools"} == set()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+", line) for line in locked if not line.startswith("#"))


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train_state" in (tmp_path / "api.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="(https?://[^"]+)"|<link[^>]+stylesheet[^>]+href="(https?://[^"]+)"', page.read_text()
        )
        assert loaded == [], page.name
