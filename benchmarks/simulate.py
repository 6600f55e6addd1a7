"""Speed of the simulator: CPU seconds of one core for 54 days of Llama 3's failures.

    python benchmarks/simulate.py [--quick] --json

The figure is CPU time of this process, so that a busy machine matters less. --quick simulates nine days and scales by days.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time

from regrow.supervisor.sim import constants, faults, models
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed

_DAYS, _QUICK_DAYS, _LIMIT_SECONDS = 54.0, 9.0, 20.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=2048)
    options = parser.parse_args()
    days = _QUICK_DAYS if options.quick else _DAYS
    setup = Setup(constants=constants.load(), nodes=options.nodes, days=days)
    began = time.process_time()
    workload = models.build(setup)
    result = run_seed(setup, workload, lambda rng: faults.llama3(setup, rng), 1)
    spent = time.process_time() - began
    document = {
        "figures": {"seconds_54_days": spent * _DAYS / days},
        "limits": {"seconds_54_days": _LIMIT_SECONDS},
        "samples": {
            "cpu_seconds": [spent],
            "days": days,
            "nodes": options.nodes,
            "faults": result.faults,
            "turns": result.turns,
            "goodput": result.summary.goodput,
        },
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "scaled_from_days": days},
    }
    sys.stdout.write((json.dumps(document) if options.json else json.dumps(document, indent=2)) + "\n")


if __name__ == "__main__":
    main()
