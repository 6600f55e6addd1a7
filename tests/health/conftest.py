from __future__ import annotations

import csv
from pathlib import Path

import pytest
from regrow.agent.health.fake_nvml.control import FakeNvml

DATA = Path(__file__).parent / "data"


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """A fake driver with four healthy GPUs."""
    made = FakeNvml(tmp_path / "nvml.json")
    made.write(devices=4)
    return made


def rows(name: str) -> list[dict[str, str]]:
    """Rows of a tab-separated table in tests/health/data."""
    with (DATA / name).open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))
