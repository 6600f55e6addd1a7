"""What the plan of a change of mesh costs a rank: who gives which part of the state to whom (agent/worker/handover.py), without torch.

    .venv/bin/python benchmarks/handover.py [--quick] --json

Each case: ranks of an old mesh, one node of two ranks less or more, the boxes that all of them hold and need. `told_bytes`: what all ranks say
(of replicas only the first says its boxes); `decode_seconds` and `plan_seconds`: of rank 0, best of three. The demo's job is the first
case; whole copies of 2 x 2, and parameters sharded over all ranks (FSDP) are the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from typing import Any

import msgspec

from regrow.agent.worker import handover
from regrow.ckpt.layout import Box

Boxes = tuple[Box, ...]
STEP = 5
LIMITS = {"demo_plan_seconds": 0.05, "replicas_plan_seconds": 0.5, "sharded_plan_seconds": 5.0}


def mesh(dp: int, pp: int, tp: int, layers: int, tensors: int = 12, hidden: int = 240) -> list[Boxes]:
    """Boxes of each rank: parameters, two moments and a counter; matrices cut over tp, layers over pp, copies over dp."""

    def stage(number: int, shard: int) -> Boxes:
        found: list[Box] = []
        for layer in range(layers * number // pp, layers * (number + 1) // pp):
            for index in range(tensors):
                name, rows = f"layers.{layer}.w{index}", hidden * (4 if index % 3 == 0 else 1)
                matrix = index % 2 == 0
                shape = (rows, hidden) if matrix else (hidden,)
                first, last = (rows * shard // tp, rows * (shard + 1) // tp) if matrix else (0, hidden)
                box = (shape, (first, *([0] * (len(shape) - 1))), (last - first, *shape[1:]))
                found += [Box(f"{kind}.{name}", "float32", *box) for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")]
                found.append(Box(f"optimizer.step.{name}", "float32", (), (), ()))
        return tuple(sorted(found))

    replica = [stage(number, shard) for number in range(pp) for shard in range(tp)]
    return replica * dp


def sharded(ranks: int, tensors: int = 300, rows: int = 4096) -> list[Boxes]:
    """Each tensor cut over all ranks."""

    def one(rank: int) -> Boxes:
        first, last = rows * rank // ranks, rows * (rank + 1) // ranks
        return tuple(Box(f"w{number:03}", "float32", (rows, 1024), (first, 0), (last - first, 1024)) for number in range(tensors))

    return [one(rank) for rank in range(ranks)]


def digest(boxes: Boxes) -> str:
    """Equal for equal boxes; empty: none."""
    return hashlib.md5(repr(boxes).encode(), usedforsecurity=False).hexdigest() if boxes else ""


def measure(before: list[Boxes], lost: tuple[int, ...], after: list[Boxes]) -> dict[str, float]:
    """The catalogs as ranks tell them, and rank 0's work."""
    holds = [boxes for rank, boxes in enumerate(before) if rank not in lost]
    holds = (holds + [()] * len(after))[: len(after)]
    has, needs = [digest(boxes) for boxes in holds], [digest(boxes) for boxes in after]
    told = [
        msgspec.json.encode(
            handover.Catalog(
                step=STEP,
                samples=40,
                holds=holds[rank] if has.index(has[rank]) == rank else (),
                needs=after[rank] if needs.index(needs[rank]) == rank else (),
            )
        )
        for rank in range(len(after))
    ]
    decode = plan = float("inf")
    parts = 0
    for _ in range(3):
        began = time.perf_counter()
        catalogs = [msgspec.json.decode(data, type=handover.Catalog) for data in told]
        decoded = time.perf_counter()
        found = handover.plan(handover.filled(catalogs, needs, has), 1, 0)
        decode, plan = min(decode, decoded - began), min(plan, time.perf_counter() - decoded)
        assert found is not None
        parts = len(found.parts)
    return {"told_bytes": sum(map(len, told)), "decode_seconds": decode, "plan_seconds": plan, "parts": parts}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 ranks in the last case, not 256")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ranks = 64 if args.quick else 256
    samples: dict[str, dict[str, float]] = {
        "demo": measure(mesh(2, 2, 2, 4), (4, 5), mesh(3, 1, 2, 4)),
        "replicas": measure(mesh(8, 4, 4, 32), tuple(range(16)), mesh(7, 4, 4, 32)),
        "sharded": measure(sharded(ranks), (), sharded(ranks + 8)),
    }
    figures = {f"{name}_{key}": value for name, found in samples.items() for key, value in found.items()}
    document: dict[str, Any] = {
        "figures": figures,
        "limits": LIMITS,
        "samples": samples,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version()},
    }
    print(json.dumps(document, indent=1) if args.json else "\n".join(f"{name:28} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
