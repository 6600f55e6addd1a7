"""Scaling efficiency E = S / k of every strategy on this machine: S = step time on one rank / step time on k, same global batch.

    .venv/bin/python benchmarks/scaling.py --json            # about four minutes on two idle cores
    .venv/bin/python benchmarks/scaling.py --json --quick    # fewer steps
    .venv/bin/python benchmarks/scaling.py --only tensor --only zero3

Ranks are processes with one thread each on gloo. With c cores no k ranks can be faster than c / k times linear, so E is at most
min(1, c / k); `share` is E over that bound: what is lost to communication, idle ranks and the strategy's own work, and not
to the lack of cores. It says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

from jobs.ranks import device_mesh, preload, run

SIZES = {"layers": 8, "hidden": 192, "heads": 8, "seq": 128}
GLOBAL_BATCH, MICRO_BATCH = 16, 2
RANKS = (1, 2, 4, 8)
WARM_UP = 2
"""Steps before the first one that counts: connections, buffers, optimizer state."""

STRATEGIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "replicated": ("dp={k}", {}, {}),
    "zero1": ("dp={k}", {"zero_stage": 1}, {}),
    "zero2": ("dp={k}", {"zero_stage": 2}, {}),
    "zero3": ("dp={k}", {"zero_stage": 3}, {}),
    "hsdp": ("dp={k}", {"zero_stage": 3, "shard_size": 2}, {}),
    "tensor": ("tp={k}", {}, {}),
    "pipeline 1f1b": ("pp={k}", {}, {}),
    "pipeline gpipe": ("pp={k}", {"schedule": "gpipe"}, {}),
    "pipeline interleaved": ("pp={k}", {"schedule": "interleaved"}, {}),
    "pipeline zbv": ("pp={k}", {"schedule": "zbv"}, {}),
    "context": ("cp={k}", {}, {}),
    "experts": ("dp={k},ep={k}", {}, {"experts": 8}),
    "8-bit": ("dp={k}", {}, {"eight_bit": True}),
    "full recomputation": ("dp={k}", {"recompute": "full"}, {}),
}
"""Name: mesh for k ranks, fields of the strategy, what the model or optimizer is."""


def legal(name: str, ranks: int) -> bool:
    """Whether the strategy exists on so many ranks: two stages a rank need layers, groups of shards need several."""
    if ranks == 1:
        return True
    if name == "hsdp":
        return ranks >= 4
    return name not in ("pipeline interleaved", "pipeline zbv") or 2 * ranks <= SIZES["layers"]


def train(name: str, ranks: int, rank: int, port: int, steps: int) -> list[float]:
    """Seconds of each step of one rank."""
    import torch
    import torch.distributed as dist

    from regrow.demo.model import Config, Gpt
    from regrow.ids import MeshShape
    from regrow.parallel.apply import Strategy, apply_mesh
    from regrow.parallel.batch import split
    from regrow.parallel.dropout import sample_keys
    from regrow.parallel.quantised import AdamW8

    torch.set_num_threads(1)
    pattern, fields, other = STRATEGIES[name]
    shape = MeshShape.parse(pattern.format(k=ranks))
    mesh = device_mesh(rank, port, {"dp": shape.dp, "pp": shape.pp, **({"cp": shape.cp} if shape.cp > 1 else {}), "tp": shape.tp})
    if ranks == 1:
        fields = {key: value for key, value in fields.items() if key not in ("zero_stage", "shard_size")}
    torch.manual_seed(0)
    plan = Strategy(micro_batch=MICRO_BATCH, micro_batches=split(GLOBAL_BATCH, MICRO_BATCH, shape.dp), **fields)
    net = apply_mesh(Gpt(Config(**SIZES, dropout=0.0, experts=other.get("experts", 0))), mesh, shape, plan)
    more = {} if "eight_bit" in other else {"foreach": False}
    optimizer = net.optimizer(AdamW8 if "eight_bit" in other else torch.optim.AdamW, net.parameters(), **more)
    tokens = torch.randint(0, 256, (net.num_samples, SIZES["seq"] + 1))
    times: list[float] = []
    for step in range(WARM_UP + steps):
        if ranks > 1:
            dist.barrier()
        start = time.monotonic()
        net.forward_backward(tokens[:, :-1], tokens[:, 1:], sample_keys(0, step, torch.arange(net.num_samples)))
        optimizer.step()
        times.append(time.monotonic() - start)
    return times[WARM_UP:]


def measure(name: str, ranks: int, steps: int) -> list[float]:
    """Seconds of each step, of the slowest rank in it."""
    rows = run(f"{name} on {ranks} ranks", ranks, lambda rank, port: train(name, ranks, rank, port, steps))
    return [max(column) for column in zip(*rows, strict=True)]


def efficiency(samples: dict[str, dict[int, list[float]]], cores: int) -> dict[str, dict[str, dict[str, float]]]:
    """{strategy: {k: {"seconds", "efficiency", "share"}}}, by the median step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_ranks in samples.items():
        one = statistics.median(by_ranks[1])
        found[name] = {}
        for ranks, times in by_ranks.items():
            seconds = statistics.median(times)
            share = one / (ranks * seconds)
            found[name][str(ranks)] = {"seconds": seconds, "efficiency": share, "share": share / min(1.0, cores / ranks)}
    return found


def main() -> None:
    """Print the figures: one JSON document, or a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three steps each in place of seven")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", action="append", choices=tuple(STRATEGIES), help="these strategies; may be repeated")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy and torch are imported: a fork needs a single thread
    preload()
    chosen = options.only or list(STRATEGIES)
    cores = len(os.sched_getaffinity(0))
    samples: dict[str, dict[int, list[float]]] = {}
    for name in chosen:
        samples[name] = {}
        for ranks in (k for k in RANKS if legal(name, k)):
            samples[name][ranks] = measure(name, ranks, 3 if options.quick else 7)
            print(f"{name} k={ranks}: {samples[name][ranks]}", file=sys.stderr, flush=True)
    figures = efficiency(samples, cores)
    machine = {"cores": cores, "load": os.getloadavg()[0], "python": platform.python_version(), "platform": platform.platform()}
    if options.json:
        print(json.dumps({"figures": figures, "limits": {}, "samples": samples, "machine": machine}))
        return
    print(f"{'strategy':<22}" + "".join(f"{f'k = {k}':>24}" for k in RANKS))
    for name, by_ranks in figures.items():
        cells = [by_ranks.get(str(k)) for k in RANKS]
        texts = [f"{one['seconds']:.3f} s E {one['efficiency']:.2f} ({one['share']:.0%})" if one else "-" for one in cells]
        print(f"{name:<22}" + "".join(f"{text:>24}" for text in texts))


if __name__ == "__main__":
    sys.exit(main())
