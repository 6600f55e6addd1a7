"""Re-routing a lost stage's micro-batches against dropping its replica, played through (parallel/reroute.py).

    .venv/bin/python benchmarks/reroute.py          # the table of docs/parallelism.md
    .venv/bin/python benchmarks/reroute.py --json

Lengths of a step over the step without a loss, minus 1; exact for the schedules that are played, no machine is measured.
"""

from __future__ import annotations

import argparse
import json
import platform

from regrow.parallel.reroute import dropped, reroute

CASES = ((2, 4, 8), (4, 4, 8), (8, 4, 16), (32, 4, 56), (128, 16, 16))
"""Replicas, stages, micro-batches of a replica; the last two are Megatron 76.1B and Llama 3 405B."""


def rows() -> list[dict[str, object]]:
    """Each case with its first, middle and last stage lost."""
    made: list[dict[str, object]] = []
    for dp, pp, count in CASES:
        found = {
            split: [one for stage in (0, pp // 2, pp - 1) if (one := reroute(dp, pp, count, [(0, stage)], split_backward=split))]
            for split in (False, True)
        }
        made.append(
            {
                "dp": dp,
                "pp": pp,
                "micro_batches": count,
                "dropped": dropped(dp, pp, count, 1),
                "rerouted": [one.slower for one in found[False]],
                "rerouted_split_backward": [one.slower for one in found[True]],
                "most_in_flight": max(one.most_in_flight for each in found.values() for one in each),
                "played": all(one.played for each in found.values() for one in each),
            }
        )
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    options = parser.parse_args()
    made = rows()
    if options.json:
        machine = {"python": platform.python_version(), "platform": platform.platform()}
        print(json.dumps({"figures": {}, "limits": {}, "samples": {"cases": made}, "machine": machine}))
        return
    print(
        "| DP, PP, micro-batches | replica dropped | re-routed (first, middle, last stage) | with backward split | activations of a peer |"
    )
    print("|---|---|---|---|---|")
    for row in made:
        print(
            f"| {row['dp']}, {row['pp']}, {row['micro_batches']} | {_percent([row['dropped']])} | {_percent(row['rerouted'])} |"
            f" {_percent(row['rerouted_split_backward'])} | up to {row['most_in_flight']:.2g} x |"
        )


def _percent(values: object) -> str:
    assert isinstance(values, list)
    return ", ".join(f"{value:+.1%}" for value in values).replace("%", " %")


if __name__ == "__main__":
    main()
