"""Ranks of a measured job, forked from the benchmark's own process: torch is imported once, and nothing has run in it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def preload() -> None:
    """Import what the ranks need, once, before they are forked. One thread: a fork needs that."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    from regrow.demo import model as _model
    from regrow.parallel import apply as _apply

    assert _model
    assert _apply
    torch.set_num_threads(1)


def device_mesh(rank: int, port: int, axes: dict[str, int]) -> Any:
    """Join the gloo group of all ranks and lay it out. None where there is one rank.

    Args:
        rank: of this process.
        port: on 127.0.0.1, where rank 0 listens.
        axes: {name: size}, slowest first.
    """
    import math

    import torch.distributed as dist

    world = math.prod(axes.values())
    if world == 1:
        return None
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    return dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def run(name: str, count: int, work: Callable[[int, int], Any]) -> list[Any]:
    """What `work(rank, port)` returned on each of `count` ranks; it must be JSON.

    Raises:
        SystemExit: a rank failed; its traceback is on stderr.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        children: list[int] = []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    (folder / f"{rank}.json").write_text(json.dumps(work(rank, port)))
                    code = 0
                except BaseException:  # noqa: BLE001 - a child must never return into the parent's code
                    traceback.print_exc()
                os._exit(code)
            children.append(pid)
        failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
        if failed:
            raise SystemExit(f"{name}: {len(failed)} of {count} ranks failed")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
