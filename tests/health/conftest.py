from __future__ import annotations

from pathlib import Path

import pytest

from regrow.agent.health.fake_nvml.control import FakeNvml


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """A fake driver with four healthy GPUs."""
    made = FakeNvml(tmp_path / "nvml.json")
    made.write(devices=4)
    return made
