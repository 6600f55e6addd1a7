"""What a word about a checkpoint is worth: only a commit makes a restore point."""

from __future__ import annotations

import pytest
from world import running

from regrow.supervisor.core import events as e


@pytest.mark.parametrize("state", ["snapshot", "durable", "pending", "failed", "skipped"])
def test_only_committed_checkpoints_are_restored(state: str) -> None:
    world = running("a", "b", "c", "d", steps=6, commit=2)
    world.tell(
        e.CheckpointMoved(at=world.now, job="j", generation=1, step=5, state=state, directory="/ckpt/step-5-g1")  # type: ignore[arg-type]
    )
    assert list(world.job.checkpoints) == [2]
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.number == 2
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 2


@pytest.mark.parametrize(("on", "suspected"), [(True, True), (False, False)])
def test_a_rank_that_is_not_finite_makes_its_device_a_suspect_unless_that_is_switched_off(on: bool, suspected: bool) -> None:
    world = running("a", "b", "c", "d")
    world.tell(e.AutomationSwitched(at=world.now, on=on))
    for step in range(4, 12):
        world.step(step)
        world.tell(e.NonFiniteSeen(at=world.now, job="j", generation=1, step=step, ranks={5: "gradients"}))
    world.wait(5)
    assert world.job.incidents[-1].kind == "non_finite"
    assert ("GPU-c-1" in world.view.quarantine) == suspected
