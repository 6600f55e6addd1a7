"""The support matrix of docs/parallelism-runtime.md says what the tests do, row by row."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "parallelism-runtime.md").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    """A test module as a module."""
    spec = importlib.util.spec_from_file_location(f"matrix_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Cells of the support matrix by row."""
    table = PAGE.split("| row | strategy |")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row for row in cells}


def normal(mesh: str) -> str:
    """ "tp=2,cp=2" and "1x2x1" as one spelling."""
    return mesh.replace("dp=1,", "")


def test_each_row_is_a_test_and_each_test_a_row(rows: dict[str, list[str]]) -> None:
    saving = load("test_saving")
    tests = saving.QUICK | saving.MORE
    assert rows.keys() == tests.keys()
    for name, row in tests.items():
        _, _, mesh, others, digest, memory = rows[name]
        assert normal(mesh) == normal(row.mesh), name
        assert digest == ("compares" if row.replicas else "at rest"), name
        assert memory == ("yes" if (row.replicas if row.memory is None else row.memory) else "disk"), name
        for other in row.others:
            assert normal(other.split()[0]) in others, (name, other)


def test_pairs_and_refusals_name_tests_that_exist() -> None:
    strategies = load("test_strategies")
    known = strategies.QUICK.keys() | strategies.MORE.keys() | {"bf16-tp", "bf16-pp"}
    table = PAGE.split("### Pairs with TP and PP")[1].split("\n\n")[2]
    named = re.findall(r"`([a-z0-9-]+)`", table)
    assert len(named) > 15
    assert set(named) <= known
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in (HERE / "test_strategies.py").read_text(encoding="utf-8"), name
