"""What silences what, asked of a real Alertmanager with the configuration that `regrow observe` writes."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.observe.conftest import sent, until

from regrow.dashboards import rules, write
from regrow.observe.stack import Plan, Stack

CASES: list[tuple[str, dict[str, str], dict[str, str], bool]] = [
    # what, source alert, target alert, is the target silenced?
    ("cluster's end", {"alertname": "RegrowClusterTeardown"}, {"alertname": "RegrowNodeLost", "node": "n0"}, True),
    ("another cluster's end", {"alertname": "RegrowClusterTeardown", "cluster": "other"}, {"alertname": "RegrowStoreDown"}, False),
    ("the job's end", {"alertname": "RegrowJobTeardown", "job_name": "a"}, {"alertname": "RegrowJobStuck", "job_name": "a"}, True),
    ("another job's end", {"alertname": "RegrowJobTeardown", "job_name": "b"}, {"alertname": "RegrowGoodputLow", "job_name": "a"}, False),
    ("a job's end and a node", {"alertname": "RegrowJobTeardown", "job_name": "b"}, {"alertname": "RegrowNodeSilent", "node": "n1"}, False),
    ("a drained node", {"alertname": "RegrowNodeTeardown", "node": "n2"}, {"alertname": "RegrowNodeUnhealthy", "node": "n2"}, True),
    ("our own kill", {"alertname": "RegrowKillWindow", "node": "n3"}, {"alertname": "RegrowGpuXid", "node": "n3"}, True),
    ("our own kill, disk", {"alertname": "RegrowKillWindow", "node": "n4"}, {"alertname": "RegrowDiskLow", "node": "n4"}, False),
    ("a lost node's GPU", {"alertname": "RegrowNodeLost", "node": "n5"}, {"alertname": "RegrowGpuHot", "node": "n5"}, True),
    ("another node's GPU", {"alertname": "RegrowNodeLost", "node": "n5"}, {"alertname": "RegrowGpuEcc", "node": "n6"}, False),
    ("many nodes", {"alertname": "RegrowManyNodesLost"}, {"alertname": "RegrowNodeLost", "node": "n7"}, True),
    ("no supervisor", {"alertname": "RegrowSupervisorDown"}, {"alertname": "RegrowNoLeader"}, True),
    ("no store", {"alertname": "RegrowStoreDown"}, {"alertname": "RegrowCheckpointStale", "job_name": "a"}, True),
    ("no store, corruption", {"alertname": "RegrowStoreDown"}, {"alertname": "RegrowSilentCorruption", "job_name": "a"}, False),
]
KNOWN = {one.name: one for one in rules.alerts(rules.Pace())}


def labelled(labels: dict[str, str], number: int) -> dict[str, str]:
    """As Prometheus would send it; each case has a cluster of its own."""
    rule = KNOWN[labels["alertname"]]
    return {"cluster": f"c{number}", "severity": rule.severity, "scope": rule.scope, **labels}


async def test_inhibition(tmp_path: Path) -> None:
    async with Stack(Plan(root=tmp_path, find=lambda: None, factor=1 / 30, every_seconds=1)) as stack, httpx.AsyncClient() as client:
        sources = [labelled(source, number) for number, (_, source, _, _) in enumerate(CASES)]
        targets = [labelled(target, number) for number, (_, _, target, _) in enumerate(CASES)]
        answer = await client.post(f"{stack.alertmanager}/api/v2/alerts", json=[{"labels": one} for one in (*sources, *targets)])
        assert answer.status_code == 200, answer.text

        async def told() -> list[dict[str, Any]]:
            found = await stack.get(f"{stack.alertmanager}/api/v2/alerts?active=true&inhibited=true")
            return found if len(found) == 2 * len(CASES) else []

        found = {json.dumps(one["labels"], sort_keys=True): one["status"]["state"] for one in await until(told, "all alerts")}
        assert {what: found[json.dumps(targets[number], sort_keys=True)] for number, (what, *_) in enumerate(CASES)} == {
            what: "suppressed" if silenced else "active" for what, _, _, silenced in CASES
        }
        assert await sent(stack)


@pytest.fixture
def receiver() -> Iterator[tuple[str, queue.Queue[tuple[str, dict[str, Any]]]]]:
    """A webhook: base URL and what it got, as (path, document)."""
    got: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", got
    server.shutdown()
    thread.join()
    server.server_close()


async def test_pages_and_tickets_go_different_ways_and_facts_nowhere(
    tmp_path: Path, receiver: tuple[str, queue.Queue[tuple[str, dict[str, Any]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, got = receiver
    made = write.alertmanager_yaml
    monkeypatch.setattr(write, "alertmanager_yaml", lambda **_: made(wait="1s", group="1s", webhook=url))
    async with Stack(Plan(root=tmp_path, find=lambda: None)) as stack, httpx.AsyncClient() as client:
        alerts = [{"alertname": name} for name in ("RegrowKillWindow", "RegrowJobFailed", "RegrowDiskLow")]
        await client.post(
            f"{stack.alertmanager}/api/v2/alerts", json=[{"labels": labelled(one, number)} for number, one in enumerate(alerts)]
        )

        async def both() -> bool:
            return got.qsize() >= 2

        await until(both, "two notifications")
        found = {path: [one["labels"]["alertname"] for one in body["alerts"]] for path, body in (got.get(), got.get())}
        assert found == {"/page": ["RegrowJobFailed"], "/ticket": ["RegrowDiskLow"]}
        assert got.empty()
