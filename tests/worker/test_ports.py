"""Case C01 inside the worker: a store that cannot be reached is named with its address and port."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.agent.worker import groups
from regrow.errors import OperationalError


def test_c01_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "RENDEZVOUS_SECONDS", 0.5)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # somebody has the port and does not serve
        address = f"127.0.0.1:{held.getsockname()[1]}"
        environment: Any = SimpleNamespace(
            world_size=2, rank=1, generation=3, node="n0", master_address=address, agent_store=True, spec=SimpleNamespace(restart_count=0)
        )
        with pytest.raises(OperationalError) as found:
            groups.Groups(environment, torch.device("cpu")).rendezvous()
    for word in (address, "rank 1 on n0", "generation 3"):
        assert word in str(found.value)
