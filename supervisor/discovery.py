"""HTTP service discovery: what Prometheus is to scrape, read from the store, so that a supervisor that stands by answers as well."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow import wire
from regrow.store.base import Store
from regrow.supervisor.keys import Keys


async def targets(store: Store, keys: Keys, cluster: str, *, own: str) -> list[dict[str, Any]]:
    """Target groups: the supervisors that are known here (the leader and this one), and every agent whose lease is alive.

    A node's group carries its name as `instance`, so that `up` names it. Agents that serve no metrics are left out.

    Raises:
        StoreError: the store does not answer; Prometheus then keeps the list that it has.
    """
    leader = await store.get(keys.leader)
    nodes = await store.get_prefix(keys.nodes)
    supervisors = {own}
    if leader is not None:
        supervisors.add(msgspec.json.decode(leader.value, type=wire.LeaderRecord).http_address)
    groups: list[dict[str, Any]] = [{"targets": sorted(supervisors), "labels": {"cluster": cluster, "role": "supervisor"}}]
    for item in nodes:
        record = msgspec.json.decode(item.value, type=wire.NodeRecord)
        if record.metrics_address:
            labels = {"cluster": cluster, "role": "agent", "instance": record.node}
            groups.append({"targets": [record.metrics_address], "labels": labels})
    return groups
