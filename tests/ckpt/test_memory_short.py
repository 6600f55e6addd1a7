"""A node without the memory for arenas and copies: what is left out, in which order, and who is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import budget
from regrow.ckpt.arenas import Arena, ArenaPool
from regrow.ckpt.budget import Budget, NoMemoryError
from regrow.ckpt.client import WriterControl
from regrow.ckpt.leasing import lease
from regrow.ckpt.protocol import WriterStatus
from regrow.errors import ConfigurationError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit_mib", "copies_mib", "arenas", "given_up", "problem"),
    [
        (100, 30, 2, 0, ""),
        (49, 30, 1, 0, "no memory for a second arena, so a save is skipped"),  # a copy does not go for a second arena
        (30, 25, 2, 1, ""),
        (15, 12, 1, 1, "no memory for a second arena"),  # in the memory of the copy that went
        (9, 0, 0, 0, "no memory for arenas: 0.0105 GB wanted"),
    ],
)
def test_what_is_left_out(limit_mib, copies_mib, arenas, given_up, problem):
    """Arenas of 10 MiB: copies of other nodes go for the first one, the second is left out, and then there is no save."""
    pool = ArenaPool(Budget(limit_bytes=limit_mib * MIB))
    copies = [pool.take(copies_mib * MIB)] if copies_mib else []
    gone: list[Arena] = []

    def make_room(num_bytes: int) -> int:
        assert num_bytes == 10 * MIB
        gone.extend(copies)
        for one in copies:
            pool.give(one)
        copies.clear()
        return len(gone)

    leased = lease(pool, lambda num_bytes: make_room(num_bytes) if copies else 0, 10 * MIB, lambda _arena: True)
    assert len(leased.arenas) == arenas
    assert len(gone) == given_up
    assert leased.problem.startswith(problem)
    assert bool(leased.problem) == (arenas < 2)
    if problem:
        assert "--peer-memory" in leased.problem, "what to try"
    assert pool.total_bytes <= limit_mib * MIB
    for one in (*leased.arenas, *copies):
        one.close()


def test_several_at_once_do_not_take_the_same_bytes():
    """Eight threads want 10 each of 35: three get them, though each looked before any was there."""
    taken, ready = [0], threading.Barrier(8)
    lock = threading.Lock()
    one = Budget(available=lambda: 35 - taken[0])

    def take(_number: int) -> bool:
        ready.wait(10)
        try:
            with one.taking(10, lambda: 0):
                with lock:
                    taken[0] += 10
                return True
        except NoMemoryError:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 3


def test_a_limit_that_cannot_be_read_is_told(monkeypatch):
    monkeypatch.setenv(budget.LIMIT_VARIABLE, "4 GB")
    with pytest.raises(ConfigurationError, match="no number of bytes"):
        ArenaPool()


def test_the_page_cache_of_a_control_group_is_memory_to_spare(tmp_path):
    """A container of 1,000 MB in which 900 are in use, 700 of them pages of files: 800 are there, less 5 % of 1,000."""
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    (group / "memory.max").write_text("1000000000\n")
    (group / "memory.current").write_text("900000000\n")
    (group / "memory.stat").write_text("anon 100000000\nshmem 100000000\nfile 800000000\ninactive_file 400000000\nactive_file 300000000\n")
    assert budget.spare_memory(tmp_path) == 750_000_000
    (group / "memory.max").write_text("max\n")
    assert budget.spare_memory(tmp_path) == 32_000_000 * 1024 - 3_200_000 * 1024


async def status_of(writer) -> WriterStatus:
    control = await WriterControl.connect(writer.socket, "n0")
    try:
        await control.query_status()
        async for message in control.messages():
            if isinstance(message, WriterStatus):
                return message
        raise AssertionError("the writer is gone")
    finally:
        await control.close()


@pytest.mark.parametrize("arenas", [1, 0])
async def test_training_goes_on_and_somebody_is_told(arenas, make_writer, make_committer, tmp_path, monkeypatch, caplog):
    """With memory for one arena saves still become checkpoints; with none each save fails with the reason. Both are counted."""
    large = torch.nn.Linear(1024, 1024)
    monkeypatch.setenv(budget.LIMIT_VARIABLE, str(6 * MIB if arenas else MIB))
    writer = await make_writer()
    monkeypatch.delenv(budget.LIMIT_VARIABLE)
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path, writer=writer.socket, extra={"large": large})
    for step in (1, 2):
        small.train(1)
        report = small.state.save(step, step)
        if arenas:
            assert report.outcome == "snapshot", report
            await committer.until("complete")
        else:
            assert report.outcome == "failed"
            assert "no memory for arenas" in report.reason
            assert "GB to spare" in report.reason
    short = (await status_of(writer)).memory_short
    assert short == {"save": 0 if arenas else 2, "second_arena": arenas, "copy": 0}
    if arenas:
        assert "no memory for a second arena" in caplog.text
    small.state.close()
