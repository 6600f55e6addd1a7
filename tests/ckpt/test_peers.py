"""Peer memory: arenas are copied to a buddy's writer, verified there, and a lost node's shards are restored without the disk."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from ckpt_small import Small
from ckpt_synthetic import shard, spec_of, write_shards

from regrow import certificates, security
from regrow.ckpt import catalog, copy_client, replicate
from regrow.ckpt.arenas import ArenaPool, Contents
from regrow.ckpt.client import WriterControl
from regrow.ckpt.copies import Copies, RefusedError
from regrow.ckpt.copy_server import CopyServer
from regrow.ckpt.manifest import NodeManifest, RankManifest
from regrow.ckpt.peer_wire import Push
from regrow.ckpt.protocol import CELL_BYTES, CopyTo, Listening, Locate, Located, Wanted, WriterStatus
from regrow.ids import MeshShape

LIMIT = 60.0


class Node:
    """The agent's half for one writer: gives orders, answers where others are, keeps what it hears."""

    def __init__(self, name: str, writer: Any, tls: tuple[str, str, str]) -> None:
        self.name, self.writer, self.tls = name, writer, tls
        self.address = ""
        self.listening = asyncio.Event()
        self.status: asyncio.Queue[WriterStatus] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self, where: Callable[[str], str]) -> None:
        self.control = await WriterControl.connect(self.writer.socket, self.name)
        self._task = asyncio.create_task(self._follow(where))

    async def _follow(self, where: Callable[[str], str]) -> None:
        async for message in self.control.messages():
            if isinstance(message, Listening):
                self.address = f"127.0.0.1:{message.port}"
                self.listening.set()
            elif isinstance(message, Locate):
                await self.control.tell(Located(node=message.node, address=where(message.node)))
            elif isinstance(message, WriterStatus):
                self.status.put_nowait(message)

    async def order(self, buddy: str = "", job: str = "small") -> None:
        certificate, key, ca = self.tls
        await self.control.tell(
            CopyTo(
                job=job, generation=1, node=self.name, buddy=buddy, host="127.0.0.1", tls_certificate=certificate, tls_key=key, tls_ca=ca
            )
        )
        await asyncio.wait_for(self.listening.wait(), LIMIT)

    async def until(self, condition: Callable[[WriterStatus], bool]) -> WriterStatus:
        async with asyncio.timeout(LIMIT):
            while not condition(status := await self.status.get()):
                pass
        return status

    async def held(self) -> WriterStatus:
        await self.control.query_status()
        return await asyncio.wait_for(self.status.get(), LIMIT)

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.control.close()


def _certificates(folder: Path, name: str, role: Any = "node") -> tuple[str, str, str]:
    certificate, key = certificates.issue(folder, role, name, hosts=("127.0.0.1",), days=1)
    return str(certificate), str(key), str(folder / certificates.CA_FILE)


@pytest.fixture(params=["plain", "tls"])
def identity(request, tmp_path) -> Callable[[str], tuple[str, str, str]]:
    """Certificate, key and authority of a node; nothing without TLS."""
    if request.param == "plain":
        return lambda _name: ("", "", "")
    folder = tmp_path / "certificates"
    folder.mkdir()
    certificates.make_authority(folder, days=1)
    return lambda name: _certificates(folder, name)


@pytest_asyncio.fixture
async def nodes(make_writer, identity) -> AsyncIterator[dict[str, Node]]:
    """Three nodes with their writers: `alone` is that of the trainer, `n1` its buddy, `n2` another."""
    made: dict[str, Node] = {}
    for name in ("alone", "n1", "n2"):
        made[name] = Node(name, await make_writer(), identity(name))
        await made[name].start(lambda node: made[node].address)
        await made[name].order()
    await made["alone"].order("n1")
    yield made
    for node in made.values():
        await node.close()


async def save(nodes: dict[str, Node], folder: Path, committer: Any) -> Small:
    """A trainer on node `alone` saves step 3 and is gone; its buddy has the copy."""
    small = Small(folder, writer=nodes["alone"].writer.socket)
    small.train(3)
    assert small.state.save(3, 12).outcome == "snapshot"
    await committer.until("complete")
    await nodes["alone"].until(lambda status: status.copies_sent == 1)
    small.state.close()
    return small


def restored_from(folder: Path, writer: Any, generation: int) -> Small:
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    again = Small(folder, generation, entry.restore_point(), seed=9, writer=writer.socket)
    assert again.state.restore() == 3
    return again


def same(one: Small, other: Small) -> None:
    for name, value in one.tensors().items():
        assert torch.equal(value, other.tensors()[name]), name


async def test_a_lost_nodes_shards_come_from_its_buddy(nodes, make_committer, tmp_path):
    """The node is killed and the bytes on disk are damaged: whoever restores, the buddy itself or another node, gets the right ones."""
    folder = tmp_path / "checkpoints"
    spec = msgspec.structs.replace(spec_of(1), job="small")
    committer = await make_committer(spec, [nodes["alone"].writer])
    small = await save(nodes, folder, committer)
    nodes["alone"].writer.kill()
    (file,) = folder.glob("step-*/rank-*.safetensors")
    file.write_bytes(b"\xff" * file.stat().st_size)
    own = await asyncio.to_thread(restored_from, folder, nodes["n1"].writer, 2)
    assert own.state.loaded.bytes_from_memory >= own.state.loaded.bytes_needed > 0
    other = await asyncio.to_thread(restored_from, folder, nodes["n2"].writer, 3)
    assert other.state.loaded.bytes_from_peers >= other.state.loaded.bytes_needed
    for one in (own, other):
        assert one.state.loaded.bytes_read == 0
        same(small, one)
        one.state.close()


@pytest.mark.parametrize("identity", ["plain"], indirect=True)
async def test_memory_of_the_node_that_wrote_it_serves_others(nodes, make_committer, tmp_path):
    """Nothing is lost, a rank has moved: it reads from the node that wrote, not from storage."""
    folder = tmp_path / "checkpoints"
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [nodes["alone"].writer])
    small = await save(nodes, folder, committer)
    nodes["n1"].writer.kill()
    moved = await asyncio.to_thread(restored_from, folder, nodes["n2"].writer, 2)
    assert moved.state.loaded.bytes_from_peers >= moved.state.loaded.bytes_needed
    same(small, moved)
    moved.state.close()


@pytest.mark.parametrize("identity", ["plain"], indirect=True)
async def test_without_peers_the_disk_serves(nodes, make_committer, tmp_path):
    folder = tmp_path / "checkpoints"
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [nodes["alone"].writer])
    small = await save(nodes, folder, committer)
    nodes["alone"].writer.kill()
    nodes["n1"].writer.kill()
    again = await asyncio.to_thread(restored_from, folder, nodes["n2"].writer, 2)
    assert again.state.loaded.bytes_from_peers == 0
    assert again.state.loaded.bytes_read >= again.state.loaded.bytes_needed
    same(small, again)
    again.state.close()


@pytest.mark.parametrize("identity", ["plain"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_buddy_that_hangs_or_dies_holds_nothing_up(nodes, make_committer, tmp_path, number):
    """Saves stay durable, arenas come back, the failed copies are counted."""
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [nodes["alone"].writer])
    nodes["n1"].writer.process.send_signal(number)
    try:
        small = Small(tmp_path / "checkpoints", writer=nodes["alone"].writer.socket, back_pressure="wait", wait_seconds=LIMIT)
        for step in (1, 2):
            small.train(1)
            assert await asyncio.to_thread(small.state.save, step, step * 4), step
            await committer.until("complete")
        status = await nodes["alone"].until(lambda status: status.copies_failed == 2)
        assert status.copies_sent == 0
        assert small.state.counts.snapshots == 2
        small.state.close()
    finally:
        if number == signal.SIGSTOP:
            nodes["n1"].writer.process.send_signal(signal.SIGCONT)


def _manifest(folder: Path) -> tuple[RankManifest, Path]:
    write_shards(folder, 1, spec_of(1), [[shard("model.w", (64, 64), (1,), (0,), 0)]], {"model.w": torch.ones(64, 64).numpy()})
    directory = next(folder.glob("step-*"))
    manifest = next(iter(directory.glob("node-*.json")))
    return msgspec.json.decode(manifest.read_bytes(), type=NodeManifest).ranks[0], directory


def _push(manifest: RankManifest, directory: Path, sequence: int, **changes: Any) -> Push:
    made = Push(
        job="job", epoch=1, generation=2, step=1, node="n0", incarnation="a", sequence=sequence, directory=str(directory), manifest=manifest
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("identity", ["plain"], indirect=True)
async def test_what_may_not_come_in_is_refused_with_its_reason(nodes, tmp_path):
    """Damaged bytes, what came before, an older generation, a writer that was replaced."""
    manifest, directory = _manifest(tmp_path / "source")
    image = memoryview((directory / manifest.file).read_bytes())
    address = nodes["n1"].address

    def send(push: Push, data: memoryview = image) -> str:
        return copy_client.push(address, None, push, data, lambda _peer: None)

    def all_of_them() -> dict[str, str]:
        damaged = memoryview(bytes(image[:-5000]) + b"\x01" + bytes(image[-4999:]))
        elsewhere = tmp_path / "other"
        found = {"damaged": send(_push(manifest, directory, 1), damaged), "good": send(_push(manifest, directory, 2))}
        found["twice"] = send(_push(manifest, directory, 2))
        found["held"] = send(_push(manifest, directory, 3))
        found["older generation"] = send(_push(manifest, elsewhere, 4, generation=1))
        found["new writer"] = send(_push(manifest, elsewhere, 1, incarnation="b", step=2))
        found["old writer"] = send(_push(manifest, tmp_path / "third", 9, step=3))
        return found

    found = await asyncio.to_thread(all_of_them)
    assert found["good"] == found["new writer"] == ""
    assert "not what was sent" in found["damaged"]
    assert "came before" in found["twice"]
    assert "held already" in found["held"]
    assert "generation 1 is over" in found["older generation"]
    assert "came before" in found["old writer"]
    status = await nodes["n1"].held()
    assert (status.copies_held, status.copies_refused) == (2, 5)


async def test_only_nodes_of_the_cluster_are_heard(make_writer, tmp_path):
    """An operator's or supervisor's certificate, another authority's, or none: no copy, no bytes."""
    folder, foreign = tmp_path / "a", tmp_path / "b"
    for one in (folder, foreign):
        one.mkdir()
        certificates.make_authority(one, days=1)
    node = Node("n1", await make_writer(), _certificates(folder, "n1"))
    await node.start(lambda _node: "")
    await node.order()
    manifest, directory = _manifest(tmp_path / "source")
    image = memoryview((directory / manifest.file).read_bytes())
    for tls in (_certificates(folder, "s", "supervisor"), _certificates(foreign, "n0"), None):
        client = security.Tls(security.Files(*tls), "client") if tls else None
        with pytest.raises(OSError, match=r".*"):
            await asyncio.to_thread(copy_client.push, node.address, client, _push(manifest, directory, 1), image, lambda _peer: None)
    other = security.Tls(security.Files(*_certificates(folder, "n7")), "client")
    answer = await asyncio.to_thread(copy_client.push, node.address, other, _push(manifest, directory, 1), image, lambda _peer: None)
    assert "certificate is that of node n7" in answer
    good = security.Tls(security.Files(*_certificates(folder, "n0")), "client")
    assert await asyncio.to_thread(copy_client.push, node.address, good, _push(manifest, directory, 1), image, lambda _peer: None) == ""
    await node.close()


def test_copies_are_bounded(tmp_path):
    """Two of each file; an older generation's go with the second step of the next; no memory is a reason; silence ends it."""
    manifest, directory = _manifest(tmp_path / "source")
    data = (directory / manifest.file).read_bytes()
    free = [1 << 40]
    with ThreadPoolExecutor(1) as threads:
        pool, contents = ArenaPool(), Contents()
        copies = Copies(pool, contents, threads, newest=lambda _job: None, available=lambda: free[0])
        sequence = 0

        def put(step: int, generation: int = 2, node: str = "n0") -> None:
            nonlocal sequence
            sequence += 1
            push = _push(manifest, tmp_path / f"g{generation}-{step}", sequence, step=step, generation=generation, node=node)
            arena = copies.begin(push)
            arena.memory[: len(data)] = data
            copies.finish(push, arena)

        for step in (1, 2, 3):
            put(step)
        assert copies.status().num_files == 2
        assert not contents.of(tmp_path / "g2-1")
        assert contents.of(tmp_path / "g2-3")
        put(4, 3, "n5")
        assert copies.status().num_files == 3
        put(5, 3, "n5")
        assert copies.status().num_files == 2
        assert not contents.of(tmp_path / "g2-3")
        free[0] = 10
        put(6, 3, "n5")  # in the memory of those that went
        assert copies.status().num_files == 2
        with pytest.raises(RefusedError, match="no memory"):
            [put(step, 3, f"n{step}") for step in range(7, 11)]
        held = copies.status().num_files
        assert copies.expire(0.0) == 0
        assert copies.expire(1e12) == held > 0
        assert copies.status().num_files == 0


def test_a_peer_slower_than_storage_is_given_up(tmp_path, monkeypatch):
    """Measured on the way: what is complete by then stays."""
    monkeypatch.setattr(copy_client, "_MEASURE_BYTES", 4 * CELL_BYTES)
    pool, contents = ArenaPool(), Contents()
    server = CopyServer(None, contents)  # type: ignore[arg-type]  # nothing is pushed
    server.start("127.0.0.1", None)
    wanted = []
    for name in ("a", "b"):
        arena = pool.take(4 * CELL_BYTES)
        contents.put(tmp_path / name, arena, 4 * CELL_BYTES)
        wanted.append(
            (Wanted(name=name, size_bytes=4 * CELL_BYTES, holders=("n",), cells=(0, 1, 2, 3)), copy_client.Image.make(4 * CELL_BYTES))
        )
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(copy_client.SlowPeerError):
        copy_client.pull(address, None, str(tmp_path), wanted, floor_bytes_per_second=1e15)
    assert copy_client.pull(address, None, str(tmp_path), wanted, floor_bytes_per_second=0.0) == {"a", "b"}
    server.close()
    for _, image in wanted:
        os.close(image.handle)


@pytest.mark.parametrize(
    ("nodes", "mesh", "node", "first"),
    [
        (("a", "b"), "dp=2", "a", "b"),
        (("a", "b", "c", "d"), "dp=4", "a", "c"),
        (("a", "b", "c", "d"), "dp=2,tp=2,pp=2", "b", "d"),
        (("a", "b", "c", "d"), "dp=1,tp=2,pp=4", "a", "c"),
        (("a", "b", "c", "d", "e", "f"), "dp=3,tp=2,pp=2", "c", "f"),
    ],
)
def test_the_buddy_is_outside_of_the_replica(nodes, mesh, node, first):
    shape = MeshShape.parse(mesh)
    found = replicate.candidates(nodes, shape, node)
    assert found[0].node == first
    assert {one.node for one in found} == set(nodes) - {node}
    per_node = shape.world_size // len(nodes)
    replicas = {
        name: {shape.coordinates(rank)["dp"] for rank in range(at * per_node, (at + 1) * per_node)} for at, name in enumerate(nodes)
    }
    assert all(one.is_outside == (not replicas[one.node] & replicas[node]) for one in found)
    firsts = [replicate.candidates(nodes, shape, each)[0].node for each in nodes]
    assert sorted(firsts) == sorted(nodes)


def test_another_failure_domain_counts_most():
    outside, inside = replicate.Candidate("x", is_outside=True), replicate.Candidate("x", is_outside=False)
    order = [(outside, "r2", "r1"), (inside, "r2", "r1"), (outside, "r1", "r1"), (inside, "r1", "r1")]
    assert [replicate.rank_of(*one) for one in order] == [0, 1, 2, 3]
    assert replicate.rank_of(outside, "", "") == 0
