"""Three control hosts and three agents, each in a network namespace of its own: links are cut, hosts go away. Root only.

The full matrix, a second fault in each phase of a recovery, is test_hosts_matrix.py (soak).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import network
from tests.e2e.hosts import Site
from tests.e2e.outcome import assert_like_twin, assert_no_orphan, assert_one_generation_publishes, num_commits, restored, true_frontier

TOY = Path(__file__).with_name("toy.py")

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "never"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A job that trains on three hosts and has committed a checkpoint."""
    made = Site(tmp_path_factory.mktemp("s"), agents=3)
    try:
        made.start()
        made.submit(TOY, "--steps", "1000000", "--log", str(made.folder / "log"), "--pause", "0.03", "--slow", "0.2")
        made.until(lambda: whole(made) and made.committed(), "three hosts and a committed checkpoint")
        yield made
    finally:
        made.stop()
    assert made.left() == []


def whole(site: Site) -> bool:
    """All three hosts train. (On a busy machine one may have been late for the first start.)"""
    job = site.job()
    return job.get("world_size") == 3 and job["state"] == "running"


def step(site: Site) -> int:
    """Completed steps, as the leader knows."""
    return site.current().get("step") or 0


def state_of(site: Site, node: str) -> str:
    """Of a node in the job's document."""
    return next((item["state"] for item in site.job().get("nodes", []) if item["node"] == node), "")


@pytest.mark.parametrize(("arriving", "leaving"), [(True, True), (True, False), (False, True)], ids=["both ways", "arriving", "leaving"])
def test_management_network_cut_while_training_is_healthy(site: Site, arriving: bool, leaving: bool) -> None:
    """No word of the node is heard and steps complete all the same: suspect, and nothing happens to it."""
    workers, incidents = site.workers(), site.current()["incidents"]
    assert len(workers) == 3
    site.network.cut("a1", [network.MANAGEMENT], arriving=arriving, leaving=leaving)
    if leaving:
        site.until(lambda: state_of(site, "a1") in ("suspect", "gone"), "a suspect")
    begin = step(site)
    site.until(lambda: step(site) >= begin + 40, "forty steps")
    site.network.heal("a1")
    site.until(lambda: len(site.connected()) == 3 and state_of(site, "a1") == "member", "heard again")
    assert site.workers() == workers
    assert site.current()["incidents"] == incidents


def test_b07_beats_are_no_writes(site: Site) -> None:
    """The store's history grows with commits, not with beats: five a second of each node change nothing in it."""
    first = step(site)
    commits, begin = num_commits(site), site.revision()
    site.until(lambda: step(site) >= first + 100, "a hundred steps")
    written = site.revision() - begin
    assert written <= 4 * (num_commits(site) - commits) + 10, f"{written} changes of the store in a hundred steps"


def test_leaders_host_cut_off(site: Site) -> None:
    """Supervisor and etcd member of one host alone: another leads, the old one knows that it does not, no worker is touched."""
    workers, old, incidents = site.workers(), site.leader(), site.current()["incidents"]
    epoch = site.get("/v1/status")["epoch"]
    site.network.cut(old)
    site.until(lambda: site.leader() not in ("", old), "another leader")
    site.until(lambda: site.ask(old, "/healthz").get("leading") is False, "the old one stepped down")
    site.until(lambda: len(site.connected()) == 3, "all agents at the new one")
    begin = step(site)
    site.until(lambda: step(site) > begin + 5, "steps")
    site.network.heal(old)
    assert site.get("/v1/status")["epoch"] > epoch
    assert site.workers() == workers
    assert [item["id"] for item in site.current()["incidents"]] == [item["id"] for item in incidents]


def test_data_network_of_one_host_cut(site: Site) -> None:
    """All members hang alike and are heard all the same. What they say of each other names the one that nobody reaches: the job goes
    on without it, and with it again when the others reach it: nobody has to say so."""
    site.until(lambda: whole(site), "three hosts")
    known = {item["id"] for item in site.current()["incidents"]}
    site.network.cut("a1", [network.DATA])
    site.until(lambda: any(item["recovered"] for item in site.job().get("incidents", []) if item["id"] not in known), "a recovery")
    job = site.current()
    assert [node["node"] for node in job["nodes"] if node["ranks"]] == ["a0", "a2"]
    (incident,) = (item for item in job["incidents"] if item["id"] not in known)
    assert (incident["kind"], incident["node"], incident["cause"]) == ("unreachable", "a1", "infrastructure")
    assert incident["text"] == "2 of 2 peers cannot reach a1 on the data network"
    site.network.heal("a1")
    site.until(lambda: whole(site), "three hosts again")
    assert_no_orphan(site)


def test_host_loses_power_and_the_leader_dies_while_it_is_replaced(site: Site, twin: dict[int, float]) -> None:
    """The state goes on from the newest committed checkpoint or later, one generation publishes, nothing is left of the old one."""
    log = site.folder / "log"
    before, known = site.current()["generation"], {item["id"] for item in site.current()["incidents"]}
    committed = site.committed()
    site.lose_power("a2")

    def fresh() -> list[dict[str, Any]]:
        return [item for item in site.job().get("incidents", []) if item["id"] not in known]

    site.until(lambda: any(item["phase"] not in ("", "detect") for item in fresh()), "a decision")
    site.kill(f"supervisor {site.leader()}")
    site.until(lambda: any(item["recovered"] for item in fresh()), "a recovery")
    job = site.current()
    assert [node["node"] for node in job["nodes"] if node["ranks"]] == ["a0", "a1"]
    (incident,) = fresh()
    assert incident["kind"] == "node_lost"
    taken_up = restored(log, before)
    assert all(number >= committed for number in taken_up.values()), (committed, taken_up)
    assert incident["restored_step"] == min(taken_up[job["generation"]], incident["frontier"]), "the next leader is told what was taken up"
    assert incident["lost_steps"] == incident["frontier"] - incident["restored_step"]
    assert incident["frontier"] <= true_frontier(log, job["generation"])
    assert_no_orphan(site)
    assert_one_generation_publishes(site)
    assert_like_twin(log, twin)
