"""Scale of the control plane: stub agents with the real protocol, one real supervisor, three real etcd members on this disk.

    .venv/bin/python benchmarks/scale.py [--quick] [--nodes N] --json

Every stub has a TLS connection and a lease of its own; hundreds share a process. As root with `unshare` and `nft` all of it runs
in a network namespace of its own, where one packet in a hundred of the beat connections can be dropped (and no traffic leaves the
machine). Phases: connect, form (submit to the last order received), train (a step every two seconds; CPU and memory), pauses
(SIGSTOP of an eighth of all stubs for three seconds), packet loss, then losses of 1, 10 and 100 hosts, each once with the host
silent (power off) and once with its connections closed (processes killed); peers' workers fail half a second after each.
Detection is from the instant of the loss to the supervisor's own record that the node is silent or disconnected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stubs.bench import Bench
from stubs.judge import percentile, summary

_INSIDE = "REGROW_SCALE_INSIDE"
_NODES, _QUICK_NODES = 2048, 512
_LOSSES = (1, 10, 100)
_LIMITS = {"detection_p99_seconds": 3.0, "false_losses": 0, "supervisor_cores": 0.5, "form_seconds": 10.0}


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, help="default: 2048, 512 with --quick")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--processes", type=int, default=8, help="processes that the stubs share")
    parser.add_argument("--quick", action="store_true", help="shorter windows, one silent loss of each size; ends within four minutes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep journal and logs here")
    parser.add_argument("--profile", action="store_true", help="write the supervisor's profile to FOLDER/supervisor.prof")
    options = parser.parse_args(argv)
    options.nodes = options.nodes or (_QUICK_NODES if options.quick else _NODES)
    if options.nodes < options.processes:
        options.processes = max(1, options.nodes)
    return options


def enter_namespace() -> None:
    """Start over in a network namespace of our own, when that is possible."""
    possible = os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "nft", "ip"))
    if possible and _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        inner = f"ip link set lo up && exec {sys.executable} " + " ".join(f"'{word}'" for word in sys.argv)
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", inner])


async def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    rng = random.Random(options.seed)
    window = 12.0 if options.quick else 40.0
    samples: dict[str, Any] = {"nodes": options.nodes, "connect_seconds": await bench.connect()}
    samples["idle"] = await bench.usage(window / 2)
    samples["form_seconds"] = await bench.form()
    samples["training"] = await bench.train(window)
    samples["pauses"] = await bench.pauses(2 if options.quick else 6, seconds=3.0)
    samples["packet_loss"] = await bench.packet_loss(window) if _INSIDE in os.environ else {"skipped": "needs root, unshare and nft"}
    kinds = (True,) if options.quick else (True, False)
    rounds = [(number, silent) for number in _LOSSES if number * 4 <= options.nodes for silent in kinds]
    samples["losses"] = [await bench.lose(number, silent=silent, rng=rng) for number, silent in rounds]
    samples |= bench.whole_run()
    return samples


def document_of(samples: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The contract's keys."""
    delays = [delay for loss in samples["losses"] for delay in loss["detection_seconds"]]
    missed = sum(loss["hosts"] - len(loss["detection_seconds"]) for loss in samples["losses"])
    false = samples["pauses"]["false_losses"] + samples["packet_loss"].get("false_losses", 0) + samples["training"]["false_losses"]
    compact = samples | {"losses": [loss | {"detection_seconds": summary(loss["detection_seconds"])} for loss in samples["losses"]]}
    load = os.getloadavg()
    return {
        "figures": {
            "detection_p99_seconds": percentile(delays, 0.99) if delays and not missed else math.inf,
            "false_losses": false,
            "supervisor_cores": samples["training"]["supervisor"]["cores"],
            "form_seconds": samples["form_seconds"],
        },
        "limits": _LIMITS,
        "samples": compact | {"losses_not_detected": missed},
        "machine": {"cores": os.cpu_count(), "load_average": list(load), "python": sys.version.split()[0], "quick": options.quick},
    }


async def main() -> None:
    """Measure and print."""
    options = options_of()
    with tempfile.TemporaryDirectory(prefix="regrow-scale-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options)
        try:
            await bench.start()
            document = document_of(await measure(bench, options), options)
        finally:
            await bench.stop()
    sys.stdout.write(json.dumps(document, indent=None if options.json else 2) + "\n")


if __name__ == "__main__":
    enter_namespace()
    asyncio.run(main())
