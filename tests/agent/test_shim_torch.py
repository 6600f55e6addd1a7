"""The shim with torch imported: warm gloo workers on a store of the shim, and the check that forking was safe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.agent.harness import Harness, until

from regrow.agent import protocol

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
    h = harness(imports=True, spare_store=True)
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
    state = await h.start([h.worker([script], rank=rank, env={**env, "RANK": str(rank)}) for rank in (0, 1)], store=spare.address)
    assert state.method == "warm"
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
