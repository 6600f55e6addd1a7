"""The table of cases in the documents names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = {"F01", "F03", "F05", "F07", "F09", "F11", "F13", "G01", "G03", "G05", "G07", "G09", "G11", "H01", "H03", "H05", "K03"}


def test_the_table_names_tests_that_exist():
    text = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:[FGHK]\d\d(?:, )?)+) \|[^|]+\| `([^`]+)` \|$", text, re.MULTILINE)
    assert {case for cases, _ in rows for case in cases.split(", ")} == CASES
    for _, where in rows:
        path, _, name = where.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), where
