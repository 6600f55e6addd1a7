"""blocked.py RANK PORT: rank 1 never joins the second all-reduce; rank 0 is blocked in it, frees itself, and tells as JSON."""

import json
import socket
import sys
import threading

import torch
import torch.distributed as dist

from regrow.agent.worker import gloo, regroup


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        sys.stdin.read()
        return
    mine, other = socket.socketpair(socket.AF_UNIX)
    served = socket.create_server(("127.0.0.1", 0))
    users = socket.create_connection(served.getsockname())
    work = dist.all_reduce(torch.ones(1), async_op=True)
    broken: list[int] = []
    thread = threading.Thread(target=lambda: broken.append(gloo.shut_down()))
    thread.start()
    error = ""
    try:
        work.wait()
    except RuntimeError as caught:
        error = str(caught)
    thread.join()
    users.sendall(b"there")
    mine.sendall(b"there")
    store.set("key", "value")
    heard = [served.accept()[0].recv(16).decode(), other.recv(16).decode(), store.get("key").decode()]
    print(
        json.dumps({"broken": broken[0], "error": error, "lost_peer": regroup.lost_peer(RuntimeError(error)), "heard": heard}), flush=True
    )


main()
