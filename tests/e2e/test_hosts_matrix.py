"""A host loses power, and in each phase of the recovery something else breaks, too. Hosts are network namespaces. Root only, soak."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import network
from tests.e2e.hosts import Site
from tests.e2e.outcome import assert_no_orphan, assert_one_generation_publishes, num_commits, restored, true_frontier

TOY = Path(__file__).with_name("toy.py")
PHASES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step")
_CUT_SECONDS = 4.0
"""How long a link is cut, or a process stopped: twice the leader's lease, four times the limit of silence."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "never"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A job on four hosts whose start is slow enough to be hit in each phase."""
    made = Site(tmp_path_factory.mktemp("m"), agents=4)
    try:
        made.start()
        made.submit(TOY, "--steps", "1000000", "--log", str(made.folder / "log"), "--pause", "0.03", "--slow", "0.5")
        yield made
    finally:
        made.stop()
    assert made.left() == []


def kill_leader(site: Site) -> Callable[[], None]:
    leader = site.leader()
    site.kill(f"supervisor {leader}")
    return lambda: site.start_supervisor(leader)


def stop_leader(site: Site) -> Callable[[], None]:
    leader = site.leader()
    site.signal(f"supervisor {leader}", signal.SIGSTOP)
    time.sleep(_CUT_SECONDS)  # the fault itself: a process that stands still for so long
    site.signal(f"supervisor {leader}", signal.SIGCONT)
    return lambda: None


def kill_etcd(site: Site) -> Callable[[], None]:
    leader = site.leader()
    site.kill(f"etcd {leader}")
    return lambda: site.start_etcd(leader)


def kill_agent(site: Site) -> Callable[[], None]:
    site.kill("agent a1")
    site.start_agent("a1")
    return lambda: None


def lose_another(site: Site) -> Callable[[], None]:
    site.lose_power("a1")
    return lambda: _power_on(site, "a1")


def cut_leader(site: Site) -> Callable[[], None]:
    leader = site.leader()
    return _cut(site, leader)


def cut_agent(site: Site) -> Callable[[], None]:
    return _cut(site, "a1")


def cut_agent_one_way(site: Site) -> Callable[[], None]:
    return _cut(site, "a1", leaving=False)


def cut_data(site: Site) -> Callable[[], None]:
    return _cut(site, "a1", [network.DATA])


def _cut(site: Site, host: str, nets: list[str] | None = None, **how: bool) -> Callable[[], None]:
    site.network.cut(host, nets or [network.MANAGEMENT], **how)
    time.sleep(_CUT_SECONDS)  # the fault itself
    site.network.heal(host)
    return lambda: None


def _power_on(site: Site, host: str) -> None:
    site.network.heal(host)
    site.start_agent(host)


def _cleared(site: Site, host: str) -> bool:
    """The leader took it; on a busy machine there may be none at that instant."""
    leader = site.leader()
    return bool(leader and site.ask(leader, f"/v1/nodes/{host}/clear", b"{}"))


FAULTS: tuple[Callable[[Site], Callable[[], None]], ...] = (
    kill_leader,
    stop_leader,
    kill_etcd,
    kill_agent,
    lose_another,
    cut_leader,
    cut_agent,
    cut_agent_one_way,
    cut_data,
)


def reached(site: Site, phase: str, known: set[str]) -> Callable[[], Any]:
    """True when the recovery is in this phase or beyond it."""

    def look() -> bool:
        job = site.job()
        if phase == "decide":
            return any(node["node"] == "a3" and node["state"] in ("suspect", "gone") for node in job.get("nodes", []))
        fresh = [item for item in job.get("incidents", []) if item["at"] not in known]
        return bool(fresh) and (not fresh[-1]["phase"] or PHASES.index(fresh[-1]["phase"]) >= PHASES.index(phase))

    return look


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("phase", PHASES)
def test_second_fault_in_a_phase_of_a_recovery(site: Site, phase: str, fault: Callable[[Site], Callable[[], None]]) -> None:
    log = site.folder / "log"
    site.until(
        lambda: len(site.connected()) == 4 and (job := site.job()).get("world_size") == 4 and job["state"] == "running", "full strength"
    )
    old = site.current()
    site.until(lambda: site.committed() > old["frontier"], "a checkpoint of this generation")
    now = site.current()
    known, before, committed = {item["at"] for item in now["incidents"]}, now["generation"], now["checkpoint"]["step"]
    site.lose_power("a3")
    if phase != "detect":
        site.until(reached(site, phase, known), f"phase {phase}")
    repair = fault(site)

    def recovered() -> dict[str, Any]:
        job = site.job()
        fresh = [item for item in job.get("incidents", []) if item["at"] not in known]
        over = job.get("state") == "running" and job["generation"] > before and bool(fresh) and all(item["closed"] for item in fresh)
        return job if over else {}

    job = site.until(recovered, "a recovery")
    taken_up = restored(log, before)
    assert all(number >= committed for number in taken_up.values()), (committed, taken_up)
    last = [item for item in job["incidents"] if item["at"] not in known][-1]
    assert last["lost_steps"] == last["frontier"] - last["restored_step"]
    assert last["frontier"] <= true_frontier(log, job["generation"])
    assert_no_orphan(site)
    assert_one_generation_publishes(site)
    repair()
    _power_on(site, "a3")
    for host in ("a1", "a3"):  # whoever was put out for what it had: these hosts are mended
        site.until(lambda host=host: _cleared(site, host), f"{host} is cleared")


def test_b05_a_dead_node_is_found_while_etcd_restarts_again_and_again(site: Site) -> None:
    """Leases start anew with each election of etcd: the dead node's key lives on, and the node is found by its connection all the same."""
    site.until(
        lambda: len(site.connected()) == 4 and (job := site.job()).get("world_size") == 4 and job["state"] == "running", "full strength"
    )
    known = {item["at"] for item in site.current()["incidents"]}
    began = time.monotonic()
    site.lose_power("a3")
    for host in site.control:
        site.kill(f"etcd {host}")
        site.start_etcd(host)
        time.sleep(2.0)  # the rhythm of the case: half of a lease
    site.until(lambda: any(item["at"] not in known and item["node"] == "a3" for item in site.job().get("incidents", [])), "its loss")
    assert time.monotonic() - began < 40.0
    site.until(lambda: site.job().get("state") == "running", "training")
    _power_on(site, "a3")


def test_b07_ten_minutes_of_beats_do_not_fill_the_store(site: Site) -> None:
    """The quota of etcd is 2 GB; what is stored at the end is what a job needs, whatever time has passed."""
    site.until(lambda: site.job().get("state") == "running", "training")
    end = time.monotonic() + 600.0
    begin, commits = site.revision(), num_commits(site)
    site.until(lambda: time.monotonic() > end, "ten minutes", limit_seconds=700.0)
    assert site.revision() - begin <= 4 * (num_commits(site) - commits) + 200
