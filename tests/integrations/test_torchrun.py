"""`torchrun --rdzv-backend=regrow` as users call it: real etcd, supervisor, agent, torchrun processes and gloo."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from regrow.errors import ConfigurationError
from regrow.integrations.rendezvous import RegrowRendezvous, handler
from regrow.store.embedded import EmbeddedEtcd

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/ddp_plain.py"
GATED = Path(__file__).with_name("gated.py")


class Site:
    """etcd and a supervisor, and torchrun launches on them."""

    def __init__(self, etcd: EmbeddedEtcd, processes: Any) -> None:
        self.etcd = etcd
        self.processes = processes

    async def lead(self) -> None:
        state = str(self.processes.root / "supervisor")
        await self.processes.start("supervisor", "regrow", "supervisor", "--cluster", "test", "--store", self.etcd.url, "--state", state)
        await self.processes.until(lambda: "leading epoch=" in self.processes.log("supervisor"), "a supervisor leads")

    async def torchrun(self, name: str, *script: str, settle: float = 1.0) -> None:
        conf = f"cluster=test,node={name},ttl=2,settle={settle}"
        await self.processes.start(
            name,
            *("torch.distributed.run", "--rdzv-backend=regrow", f"--rdzv-endpoint={self.etcd.url}", "--rdzv-id=fit"),
            *(f"--rdzv-conf={conf}", "--nnodes=1:2", "--nproc-per-node=1", "--local-addr=127.0.0.1", "--max-restarts=3", *script),
        )


@pytest.fixture
async def site(etcd: EmbeddedEtcd, processes: Any) -> Site:
    made = Site(etcd, processes)
    await made.lead()
    return made


def worlds(text: str) -> list[int]:
    """World sizes in the order of their first steps."""
    found = [int(text) for text in re.findall(r"world=(\d+)", text)]
    return [size for place, size in enumerate(found) if place == 0 or found[place - 1] != size]


async def test_a_launch_survives_the_loss_of_a_node(site: Site, tmp_path: Path) -> None:
    script = (str(EXAMPLE), "--steps", "600", "--checkpoint", str(tmp_path / "model.pt"))
    await site.torchrun("a", *script, settle=4.0)  # more than two starts can differ by: else the first would be done alone
    await site.torchrun("b", *script, settle=4.0)
    log = site.processes.log
    await site.processes.until(lambda: "world=2" in log("a") + log("b"), "two train")
    site.processes.lose_node("b")
    assert await site.processes.ends("a") == 0
    assert worlds(log("b") + log("a"))[-2:] == [2, 1]
    steps = [int(step) for step in re.findall(r"step=(\d+) ", log("b") + log("a"))]
    assert steps[-1] == 600
    assert len(steps) == len(set(steps))  # it went on from the file that the last step left


async def test_a_drained_node_goes_and_a_spare_takes_its_place(site: Site, tmp_path: Path) -> None:
    gate = tmp_path / "enough"
    processes = site.processes
    await processes.start(
        "agent",
        *("regrow", "agent", "--node", "b", "--cluster", "test", "--store", site.etcd.url, "--state", str(tmp_path / "agent")),
        *("--no-warm", "--health-seconds", "0", "--preflight-seconds", "0", "--kernel-log", ""),
    )
    await site.torchrun("a", str(GATED), str(gate))
    await site.torchrun("b", str(GATED), str(gate))
    for name in "ab":
        await processes.until(lambda name=name: "world=2" in processes.log(name), f"{name} trains")
    await site.torchrun("c", str(GATED), str(gate))
    drain = ("regrow", "node", "drain", "b", "--store", site.etcd.url, "--cluster", "test")
    await processes.start("drain", *drain)
    assert await processes.ends("drain") == 0, processes.log("drain")
    assert await processes.ends("b") == 1
    assert "node b: the node may not train: drained by" in processes.log("b")
    await processes.until(lambda: "world=2" in processes.log("c"), "the spare trains")
    gate.touch()
    assert (await processes.ends("a"), await processes.ends("c")) == (0, 0)
    await site.torchrun("d", str(GATED), str(gate))
    assert await processes.ends("d") == 1
    assert "the launch is over" in processes.log("d")


def parameters(endpoint: str, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters(backend="regrow", endpoint=endpoint, run_id="fit", min_nodes=1, max_nodes=2, **conf)


def test_torchrun_finds_it() -> None:
    assert entry_points(group="torchrun.handlers")["regrow"].load() is handler
    assert handler() is RegrowRendezvous


@pytest.mark.parametrize(
    ("endpoint", "conf", "message"),
    [
        ("", {}, "no store is given"),
        ("http://127.0.0.1:8123", {}, "does not hand out its store"),
        ("memory://x", {}, "not shared between nodes"),
        ("127.0.0.1:2379", {"tll": "3"}, "unknown key 'tll'"),
        ("127.0.0.1:2379", {"ttl": "soon"}, "ttl=soon is not a number of seconds"),
        ("127.0.0.1:2379", {"settle": "-1"}, "settle=-1 is not a number of seconds"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(endpoint: str, conf: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RegrowRendezvous(parameters(endpoint, **conf))


async def test_without_a_supervisor_torchrun_says_so(etcd: EmbeddedEtcd) -> None:
    made = RegrowRendezvous(parameters(etcd.endpoint, timeout=900))
    with pytest.raises(RendezvousConnectionError, match="no supervisor leads cluster 'local'"):
        await asyncio.to_thread(made.next_rendezvous)
    assert await asyncio.to_thread(made.shutdown)
    assert not made.is_closed()


def test_torch_is_not_loaded_by_the_rules() -> None:
    code = "import sys, regrow.integrations.rounds, regrow.integrations.membership; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
