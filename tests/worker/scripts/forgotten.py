"""forgotten.py RANK PORT: rank 0 sends more than the kernel takes to a rank that does not read; tells as JSON who frees it.

Rank 1 posts the receive, so that rank 0's send goes to the queue of its pair, and stops itself.
"""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from regrow.agent.worker import gloo, regroup

LIMIT = 60.0


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    payload, word = torch.ones(4 * 1024 * 1024), torch.ones(1)
    if rank == 1:
        receiving = dist.irecv(payload, 0)
        assert receiving is not None
        dist.send(word, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    dist.recv(word, 1)
    raised: list[str] = []
    over = threading.Event()

    def send() -> None:
        try:
            dist.send(payload, 1)
        except RuntimeError as error:
            raised.append(str(error))
        over.set()

    threading.Thread(target=send, daemon=True).start()
    waiters = gloo.Waiters()
    end = time.monotonic() + LIMIT
    while not waiters.seen() and time.monotonic() < end:
        time.sleep(0.01)
    broken = gloo.shut_down()
    by_gloo = over.wait(1.0)
    began = time.monotonic()
    freed = 0
    while not over.wait(0.03) and time.monotonic() < end:
        freed += waiters.free()
    seconds = time.monotonic() - began
    dist.destroy_process_group()  # joins gloo's threads: none is stuck
    found = {
        "broken": broken,
        "by_gloo": by_gloo,
        "freed": freed,
        "seconds": seconds,
        "lost_peer": regroup.lost_peer(RuntimeError(raised[0])),
    }
    print(json.dumps(found), flush=True)


main()
