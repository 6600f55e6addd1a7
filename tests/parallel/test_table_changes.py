"""The plan table with the change that leads to each row: small losses drop replicas, a new mesh must pay for its transition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from regrow.parallel import inventory, planner, shape, survive
from regrow.parallel.planner import Request
from regrow.parallel.survive import Recovery

Regrow = Callable[..., tuple[int, Any, str]]
MODEL = shape.make(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
KINDS = ("tp", "pp", "cp", "ep")


def asked(nodes: int = 40) -> Request:
    return Request(model=MODEL, inventory=inventory.uniform(nodes, 8), global_batch=256)


def test_each_row_has_a_change_that_fits_and_is_never_slower_to_pay_off() -> None:
    request = asked()
    rows = planner.plan_table(request)
    recovery = Recovery(repair_seconds=3600.0)
    before = rows[0].plan
    assert before is not None
    for row, change in zip(rows, survive.changes(request, rows, recovery), strict=True):
        if row.plan is None:
            assert change is None
            continue
        assert change is not None
        same = all(getattr(change.plan.mesh, axis) == getattr(before.mesh, axis) for axis in KINDS)
        assert (change.kind == "new mesh") == (not same)
        assert change.plan.gpus_used + change.plan.gpus_idle == row.gpus
        assert change.plan.usage.total <= request.inventory.gpu_memory_bytes
        assert sum(change.plan.micro_batches) * change.plan.micro_batch == request.global_batch
        assert change.plan.step_seconds >= row.plan.step_seconds * (1 - 1e-9)


def test_a_long_repair_pays_for_a_new_mesh_and_a_short_one_does_not() -> None:
    request = asked()
    rows = planner.plan_table(request)

    def new(hours: float, reads: float) -> int:
        recovery = Recovery(repair_seconds=3600.0 * hours, restore_bytes_per_second=reads)
        return sum(1 for change in survive.changes(request, rows, recovery) if change is not None and change.kind == "new mesh")

    quick, slow = new(1000.0, 5e9), new(0.05, 0.05e9)
    assert slow < quick


def test_the_command_tells_it(regrow: Regrow) -> None:
    words = ("plan", "--layers", 16, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048, "--nodes", 6, "--global-batch", 96)
    code, document, _ = regrow(*words, "--table")
    assert code == 0
    table = document["table"]
    assert table["rows"][0]["change"]["kind"] == "none"
    assert table["rows"][1]["change"]["lost_seconds"] > 0
    assert "a repair in 1 h" in table["verdict"]
    assert regrow(*words, "--table", "--repair-hours", -1)[0] == 2


@pytest.mark.parametrize("nodes", [1])
def test_one_node_has_nothing_to_shrink(regrow: Regrow, nodes: int) -> None:
    _, document, _ = regrow("plan", "--params", 1e9, "--nodes", nodes, "--table")
    assert document["table"]["verdict"] == "there is nothing to shrink"
