"""Saves that become no checkpoint are a fact that the job's document shows, until there is a checkpoint again."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, running

from regrow.local.job import closing_line
from regrow.local.launch import Follower, lost_its_last_save, settled
from regrow.supervisor.core import events as e
from regrow.supervisor.documents import job_document


def void(world: World, step: int, reason: str = "disk full") -> None:
    world.tell(e.CheckpointMoved(at=world.now, job="j", generation=1, step=step, state="failed", reason=reason))


def shown(world: World) -> dict[str, Any]:
    return job_document(world.view, world.job, world.now)["checkpoint"]


def test_void_saves_count_until_the_next_checkpoint() -> None:
    world = running("a", steps=6, commit=2)
    assert shown(world)["void"] is None
    void(world, 3)
    void(world, 4, "read-only")
    assert shown(world)["void"] == {"count": 2, "step": 4, "reason": "read-only"}
    world.commit(2, evidence=("read_back",))
    assert shown(world)["void"]["count"] == 2, "evidence for an older one is no new checkpoint"
    world.commit(5)
    assert shown(world)["void"] is None


class Notes:
    """What a user of `regrow run` reads."""

    is_table = False

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        self.texts.append(text)


def test_the_user_is_told_once_for_each_power_of_ten_and_at_the_end() -> None:
    view: Any = Notes()
    api: Any = None
    follower = Follower(api, "j", view)
    for count in (*range(1, 31), 0, 1, 2):
        told = {"count": count, "step": count + 10, "reason": "disk full"} if count else None
        follower.document = {"job": "j", "state": "done", "step": 50, "checkpoint": {"step": 1, "void": told}}
        follower._tell_void_saves()
    assert [text.split(" saves")[0] for text in view.texts] == [f"no checkpoint: {count}" for count in (2, 20, 2)]
    assert closing_line(follower.document) == "job j: done at step 50; its last save, of step 12, is no checkpoint: disk full"


def ended(saved: int | None, void_at: int | None = None) -> dict[str, Any]:
    told = {"count": 1, "step": void_at, "reason": "disk full"} if void_at is not None else None
    return {"job": "j", "state": "done", "step": 50, "checkpoint": {"step": saved, "void": told}}


@pytest.mark.parametrize(
    ("documents", "lost"),
    [
        ([ended(None)], False),  # it saves nothing
        ([ended(50)], False),
        ([ended(40), ended(40), ended(50)], False),  # durable, and committed a moment later
        ([ended(40), ended(40, 50)], True),
        ([ended(40, 45), ended(50)], False),
        ([ended(None, 50)], True),
        ([{"job": "j", "state": "done", "step": 50, "checkpoint": None}], False),
    ],
)
async def test_a_job_whose_last_state_is_no_checkpoint_is_degraded(documents: list[dict[str, Any]], lost: bool) -> None:
    class Api:
        async def get(self, _path: str) -> dict[str, Any]:
            return answers.pop(0)

    answers = documents[1:]
    api: Any = Api()
    last = await settled(api, documents[0], 60.0)
    assert lost_its_last_save(last) is lost
    assert not answers, "it waited for the word"


async def test_without_word_the_end_is_not_held_up_for_ever() -> None:
    class Api:
        async def get(self, _path: str) -> dict[str, Any]:
            return ended(40)

    api: Any = Api()
    assert await settled(api, ended(40), 0.3) == ended(40)
