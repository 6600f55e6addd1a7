"""Small clusters for the simulator's tests."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.supervisor.sim import constants, models
from regrow.supervisor.sim.models import Workload
from regrow.supervisor.sim.setup import Setup, check


class Small:
    """Makes setups."""

    def __call__(self, **changes: Any) -> tuple[Setup, Workload]:
        setup = check(Setup(**({"constants": constants.load(), "nodes": 64, "days": 2.0} | changes)))
        return setup, models.build(setup)


@pytest.fixture
def small() -> Small:
    return Small()
