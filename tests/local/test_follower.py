"""How often whoever follows a job asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from regrow.local import launch
from regrow.local.launch import Follower
from regrow.local.live import LiveView

LIMIT = 30.0


class Api:
    """A job that runs; what happens is in the hands of the test."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"state": "running", "generation": 1, "incidents": []}
        self.num_asked = 0
        self.changed = asyncio.Condition()
        self.happens: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.params: dict[str, Any] = {}

    async def get(self, _path: str) -> dict[str, Any]:
        async with self.changed:
            self.num_asked += 1
            self.changed.notify_all()
        return dict(self.document)

    async def until_asked(self, times: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_asked >= times)

    async def events(self, **params: Any) -> AsyncIterator[dict[str, Any]]:
        self.params = params
        while True:
            yield await self.happens.get()


def follower_of(api: Api, **options: Any) -> Follower:
    return Follower(api, "j", LiveView(title="", plain=True), period_seconds=0.001, **options)  # type: ignore[arg-type]


async def test_a_job_at_rest_is_asked_for_when_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_STEADY_SECONDS", 0.0)
    monkeypatch.setattr(launch, "_PLAIN_SECONDS", 3600.0)
    api = Api()
    following = asyncio.create_task(follower_of(api).follow())
    async with asyncio.timeout(LIMIT):
        await api.until_asked(1)
        await asyncio.sleep(0.05)
        before = api.num_asked
        assert before == 1
        api.document["state"] = "done"
        api.happens.put_nowait({"kind": "end_job"})
        assert (await following)["state"] == "done"
    assert api.num_asked == before + 1
    assert api.params == {"job": "j", "limit": 1, "without": "steps_completed"}


async def test_one_in_which_something_happens_is_asked_for_each_period() -> None:
    api = Api()
    following = asyncio.create_task(follower_of(api).follow())
    async with asyncio.timeout(LIMIT):
        await api.until_asked(20)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_an_error_of_the_stream_is_not_swallowed() -> None:
    class Broken(Api):
        async def events(self, **_params: Any) -> AsyncIterator[dict[str, Any]]:
            raise ValueError("no JSON")
            yield {}

    async with asyncio.timeout(LIMIT):
        with pytest.raises(ValueError, match="no JSON"):
            await follower_of(Broken()).follow()
