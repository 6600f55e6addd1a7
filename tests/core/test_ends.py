"""What a worker's end means when its own words, or its exit code, say more than the signal."""

from __future__ import annotations

import pytest
from world import running


@pytest.mark.parametrize(("counted", "words"), [(True, "sent by somebody"), (False, "out of memory suspected")])
def test_d05_a_kill_is_told_from_out_of_memory(counted: bool, words: str) -> None:
    world = running("a", "b")
    world.exit(3, signal=9, oom_counted=counted)
    world.wait(1)
    assert words in world.job.incidents[-1].text


def test_last_lines_that_speak_of_a_part_are_no_program_error() -> None:
    world = running("a", "b")
    world.exit(
        3, exit_code=1, error="RuntimeError: CUDA error: uncorrectable ECC", said="gpu_mem_uncorrectable", said_action="drain_reset_gpu"
    )
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.cause, incident.rank) == ("infrastructure", 3)
    assert "gpu_mem_uncorrectable" in incident.text


def test_symptoms_alone_are_a_victims() -> None:
    world = running("a", "b")
    world.exit(0, exit_code=1, said="unknown")
    world.exit(3, signal=11)
    world.wait(3)
    assert world.job.incidents[-1].rank == 3


def test_megatrons_exit_codes() -> None:
    world = running("a", "b", "c")
    world.exit(2, exit_code=16)
    world.wait(1)
    assert (world.job.incidents[-1].kind, world.job.incidents[-1].cause) == ("worker_exit", "infrastructure")
    assert not world.view.quarantine

    world = running("a", "b", "c")
    world.exit(2, exit_code=17)
    world.wait(3)
    assert (world.job.incidents[-1].kind, world.job.incidents[-1].rank) == ("sdc", 2)
    assert len(world.view.quarantine) == 1


def test_when_all_leave_with_17_nobody_is_accused() -> None:
    world = running("a", "b", "c")
    for rank in range(6):
        world.exit(rank, exit_code=17)
    world.wait(3)
    assert world.job.incidents[-1].kind == "worker_exit"
    assert not world.view.quarantine
