"""The bill of materials: by CycloneDX's own schema, complete, and the same bytes each time."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

TOOL = Path(__file__).parents[2] / "deploy" / "docker" / "sbom.py"


@functools.cache
def printed(*words: str) -> str:
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, check=True, timeout=60).stdout


def purls(document: dict[str, Any]) -> set[str]:
    return {PackageURL.from_string(part["purl"]).name for part in document["components"]}


@pytest.mark.parametrize("words", [("--extras", "train,security"), ("--all", "--system")])
def test_it_is_valid(words: tuple[str, ...]) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(printed(*words)) is None


def test_it_is_the_same_bytes_each_time() -> None:
    assert printed.__wrapped__("--extras", "security") == printed("--extras", "security")


def test_it_lists_what_the_extras_bring_with_the_versions_that_are_installed() -> None:
    supervisor, agent = json.loads(printed("--extras", "security")), json.loads(printed("--extras", "train,security"))
    for name in ("msgspec", "cryptography", "cffi", "grpcio", "anyio"):
        (part,) = (part for part in supervisor["components"] if part["name"] == name)
        assert part["version"] == metadata.version(name)
    assert {"torch", "safetensors"} & purls(supervisor) == set()
    assert {"torch", "safetensors", "sympy"} <= purls(agent)
    assert "pytest" not in purls(agent), "what only development needs is not delivered"
    assert "cryptography" not in purls(json.loads(printed()))
    edges = {one["ref"].partition("@")[0]: [to.partition("@")[0] for to in one["dependsOn"]] for one in agent["dependencies"]}
    assert {"pkg:pypi/torch", "pkg:pypi/msgspec"} <= set(edges["pkg:pypi/regrow"])
    assert "pkg:pypi/cffi" in edges["pkg:pypi/cryptography"]


def test_everything_of_a_debian_is_in_it() -> None:
    listed = subprocess.run(["dpkg-query", "-W", "-f", "${Package}\n"], capture_output=True, text=True, check=True).stdout.split()
    document = json.loads(printed("--all", "--system"))
    assert set(listed) | {"pytest"} <= purls(document)
