"""torchrun's own agent with workers forked from a server that has everything imported: `elastic_launch` with the start method "forkserver".

    preloaded.py HOST:PORT NODES SLOTS SCRIPT ...

What torchrun could do if it preloaded: the same modules as Regrow's shim, the same script, rendezvous and restarts. See recovery_peers.py.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from regrow.agent.preload import DEFAULT_MODULES


def work(script: str, *arguments: str) -> None:
    """One worker: the script, as torchrun's would see it."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, script.rpartition("/")[0])
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the agent of one node."""
    endpoint, nodes, slots, script, *arguments = sys.argv[1:]
    multiprocessing.set_forkserver_preload(list(DEFAULT_MODULES))
    config = LaunchConfig(
        min_nodes=int(nodes),
        max_nodes=int(nodes),
        nproc_per_node=int(slots),
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=20,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, work)(script, *arguments)


if __name__ == "__main__":
    main()
