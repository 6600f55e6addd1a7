"""How most tests of this folder begin."""

from __future__ import annotations

from typing import Any


async def form(cluster: Any, *names: str, **changes: Any) -> None:
    """A supervisor, these agents, and a job that runs on all of them."""
    await cluster.supervisor()
    await cluster.leading()
    await cluster.start(*names)
    await cluster.submit(**changes)
    await cluster.generation(1, num_nodes=len(names))
