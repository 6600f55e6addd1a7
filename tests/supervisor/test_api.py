"""REST, server-sent events, metrics and commands."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
from scene import form
from stub_agent import eventually

from regrow.supervisor.core import events as e

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Cluster


def regrow(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "regrow", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


async def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    import asyncio

    return await asyncio.to_thread(regrow, *arguments)


async def test_commands_speak_to_the_supervisor(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    url = f"http://{cluster.leader.http_address}"
    shown = await call("job", "show", "train", "--json", "--supervisor", url)
    document = json.loads(shown.stdout)
    assert {"job", "state", "generation", "step", "mesh", "nodes", "incidents", "checkpoint", "goodput"} <= set(document)
    listed = json.loads((await call("node", "ls", "--json", "--supervisor", url)).stdout)
    assert [node["node"] for node in listed["nodes"]] == ["n0", "n1"]
    where = await call("job", "where", "train", "--rank", "3", "--supervisor", url)
    assert where.stdout.startswith("rank 3: n1 local 1 GPU-n1-1")
    events = await call("events", "--supervisor", url)
    assert "record_generation job=train" in events.stdout
    unknown = await call("job", "show", "nope", "--json", "--supervisor", url)
    assert unknown.returncode == 2
    assert "train" in json.loads(unknown.stdout)["error"]["hint"]
    switched = await call("automation", "off", "--supervisor", url)
    assert switched.stdout == "automation is off\n"
    await eventually(lambda: not cluster.leader.term.view.automation, "switched off")
    stopped = await call("job", "stop", "train", "--supervisor", url)
    assert stopped.returncode == 0
    await eventually(lambda: cluster.job().outcome, "stopped")
    await eventually(lambda: not cluster.agents["n0"].live, "workers are gone")


async def test_events_follow_with_ids(cluster: Cluster) -> None:
    await form(cluster, "n0")
    async with (
        httpx.AsyncClient(base_url=f"http://{cluster.leader.http_address}", trust_env=False) as client,
        client.stream("GET", "/v1/events", params={"follow": 1, "after": 2}) as response,
    ):
        await cluster.step(1)
        ids: list[int] = []
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                ids.append(int(line[3:]))
            if line.startswith("data:") and json.loads(line[5:])["kind"] == "steps_completed":
                break
    assert ids == sorted(set(ids))
    assert ids[0] == 3


async def test_kinds_of_events_can_be_left_out(cluster: Cluster) -> None:
    await form(cluster, "n0")
    async with (
        httpx.AsyncClient(base_url=f"http://{cluster.leader.http_address}", trust_env=False) as client,
        client.stream("GET", "/v1/events", params={"follow": 1, "without": "steps_completed,node_joined"}) as response,
    ):
        await cluster.step(1)
        cluster.leader.post(e.AutomationSwitched(at=1.0, on=True, by="test"))
        kinds: list[str] = []
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                kinds.append(json.loads(line[5:])["kind"])
                if kinds[-1] == "automation_switched":
                    break
    assert "record_generation" in kinds
    assert not {"steps_completed", "node_joined"} & set(kinds)
    assert "steps_completed" in {entry.kind for entry in cluster.leader.journal.since(0)}


async def test_what_would_change_nothing_says_so(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    url = f"http://{cluster.leader.http_address}"
    store, key = cluster.leader.store, cluster.leader.keys.job("train", "command")
    assert store is not None
    await store.put(key, b'{"command":"pause","by":"me"}')  # its answer was lost: the core was not told
    running = await call("job", "resume", "train", "--supervisor", url)
    assert (running.returncode, running.stdout) == (0, "train is running already\n")
    written = await store.get(key)
    assert written is not None
    assert msgspec.json.decode(written.value)["command"] == "run", "else the next leader would pause a healthy job"
    nowhere = await call("job", "where", "train", "--rank", "9", "--supervisor", url)
    assert nowhere.returncode == 2
    assert "its ranks are 0 to 3" in nowhere.stderr
    never = await call("job", "where", "train", "--generation", "7", "--supervisor", url)
    assert never.returncode == 2
    assert "no ranks are known of generation 7" in never.stderr
    assert "the current one is 1" in never.stderr
    nothing = await call("events", "--job", "nope", "--supervisor", url)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "no event of a job 'nope'\n")


BAD_REQUESTS = (
    ("POST", "/v1/jobs", b"not json", 400),
    ("POST", "/v1/jobs", b'{"job":"Bad Name","argv":["x"]}', 400),
    ("POST", "/v1/jobs", b'{"job":"x","argv":[]}', 400),
    ("POST", "/v1/jobs", b'{"job":"x","argv":["a"],"min_nodes":3,"max_nodes":2}', 400),
    ("POST", "/v1/jobs", b'{"job":"x","argv":["a"],"global_batch":7,"micro_batch":2}', 400),
    ("POST", "/v1/jobs", b'{"job":"x","argv":["a"],"mesh":{"dp":64}}', 400),
    ("POST", "/v1/jobs/train/explode", b"", 404),
    ("POST", "/v1/nodes/n0/explode", b"", 404),
    ("POST", "/v1/nodes/n77/cordon", b"", 404),
    ("GET", "/v1/jobs/train/where?rank=x", b"", 400),
    ("GET", "/v1/jobs/train/where?rank=99", b"", 404),
    ("GET", "/v1/jobs/nope", b"", 404),
    ("GET", "/nothing", b"", 404),
    ("DELETE", "/v1/jobs/train", b"", 405),
)


async def test_bad_requests_are_told_why(cluster: Cluster) -> None:
    await form(cluster, "n0")
    async with httpx.AsyncClient(base_url=f"http://{cluster.leader.http_address}", trust_env=False) as client:
        for method, path, body, status in BAD_REQUESTS:
            response = await client.request(method, path, content=body)
            assert response.status_code == status, (method, path, response.text)
            assert response.json()["error"]["what"]
    assert cluster.job().outcome is None


async def test_running_job_is_not_replaced_by_another_of_its_name(cluster: Cluster) -> None:
    from regrow.errors import ConfigurationError

    await form(cluster, "n0")
    await cluster.step(1)
    with pytest.raises(ConfigurationError, match="runs already with another specification"):
        await cluster.submit(seed=7)
    await cluster.submit()


async def test_series_of_what_is_gone_are_removed(cluster: Cluster) -> None:
    from regrow.supervisor.core.view import View
    from regrow.supervisor.metrics import Metrics

    await form(cluster, "n0", "n1")
    await cluster.step(1)
    metrics = Metrics()
    metrics.view(cluster.leader.term.view, cluster.leader.now())
    text = metrics.exposition().decode()
    assert 'regrow_node_healthy{node="n0"} 1.0' in text
    assert "regrow_ettr_ratio{" in text
    metrics.view(View(), cluster.leader.now())
    text = metrics.exposition().decode()
    assert 'node="n0"' not in text
    assert 'job_name="train"' not in text


def test_configuration_errors_come_before_any_effect(tmp_path: Path) -> None:
    state = tmp_path / "state"
    cases = {
        ("--state", str(state)): "no store is given",
        ("--store", "memory://"): "no state folder",
        ("--store", "nonsense://x", "--state", str(state)): "unknown scheme",
        ("--store", "memory://", "--state", str(state), "--ttl", "1"): "least lease of 2 s",
        ("--store", "memory://", "--state", str(state), "--beat", "nowhere"): "not HOST:PORT",
    }
    for arguments, message in cases.items():
        result = regrow("supervisor", *arguments, REGROW_STORE="")
        assert result.returncode == 2, result.stderr
        assert message in result.stderr


def test_port_in_use_is_said(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in ("--beat", "--http"):
            result = regrow("supervisor", "--store", "memory://", "--state", str(tmp_path), flag, f"127.0.0.1:{port}")
            assert result.returncode == 2
            assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_explain_says_what_won(tmp_path: Path) -> None:
    file = tmp_path / "regrow.toml"
    file.write_text('[supervisor]\nttl = 9\ncluster = "blue"\n[policy]\nhang_factor = 4.0\n')
    result = regrow(
        "supervisor",
        "--config",
        str(file),
        "--store",
        "memory://",
        "--state",
        "x",
        "--ttl",
        "7",
        "--explain",
        "--json",
        REGROW_SUPERVISOR_CLUSTER="red",
    )
    found = {item["field"]: (item["value"], item["source"]) for item in json.loads(result.stdout)["settings"]}
    assert found["ttl"] == (7.0, "flag --ttl")
    assert found["cluster"] == ("red", "environment REGROW_SUPERVISOR_CLUSTER")
    assert found["hang_factor"] == (4.0, f"file {file}")
    file.write_text("[policy]\nhang_facto = 4.0\n")
    wrong = regrow("supervisor", "--config", str(file), "--store", "memory://", "--state", "x", "--explain")
    assert wrong.returncode == 2
    assert "did you mean 'hang_factor'?" in wrong.stderr
