"""A software bill of materials (CycloneDX 1.5, JSON) of this Python environment, to standard output. Standard library only.

    python deploy/docker/sbom.py --extras security,postgres      # regrow and what these extras bring, as far as it is installed
    python deploy/docker/sbom.py --all --system                  # everything that is installed here, Debian packages too (in an image)

The same environment gives the same bytes: no time, and a serial number that follows from the content.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = "regrow"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:regrow:sbom")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_LONGEST_LICENSE = 80


def normal(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(found: metadata.Distribution, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """(name, extras) of what a package asks for; other markers than extras are left to what is installed."""
    asked: list[tuple[str, frozenset[str]]] = []
    for line in found.requires or ():
        of = _EXTRA.findall(line)
        match = _REQUIREMENT.match(line)
        if match is None or (of and not extras.intersection(map(normal, of))):
            continue
        asked.append((normal(match[1]), frozenset(normal(word) for word in (match[2] or "").split(",") if word.strip())))
    return asked


def closure(installed: dict[str, metadata.Distribution], extras: frozenset[str]) -> dict[str, set[str]]:
    """{package: packages it asks for} from `ROOT` on, as far as they are installed."""
    edges: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(ROOT, extras)]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen or name not in installed:
            continue
        seen.add((name, wanted))
        asked = [one for one in requirements(installed[name], wanted) if one[0] in installed]
        edges.setdefault(name, set()).update(one for one, _ in asked)
        waiting += asked
    return edges


def licenses(found: metadata.Distribution) -> list[dict[str, Any]]:
    """What a package says of its licence, when it is short enough to be a name."""
    expression, text = (str((found.metadata.get_all(name) or [""])[0]) for name in ("License-Expression", "License"))
    if expression:
        return [{"expression": expression}]
    if text and len(text) <= _LONGEST_LICENSE and "\n" not in text:
        return [{"license": {"name": text}}]
    named = [line.rpartition(" :: ")[2] for line in found.metadata.get_all("Classifier") or () if line.startswith("License :: ")]
    return [{"license": {"name": name}} for name in named]


def python_component(found: metadata.Distribution) -> dict[str, Any]:
    """One package from PyPI, or ours."""
    name = normal(found.metadata["Name"])
    reference = f"pkg:pypi/{name}@{quote(found.version, safe='')}"
    made: dict[str, Any] = {"type": "library", "bom-ref": reference, "name": name, "version": found.version, "purl": reference}
    said = licenses(found)
    return made | ({"licenses": said} if said else {})


def system_components() -> list[dict[str, Any]]:
    """Packages of a Debian base."""
    tool = shutil.which("dpkg-query")
    if tool is None:
        return []
    text = subprocess.run(
        [tool, "-W", "-f", "${Package}\t${Version}\t${Architecture}\n"], capture_output=True, text=True, check=True
    ).stdout
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    found = re.search(r'^ID="?([^"\n]+)', release, re.MULTILINE)
    vendor = found[1] if found is not None else "debian"
    made: list[dict[str, Any]] = []
    for line in sorted(text.splitlines()):
        name, version, architecture = line.split("\t")
        reference = f"pkg:deb/{vendor}/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}"
        made.append({"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference})
    return made


def document(extras: frozenset[str], *, everything: bool, system: bool) -> dict[str, Any]:
    """The whole list."""
    installed = {normal(found.metadata["Name"]): found for found in metadata.distributions()}
    if ROOT not in installed:
        raise SystemExit(f"{ROOT} is not installed for {sys.executable}: run this with the Python of its environment")
    edges = closure(installed, extras)
    if everything:
        for name, found in installed.items():
            edges.setdefault(name, {one for one, _ in requirements(found, frozenset()) if one in installed})
    components = {name: python_component(installed[name]) for name in sorted(edges)}
    root = components.pop(ROOT)
    reference = {name: part["bom-ref"] for name, part in [*components.items(), (ROOT, root)]}
    parts = [*components.values(), *(system_components() if system else [])]
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root | {"type": "application"}},
        "components": parts,
        "dependencies": [
            {"ref": reference[name], "dependsOn": sorted(reference[one] for one in asked if one != name)}
            for name, asked in sorted(edges.items())
        ],
    }
    return body | {"serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(body, sort_keys=True))}"}


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="extras of the package, comma separated")
    parser.add_argument("--all", action="store_true", help="everything that is installed, not only what the package asks for")
    parser.add_argument("--system", action="store_true", help="Debian packages, too")
    options = parser.parse_args()
    extras = frozenset(normal(word) for word in options.extras.split(",") if word.strip())
    json.dump(document(extras, everything=options.all, system=options.system), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
