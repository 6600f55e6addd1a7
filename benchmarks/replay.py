"""Replay figures: what repeating sampled micro-steps costs, and how soon it finds a rank that computes wrongly.

    .venv/bin/python benchmarks/replay.py --json            # about two minutes on one core
    .venv/bin/python benchmarks/replay.py --json --quick

check_ratio: CPU time of one check over that of a step of four micro-steps, median over pairs of runs. overhead_at_RATE: that
times the rate. measured_overhead_at_0.25: of a run at that rate, beside what the product expects of it. delay_steps_KIND: median and
95th percentile of the steps from the first wrong micro-step to the verdict that names the rank, by rate, over seeds; "share"
is how many of its micro-steps are wrong. found_at_default: the same at the default rate by the schedule alone, without
training: which step is repeated is a function of seed and step. What digests of state find is in benchmarks/digest.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import regrow
from regrow.agent.worker import replay_judge
from regrow.agent.worker.chaos_gemm import SickProducts

UNITS = 4
RATES = (1.0, 0.25)
KINDS = ("gemm", "gradient")
SHARES = (1.0, 0.1)
_BIT = 24
"""Of a product: larger by a factor of four. Higher bits end training in infinities, which are found in another way."""
LIMITS = {"overhead_at_default": 0.005}


class Training:
    """One rank that trains a small transformer with `run.replay`, and may be sick."""

    def __init__(self, *, rate: float, seed: int, width: int = 64) -> None:
        self.run = regrow.attach(global_batch=UNITS, micro_batch=1, seed=seed)
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.run.train_state(model=self.model, optimizer=self.optimizer)
        self.replay = self.run.replay(self.model, rate=rate, units=UNITS)
        self.inputs = torch.randn(UNITS, 8, 32, width)
        self.kind, self.share = "", 0.0
        self._draw = random.Random(seed)

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        """A micro-step; wrong now and then when the rank is sick."""
        sick = bool(self.kind) and self._draw.random() < self.share
        with SickProducts(_BIT, self._draw) if sick and self.kind == "gemm" else contextlib.nullcontext():
            loss = self.model(inputs).pow(2).mean()
            loss.backward()
        if sick and self.kind == "gradient":
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            flat = self._draw.choice(gradients).view(-1)
            place = self._draw.randrange(flat.numel())
            flat[place : place + 1].view(torch.int32).bitwise_xor_(1 << 27)
        return loss.detach()

    def steps(self, count: int) -> Any:
        """Train; yields (step, verdict of the check in it or None)."""
        for step in self.run.steps(self.run.step + count):
            self.optimizer.zero_grad()
            for part in self.inputs:
                self.replay(self.compute, part)
            verdict = self.replay.take_verdict()
            self.optimizer.step()
            self.run.complete(step)
            yield step, verdict


def cpu_per_step(rate: float, steps: int) -> float:
    """CPU seconds of a step at this rate."""
    training = Training(rate=rate, seed=1)
    for _ in training.steps(2):
        continue
    begin = time.process_time()
    for _ in training.steps(steps):
        continue
    return (time.process_time() - begin) / steps


def delay(kind: str, share: float, rate: float, seed: int, limit: int) -> int | None:
    """Steps from the first sick step to the verdict that names the rank."""
    training = Training(rate=rate, seed=seed, width=16)
    clean = 0
    while clean < replay_judge.PROVEN_CHECKS:  # a program that was never seen to repeat accuses nobody
        clean += sum(verdict is not None and verdict.verdict == "agree" for _, verdict in training.steps(1))
    training.kind, training.share = kind, share
    for number, (_, verdict) in enumerate(training.steps(limit), 1):
        if verdict is not None and verdict.verdict == "diverged" and verdict.suspects:
            return number
    return None


def by_schedule(rate: float, seeds: int) -> list[int]:
    """Steps to the first one that is repeated."""
    found: list[int] = []
    for seed in range(seeds):
        step = 1
        while replay_judge.sample(seed, step, rate, UNITS) is None:
            step += 1
        found.append(step)
    return found


def spread(values: list[int]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs, steps, seeds = (3, 8, 3) if options.quick else (7, 16, 12)
    ratios: list[float] = []
    quarters: list[float] = []
    for _ in range(pairs):
        plain = cpu_per_step(0.0, steps)
        ratios.append(cpu_per_step(1.0, steps) / plain - 1)
        quarters.append(cpu_per_step(0.25, 2 * steps) / plain - 1)
    check = statistics.median(ratios)
    share = sum(replay_judge.sample(1, step, 0.25, UNITS) is not None for step in range(3, 3 + 2 * steps)) / (2 * steps)
    figures: dict[str, Any] = {"check_ratio": check, "measured_overhead_at_0.25": statistics.median(quarters)}
    figures["expected_overhead_at_0.25"] = share * check  # by the share of steps that the schedule took there
    figures |= {f"overhead_at_{rate:g}": rate * check for rate in RATES} | {"overhead_at_default": replay_judge.DEFAULT_RATE * check}
    samples: dict[str, Any] = {"check_ratio": ratios, "quarter": quarters}
    for kind in KINDS:
        for share in SHARES:
            for rate in RATES:
                name = f"{kind}, share {share:g}, rate {rate:g}"
                limit = int(12 / (rate * min(1.0, 2 * share)))
                found = samples[name] = [delay(kind, share, rate, seed, limit) for seed in range(seeds)]
                seen = [one for one in found if one is not None]
                figures[f"delay_steps: {name}"] = {"found": f"{len(seen)} of {len(found)}", **(spread(seen) if seen else {})}
    figures["found_at_default"] = spread(by_schedule(replay_judge.DEFAULT_RATE, 400))
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({"figures": figures, "limits": LIMITS, "samples": samples, "machine": machine}))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
