"""The table of docs/chaos.md that says where each kind of fault is tested: complete, and true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from regrow.chaos import plan as plans
from regrow.chaos.kinds import KINDS

ROOT = Path(__file__).parents[2]
_HEADING = "## Where each kind is tested"


def _rows() -> dict[str, tuple[str, str]]:
    text = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8").partition(_HEADING)[2].partition("\n## ")[0]
    return {kind: (short, long) for kind, short, long in re.findall(r"(?m)^\| ([a-z_]+) \| (\S+::\S+) \| ([^|]+?) \|$", text)}


@cache
def _tests(file: str) -> dict[str, bool]:
    """Tests of a file by name: whether they belong to the soak."""
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    return {
        node.name: any(ast.unparse(mark).startswith("pytest.mark.soak") for mark in node.decorator_list)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_kind_has_a_row() -> None:
    assert set(_rows()) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_tests_of_a_kind_are_there(kind: str) -> None:
    short, long = _rows()[kind]
    file, _, name = short.partition("::")
    assert _tests(file)[name] is False, f"{short} runs in the soak only"
    if long.startswith("plan "):
        plan = long.removeprefix("plan ")
        assert kind in {fault.kind for fault in plans.load(plan).fault}
        soak = "".join(
            (ROOT / "tests" / part).read_text(encoding="utf-8")
            for part in ("chaos/test_faults.py", "chaos/test_kinds.py", "health/test_chaos.py")
        )
        assert f'"{plan}"' in soak, f"plan {plan} is run by no test"
    else:
        file, _, name = long.partition("::")
        assert _tests(file)[name] is True
