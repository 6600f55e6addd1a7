from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent import preflight
from regrow.agent.health import burnin
from regrow.agent.health.fake_nvml.control import FakeNvml

SMALL = {"memory_bytes": 1 << 20, "matrix": 64}


def _leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "preflight" in path.name]


async def test_a_sound_node_passes(fake: FakeNvml, tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    report = await preflight.run(tmp_path, fake_state=fake.path, expected_gpus=4, peers=[f"127.0.0.1:{port}"], **SMALL)
    server.close()
    assert report.problems == ()
    assert report.ok
    assert {one.name for one in report.checks} == {"gpus", "memory", "matmul", "disk", f"peer 127.0.0.1:{port}"}
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize("fault", ["memory", "matmul", "disk"])
async def test_one_wrong_bit_fails_its_check_and_no_other(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(burnin.FAULT_VARIABLE, fault)
    report = await preflight.run(tmp_path, **SMALL)
    assert not report.ok
    assert [one.name for one in report.checks if not one.ok] == [fault]


async def test_a_check_that_hangs_ends_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(burnin.FAULT_VARIABLE, "hang")
    began = time.monotonic()
    report = await preflight.run(tmp_path, budget_seconds=3.0, **SMALL)
    assert time.monotonic() - began < 30
    assert any("no end within" in problem for problem in report.problems)
    assert psutil.Process().children(recursive=True) == []


async def test_gpu_baseline(fake: FakeNvml, tmp_path: Path) -> None:
    fake.set_device(1, remap_pending=True)
    assert "reset" in str((await preflight.run(tmp_path, fake_state=fake.path, **SMALL)).problems), "J03: a reset is pending"
    fake.set_device(1, remap_pending=False)
    assert (await preflight.run(tmp_path, fake_state=fake.path, expected_gpus=8, **SMALL)).problems == ("gpus: 4 GPUs of 8",)


async def test_a_peer_that_does_not_listen(tmp_path: Path) -> None:
    held = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = held.sockets[0].getsockname()[1]
    held.close()
    await held.wait_closed()
    report = await preflight.run(tmp_path, peers=[f"127.0.0.1:{port}", "nonsense"], **SMALL)
    assert [one.name for one in report.checks if not one.ok] == [f"peer 127.0.0.1:{port}", "peer nonsense"]


@pytest.mark.parametrize("n", [1, 5, 7, 64, 100])
def test_the_known_product_is_right(n: int) -> None:
    a, b, expected = burnin.known_product(n)
    assert np.array_equal(a @ b, expected)


@given(st.integers(2, 20), st.data())
def test_one_bad_node_is_isolated_in_two_rounds(size: int, data: st.DataObject) -> None:
    nodes = [f"n{i:02d}" for i in range(size)]
    bad = data.draw(st.sampled_from(nodes))
    tried: list[preflight.Pair] = []

    def works(pair: preflight.Pair) -> bool:
        tried.append(pair)
        return bad not in pair

    found = preflight.isolate(nodes, works)
    assert found == ((bad,) if size > 3 else found)
    assert set(found) <= {bad}, "nobody is named wrongly"
    assert len(tried) <= size + 3


def test_several_bad_nodes_and_none() -> None:
    nodes = [f"n{i}" for i in range(8)]
    for bad in itertools.combinations(nodes, 2):
        found = preflight.isolate(nodes, lambda pair, bad=bad: not set(bad) & set(pair))
        assert set(found) == set(bad)
    assert preflight.isolate(nodes, lambda pair: True) == ()
    assert preflight.isolate(nodes, lambda pair: False) == (), "when all pairs fail it is not a node"
