"""Planner figures: how fast it plans for 16,384 GPUs, how far from the exhaustive best, and whether it ranks real meshes.

    .venv/bin/python benchmarks/planner.py --json            # about eight minutes on two quiet cores
    .venv/bin/python benchmarks/planner.py --json --quick    # fewer meshes and steps
    .venv/bin/python benchmarks/planner.py --round > 1.json  # one round of step times; later, from two of them or more:
    .venv/bin/python benchmarks/planner.py --ranking-only --json --times 1.json --times 2.json

plan_seconds, table_seconds: CPU time of one plan and of the table for every number of survivors, Llama 3 405B on 2,048
nodes. regret: worst step time over the brute-force best on small problems, minus 1. rank_correlation: Spearman's, step
times of a small GPT on this machine's cores (gloo) against what the model predicts for a mesh after calibration on *all
other* meshes. repeat_correlation: the same of one measured round against another, which bounds what any model can reach;
fitted_correlation: with constants from all meshes. A CPU proves the ranking only, never GPU times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from jobs.ranks import device_mesh, preload, run

from regrow.ids import MeshShape
from regrow.parallel import batch, calibrate, cost, inventory, pipeline, planner, search, shape
from regrow.parallel.mesh import layers_per_stage
from regrow.parallel.planner import Plan, Request

LIMITS = {"plan_seconds": 0.1, "table_seconds": 5.0, "regret": 0.01, "rank_correlation": 0.9}
SIZES = {"layers": 4, "hidden": 384, "heads": 6, "seq": 120}
GLOBAL_BATCH = 16
QUICK_PLANS = ("1x1x1 4", "2x1x1 2", "1x2x1 2", "1x1x2 8", "1x1x2 2", "2x2x1 2", "1x2x2 2", "1x1x4 4", "3x1x1 2", "2x2x2 2")
PLANS = (
    *QUICK_PLANS, "1x1x1 1", "2x1x1 8", "1x2x1 8", "1x1x2 4", "1x1x2 1", "4x1x1 2", "2x1x2 2",
    "1x1x4 1", "1x3x1 2", "3x2x1 2", "2x3x1 2", "4x2x1 2",
)  # fmt: skip
"""DP x TP x PP and the micro-batch: both are the planner's choice."""


def llama() -> Request:
    """Llama 3 405B on 16,384 H100."""
    model = shape.make(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
    return Request(model=model, inventory=inventory.uniform(2048, 8), global_batch=2048)


def planning(repeats: int) -> dict[str, list[float]]:
    """CPU seconds of plan and table."""
    asked = llama()
    samples: dict[str, list[float]] = {"plan_seconds": [], "table_seconds": []}
    for index in range(repeats):
        start = time.process_time()
        planner.plan(asked)
        samples["plan_seconds"].append(time.process_time() - start)
        if index < max(1, repeats // 2):
            start = time.process_time()
            planner.plan_table(asked)
            samples["table_seconds"].append(time.process_time() - start)
    return samples


def brute_force(asked: Request) -> float:
    """The shortest step over every mesh, micro-batch, ZeRO stage and recomputation, without any cut."""
    best = math.inf
    gpus = asked.inventory.gpus
    for tp, pp in itertools.product(range(1, 9), range(1, asked.model.layers + 1)):
        for dp, micro in itertools.product(range(1, gpus // (tp * pp) + 1), (1, 2, 4, 8, 16)):
            for zero, level in itertools.product((0, 1, 2, 3), ("flash", "selective", "full")):
                made = search.judge(msgspec.structs.replace(asked, zero=zero, recompute=level), MeshShape(dp=dp, tp=tp, pp=pp), micro)
                if isinstance(made, Plan):
                    best = min(best, made.step_seconds)
    return best


def regret() -> list[float]:
    """Step time of the plan over the brute-force best, minus 1, for problems from roomy to tight."""
    found: list[float] = []
    for hidden, heads, layers in ((2048, 16, 12), (1536, 12, 10)):
        model = shape.make(layers=layers, hidden=hidden, heads=heads, kv_heads=heads // 2, vocab=32000, seq=2048)
        for gpus, total, memory_gb in ((8, 24, 80.0), (8, 7, 10.0), ([8, 7, 6], 20, 12.0), (6, 16, 8.0)):
            sizes = gpus if isinstance(gpus, list) else [gpus, gpus]
            there = inventory.uniform(len(sizes), sizes, gpu_memory_gb=memory_gb)
            asked = Request(model=model, inventory=there, global_batch=total)
            best = planner.plan(asked).best
            if best is not None:
                found.append(best.step_seconds / brute_force(asked) - 1.0)
    return found


def train(mesh: MeshShape, micro: int, rank: int, port: int, steps: int) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of each step of one rank: a GPT on a mesh."""
    import torch

    from regrow.demo.model import Config, Gpt
    from regrow.parallel.apply import Strategy, apply_mesh
    from regrow.parallel.dropout import sample_keys

    torch.set_num_threads(1)
    laid = device_mesh(rank, port, {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp})
    torch.manual_seed(0)
    counts = batch.split(GLOBAL_BATCH, micro, mesh.dp)
    net = apply_mesh(Gpt(Config(**SIZES, dropout=0.0)), laid, mesh, Strategy(micro_batch=micro, micro_batches=counts))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    tokens = torch.randint(0, 256, (net.num_samples, SIZES["seq"] + 1))
    times: list[tuple[float, float]] = []
    for step in range(steps):
        start, used = time.monotonic(), time.process_time()
        net.forward_backward(tokens[:, :-1], tokens[:, 1:], sample_keys(0, step, torch.arange(net.num_samples)))
        optimizer.step()
        times.append((time.monotonic() - start, time.process_time() - used))
    return times


def measure(mesh: MeshShape, micro: int, steps: int) -> list[dict[str, float]]:
    """Steps of one plan: wall time, and what the step would take on an idle machine by the CPU time of its ranks: the busiest
    rank's, or all of it over the cores."""
    ranks = run(f"mesh {mesh}", mesh.world_size, lambda rank, port: train(mesh, micro, rank, port, steps))
    cores = len(os.sched_getaffinity(0))
    made: list[dict[str, float]] = []
    for rows in zip(*ranks, strict=True):
        used = [cpu for _, cpu in rows]
        made.append({"wall": max(wall for wall, _ in rows), "cpu": max(*used, sum(used) / cores)})
    return made


def schedule(mesh: MeshShape, micro: int) -> str:
    """What the runtime runs: with fewer micro-batches than stages 1F1B is GPipe."""
    return "gpipe" if GLOBAL_BATCH // (micro * mesh.dp) < mesh.pp else "1f1b"


def machine_request(mesh: MeshShape, micro: int) -> Request:
    """One core a rank. The runtime reduces gradients in one message after the last micro-batch, so nothing hides behind compute."""
    there = inventory.uniform(1, mesh.world_size, device="cpu", gpu_memory_gb=16)
    return Request(
        model=shape.make(**SIZES, ffn=4 * SIZES["hidden"], vocab=256),
        inventory=there,
        global_batch=GLOBAL_BATCH,
        micro_batch=(micro,),
        context_bytes=0.0,
        zero=0,
        constants=cost.Constants(overlap=0.0),
        schedule=schedule(mesh, micro),
    )


def crowding(mesh: MeshShape, micro: int, cores: int, *, waits: bool) -> float:
    """How much longer a step takes where ranks share cores than with a core each: the mean number of ranks that work at a time,
    over the cores. The model knows ranks with a core each; short replicas, short stages and the bubble leave their time to
    the others here.

    Args:
        waits: what is measured counts waiting, too (a clock on the wall); CPU time has no bubble.
    """
    counts = batch.split(GLOBAL_BATCH, micro, mesh.dp)
    layers = layers_per_stage(SIZES["layers"], mesh.pp)
    stretch = 1.0 + pipeline.bubble_ratio(schedule(mesh, micro), mesh.pp, counts[0], 1)
    mean = sum(counts) / len(counts) / counts[0] * sum(layers) / len(layers) / max(layers) / stretch
    return max(1.0 if waits else 1.0 / stretch, mesh.world_size * mean / cores)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of each plan, measured one plan after another."""

    clock: str
    load: float
    seconds: dict[str, list[float]]


def measure_round(names: tuple[str, ...], steps: int) -> Round:
    """Train on each plan once. On a machine that is busy with other things wall time measures those; the ranks' own CPU
    time does not."""
    load = os.getloadavg()[0]
    clock = "wall" if load < 0.75 * len(os.sched_getaffinity(0)) else "cpu"
    seconds: dict[str, list[float]] = {}
    for name in names:
        mesh, micro = parse(name)
        seconds[name] = [step[clock] for step in measure(mesh, micro, steps)[2:]]
        print(f"{name} {clock} {min(seconds[name]):.3f} s", file=sys.stderr, flush=True)
    return Round(clock=clock, load=load, seconds=seconds)


def parse(name: str) -> tuple[MeshShape, int]:
    """Mesh and micro-batch of a plan's name."""
    mesh, micro = name.split()
    return MeshShape.parse(mesh), int(micro)


def ranking(rounds: list[Round]) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures, samples): measured and predicted step times, each plan predicted with constants from all the others."""
    names = [name for name in rounds[0].seconds if all(name in each.seconds for each in rounds)]
    plans = [parse(name) for name in names]
    cores = len(os.sched_getaffinity(0))
    clock = "cpu" if any(each.clock == "cpu" for each in rounds) else "wall"
    by_round = [[min(each.seconds[name]) for name in names] for each in rounds]
    measured = [min(values) for values in zip(*by_round, strict=True)]  # what the machine can do; the rest is other programs
    crowd = [crowding(mesh, micro, cores, waits=clock == "wall") for mesh, micro in plans]
    samples = [
        calibrate.Sample(mesh=mesh, step_seconds=seconds / many, micro_batch=micro)
        for (mesh, micro), seconds, many in zip(plans, measured, crowd, strict=True)
    ]
    requests = [machine_request(mesh, micro) for mesh, micro in plans]
    predicted: list[float] = []
    for index in range(len(plans)):
        others = [at for at in range(len(plans)) if at != index]
        found = calibrate.calibrate_all([(requests[at], samples[at]) for at in others])
        predicted.append(calibrate.predict(requests[index], [samples[index]], found.constants)[0] * crowd[index])
    whole = calibrate.calibrate_all(list(zip(requests, samples, strict=True)))
    fitted = [seconds * many for seconds, many in zip(whole.predicted, crowd, strict=True)]
    figures = {
        "rank_correlation": calibrate.rank_correlation(predicted, measured),
        "fitted_correlation": calibrate.rank_correlation(fitted, measured),
    }
    if len(by_round) > 1:
        pairs = [calibrate.rank_correlation(one, other) for one, other in itertools.combinations(by_round, 2)]
        figures["repeat_correlation"] = statistics.median(pairs)
    return figures, {"clock": clock, "plans": names, "measured": measured, "predicted": predicted, "rounds": by_round}


def main() -> None:
    """Print the figures as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranking-only", action="store_true", help="step times alone, on a quiet machine")
    parser.add_argument("--round", action="store_true", help="measure one round of step times, print it and end")
    parser.add_argument("--times", action="append", default=[], help="rank rounds that --round printed; measure no steps")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy and torch are imported: a fork needs a single thread
    names, steps = (QUICK_PLANS if options.quick else PLANS), 6
    if not options.times:
        preload()
    if options.round:
        print(msgspec.json.encode(measure_round(names, steps)).decode())
        return
    planned = planning(3 if options.quick else 7) if not options.ranking_only else {}
    regrets = regret() if not options.ranking_only else []
    rounds = [msgspec.json.decode(Path(each).read_bytes(), type=Round) for each in options.times]
    rounds = rounds or [measure_round(names, steps) for _ in range(1 if options.quick else 2)]
    ranked_figures, ranked = ranking(rounds)
    figures = {name: statistics.median(values) for name, values in planned.items()} | {"regret": max(regrets)} if planned else {}
    figures |= ranked_figures
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if options.json:
        print(json.dumps({"figures": figures, "limits": LIMITS, "samples": planned | {"regret": regrets} | ranked, "machine": machine}))
        return
    for name, value in figures.items():
        print(f"{name:<18} {value:.4g}" + (f"   limit {LIMITS[name]:g}" if name in LIMITS else ""))
    print(f"  step times by {ranked['clock']} clock")
    for name, seconds, guess in zip(ranked["plans"], ranked["measured"], ranked["predicted"], strict=True):
        print(f"  {name}: measured {seconds:.3f} s, predicted {guess:.3f} s")


if __name__ == "__main__":
    sys.exit(main())
