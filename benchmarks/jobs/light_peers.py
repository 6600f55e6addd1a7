"""The light job under peers that keep survivors in their processes: torchft and nvidia-resiliency-ext. See recovery_peers.py.

Run by an interpreter that has the peer installed; rank and world are in the environment.
"""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

import torch
import torch.distributed as dist
from light import ARGUMENTS, build, load, note, save, update

ARGUMENTS.add_argument("--peer", choices=("torchft", "nvrx"), required=True)
ARGUMENTS.add_argument("--store", type=int, required=True, help="port of a TCPStore that outlives the ranks")
LIMIT = dt.timedelta(seconds=60)


def torchft(args: Any, rank: int) -> None:
    """Each rank is a replica group of its own: a step goes on without the one that is gone, from the live state."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    model, optimizer = build()
    own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def take(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=take,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
    )
    while manager.current_step() < args.steps:
        manager.start_quorum()
        step = manager.current_step() + 1
        update(
            model, optimizer, step, rank, args.pause, reduce=lambda gradient: manager.allreduce(gradient).wait(), may=manager.should_commit
        )
        if manager.current_step() == step:
            note(args, rank, step)


def nvrx(args: Any, rank: int) -> None:
    """The training function is called again in the surviving processes; it loads the newest checkpoint, as under torchrun."""
    from nvidia_resiliency_ext import inprocess  # pyright: ignore[reportMissingImports]

    class Destroy(inprocess.abort.Abort):
        """The package's own asks each group for its CUDA backend, which a gloo group does not have."""

        def __call__(self, state: Any) -> Any:
            if dist.is_initialized():
                dist.destroy_process_group()
            return state

    @inprocess.Wrapper(abort=Destroy(), monitor_process_logfile=str(args.out / f"{rank}.monitor"))
    def train(call_wrapper: Any = None) -> None:
        store = dist.TCPStore("127.0.0.1", args.store, None, False, wait_for_workers=False)
        prefixed = dist.PrefixStore(str(call_wrapper.iteration), store)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=prefixed, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        model, optimizer = build()
        path = args.out / "checkpoint.pt"
        done = load(path, model, optimizer) if path.exists() else 0
        for step in range(done + 1, args.steps + 1):
            update(model, optimizer, step, dist.get_rank(), args.pause)
            if dist.get_rank() == 0:
                save(path, model, optimizer, step)
            note(args, rank, step)

    train()


def main() -> None:
    """Train until killed."""
    args = ARGUMENTS.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"])
    (args.out / f"{rank}.pid").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    (torchft if args.peer == "torchft" else nvrx)(args, rank)


if __name__ == "__main__":
    main()
