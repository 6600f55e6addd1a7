"""The shim with torch imported: warm gloo workers on a store of the shim, and the check that forking was safe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.agent.harness import Harness, until

from regrow.agent import protocol
from regrow.agent.roster import children_of, process_state

Make = Callable[..., Harness]

GLOO = """
import os, sys, time
warm = "torch" in sys.modules
import torch, torch.distributed as dist
loaded = set(sys.modules)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("sum", int(total.item()), "warm", warm, "threads", torch.get_num_threads(), "late", len(set(sys.modules) - loaded), flush=True)
dist.destroy_process_group()
"""


async def test_warm_workers_train_over_the_spare_store(harness: Make) -> None:
    h = harness(imports=True, spare_store=True, park=2)
    ready = await h.up()
    assert ready.safe, ready.problems
    assert {"torch", "torch._dynamo"} <= set(ready.preloaded)
    spare = (await h.next(protocol.StoreChanged))[0].store
    assert spare.generation == 0
    host, port = spare.address.rsplit(":", 1)
    env = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    script = h.script(GLOO)
    standing = await until(lambda: len(found := parked(h)) == 2 and found)
    await until(lambda: all(process_state(pid) == "S" for pid in standing))
    state = await h.start([h.worker([script], rank=rank, env={**env, "RANK": str(rank)}) for rank in (0, 1)], store=spare.address)
    assert state.method == "warm"
    assert {worker.pid for worker in state.workers} == standing
    ended = await h.next(protocol.WorkerEnded, 2)
    assert [item.worker.status for item in ended] == [0, 0], h.output(0) + h.output(1)
    assert h.output(0).split()[:6] == ["sum", "1", "warm", "True", "threads", "2"]
    given, fresh = [item.store for item in await h.next(protocol.StoreChanged, 3)][1:]
    assert (given.address, given.generation) == (spare.address, 1)
    assert fresh.generation == 0
    assert fresh.address != spare.address
    os.kill(fresh.pid, signal.SIGKILL)
    changes = await h.next(protocol.StoreChanged, 5)
    assert changes[3].ended
    assert changes[4].store.pid != fresh.pid
    await h.launcher.stop("toy", 1)
    assert (await h.next(protocol.StoreChanged, 6))[5].store.address == spare.address


FRESH = """
import os, random, sys, threading
import torch
print(os.getpid(), os.getpgid(0), random.random(), torch.initial_seed(), float(torch.rand(())), flush=True)
print(sys.argv, os.getcwd(), sorted(os.environ), sorted(os.listdir("/proc/self/fd")))
print(threading.active_count(), torch.is_grad_enabled(), __name__, open("/proc/self/comm").read().strip(), flush=True)
model = torch.nn.Linear(2, 2)
if os.fork() == 0:  # before the first backward pass here: the child may have its own
    model(torch.ones(2)).sum().backward()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def parked(h: Harness) -> set[int]:
    """Children of the shim that stand ready or will soon."""
    ready = h.launcher.ready
    assert ready is not None
    return {pid for pid in children_of(ready.pid) if Path(f"/proc/{pid}/comm").read_text() == "regrow-parked\n"}


async def run_fresh(h: Harness, script: str, generation: int) -> tuple[list[int], list[list[str]]]:
    """Two workers of a generation, to their end: pids, and the lines that each printed."""
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "LARGE": "x" * 300_000}
    logs = [h.state / f"g{generation}.{rank}" for rank in (0, 1)]
    workers = [h.worker([script, "a b"], rank=rank, env=env | {"RANK": str(rank)}, log=str(log)) for rank, log in enumerate(logs)]
    state = await h.start(workers, generation=generation)
    ended = await h.next(protocol.WorkerEnded, 2 * generation)
    assert [item.worker.status for item in ended] == [0] * 2 * generation, logs[0].read_text()
    return [worker.pid for worker in state.workers], [log.read_text().splitlines() for log in logs]


async def test_workers_that_stood_ready_are_like_new_ones(harness: Make) -> None:
    h = harness(imports=True)
    await h.up()
    script = h.script(FRESH)
    pids, first = await run_fresh(h, script, 1)
    ready = await until(lambda: len(found := parked(h)) == 2 and found)
    await until(lambda: all(process_state(pid) == "S" for pid in ready))
    again, second = await run_fresh(h, script, 2)
    assert set(again) == ready
    assert not ready & set(pids)
    for rank in (0, 1):
        pid, group, *streams = second[rank][0].split()
        assert (pid, group) == (str(again[rank]), str(again[0]))
        others = {word for line in (first[rank][0], first[1 - rank][0], second[1 - rank][0]) for word in line.split()[2:]}
        assert others.isdisjoint(streams), "random streams of its own, torch's too"
        assert second[rank][1:] == first[rank][1:]
    fresh = await until(lambda: len(found := parked(h)) == 2 and found)
    for pid in fresh:
        os.kill(pid, signal.SIGSTOP)
    await until(lambda: all(process_state(pid) == "T" for pid in fresh))
    third, _ = await run_fresh(h, script, 3)
    assert not fresh & set(third), "who cannot answer is passed over"


async def test_an_unsafe_shim_starts_cold(harness: Make) -> None:
    h = harness(preload=("threads_of_its_own",))
    (h.state / "threads_of_its_own.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    ready = await h.up()
    assert not ready.problems
    os.environ["PYTHONPATH"] = str(h.state)
    try:
        os.kill(ready.pid, signal.SIGKILL)
        fresh = (await h.next(type(h.news[0]), 2))[1].ready
    finally:
        del os.environ["PYTHONPATH"]
    assert not fresh.safe
    assert "2 threads" in fresh.problems
    state = await h.start([h.worker([h.script("print('cold')")])])
    assert state.method == "cold"
    assert "unsafe to fork: 2 threads" in state.method_reason
    await h.next(protocol.WorkerEnded)
    await until(lambda: h.output() == "cold\n")
