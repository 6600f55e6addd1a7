"""Which place a restore asks first: what was measured decides, and what was not is tried."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from regrow.ckpt.arenas import ArenaPool, Contents
from regrow.ckpt.peers import Peers
from regrow.ckpt.protocol import CELL_BYTES, Gather, Locate, Wanted
from regrow.ckpt.rates import FORGET_SECONDS, MIN_BYTES, STORAGE, Rates, order


@pytest.mark.parametrize(
    ("holders", "known", "asked"),
    [
        (("own", "buddy"), {}, ("own", "buddy")),
        (("own", "buddy"), {STORAGE: 2e9}, ("own", "buddy")),
        (("own", "buddy"), {STORAGE: 2e9, "own": 3e9}, ("buddy", "own")),
        (("own", "buddy"), {"own": 1e9, "buddy": 3e9}, ("buddy", "own")),
        (("own", "buddy"), {STORAGE: 2e9, "own": 1e9, "buddy": 3e9}, ("buddy",)),
        (("own", "buddy"), {STORAGE: 2e9, "own": 1e9}, ("buddy",)),
        (("own", "buddy"), {STORAGE: 4e9, "own": 1e9, "buddy": 3e9}, ()),
        (("own", "buddy"), {STORAGE: 1e9, "own": 1e9, "buddy": 1e9}, ("own", "buddy")),
        (("own",), {STORAGE: 1e8, "own": 1e9, "other": 9e9}, ("own",)),
        ((), {STORAGE: 1e9}, ()),
    ],
)
def test_order(holders, known, asked):
    """Slower than storage: left out, for storage is read where no node gave a part."""
    assert order(holders, known) == asked


def test_rates_are_of_the_newest_transfer_and_are_forgotten():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.note("n1", MIN_BYTES - 1, 0.001)
    rates.note("n1", 1e9, 0.0)
    assert rates.known() == {}, "too short to tell"
    rates.note("n1", 1e9, 2.0)
    now[0] = FORGET_SECONDS
    rates.note("n2", 1e9, 1.0)
    assert rates.known() == {"n1": 5e8, "n2": 1e9}
    rates.note("n2", 4e9, 1.0)
    now[0] += 1.0
    assert rates.known() == {"n2": 4e9}, "a node that was slow an hour ago is tried again"


@pytest.mark.parametrize(
    ("known", "asked"),
    [({}, ["n0", "n1"]), ({"n0": 1e9}, ["n1", "n0"]), ({"n0": 1e9, STORAGE: 2e9}, ["n1"]), ({"n0": 1e9, "n1": 1e9, STORAGE: 2e9}, [])],
)
async def test_a_restore_asks_in_this_order(known, asked, tmp_path):
    """Nobody answers, so all that are asked are seen; what they did not give is left out, and storage is read for it."""
    found: list[str] = []

    def ask(question: Locate) -> bool:
        found.append(question.node)
        return False

    with ThreadPoolExecutor(1) as threads:
        peers = Peers(ArenaPool(), Contents(), threads=threads, checksums=threads, newest=lambda _job: None, ask=ask)
        for place, rate in known.items():
            peers.rates.note(place, rate, 1.0)
        wanted = Wanted(name="rank-00000.safetensors", size_bytes=CELL_BYTES, holders=("n0", "n1"), cells=(0,))
        message = Gather(directory=str(tmp_path), files=(wanted,))
        assert await peers.gather(message, storage_bytes_per_second=0.0) == []
        assert found == asked
        found.clear()
        nowhere_else = Gather(directory=str(tmp_path), files=(wanted,), stored=False)
        assert await peers.gather(nowhere_else, storage_bytes_per_second=9e9) == []
        assert sorted(found) == ["n0", "n1"], "what is on no storage is asked for wherever it may be"
        peers._gathered[message.directory].users -= 1
        found.clear()
        shared = peers._gathered[message.directory]
        shared.images[wanted.name].cells.update(wanted.cells)  # another rank of this node has fetched it
        for node in wanted.holders:
            peers.rates.note(node, 1 << 30, 100.0)
        peers.rates.note("", 1 << 30, 0.1)
        assert [name for name, _ in await peers.gather(message, storage_bytes_per_second=0.0)] == [wanted.name]
        assert found == []
        peers._gathered[message.directory].users -= 1
        peers._gathered[message.directory].users -= 1
        peers._free(message.directory)
