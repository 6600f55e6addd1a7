"""Digest figures: what looking for silent corruption costs, what it finds and how soon, and whether it ever accuses wrongly.

    .venv/bin/python benchmarks/digest.py --json            # about two minutes on one core
    .venv/bin/python benchmarks/digest.py --json --quick
    .venv/bin/python benchmarks/digest.py --json --clean-only --checks 100000    # the bound on false accusations alone

overhead_ratio: CPU time of digest and check at rest over CPU time of the rest of the step, with the budget of 0.5 % that
`run.train_state(digest_budget=0.005)` keeps (median; overhead_mean: parts are not equal; default_parts: steps until all was looked at). whole_ratio: the same for everything at every step. gigabytes_per_second: one
core. delay_steps: from a flipped bit to its report, by kind of fault, over seeded places; null where digests of state
cannot see it: a wrong gradient before the sum poisons all replicas alike. curve: delay against overhead, by the number of steps in
which everything is looked at once: overhead_ratio, and steps to the report of a bit flipped at rest (median, worst). false_accusations of clean_checks, with the upper
end of the 95 % interval per million.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from regrow.agent.worker.chaos import Faults, flip_bit
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.watch import StateWatch

BUDGET = 0.005
LIMITS = {"overhead_ratio": 0.005}
PARTS = (1, 2, 4, 8, 16)
KINDS = ("parameter at rest", "optimizer at rest", "optimizer in the update", "gradient before the sum", "GEMM output")


class Replica:
    """A small transformer with AdamW and its watch."""

    def __init__(self, width: int, layers: int, *, every: int = 0, budget: float = 0.0) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.watch = StateWatch([self.model], [self.optimizer], Digester(1), Faults(enabled=False, rank=0), every=every, budget=budget)

    def backward(self, inputs: torch.Tensor) -> None:
        """Gradients of one batch."""
        self.optimizer.zero_grad()
        self.model(inputs).pow(2).mean().backward()

    def state(self, place: int) -> torch.Tensor:
        """One of the optimizer's tensors."""
        tensors = [value for entry in self.optimizer.state.values() for value in entry.values() if value.numel() > 1]
        return tensors[place % len(tensors)]

    def parameter(self, place: int) -> torch.Tensor:
        """One of the parameters."""
        parameters = list(self.model.parameters())
        return parameters[place % len(parameters)].data


def cost(*, parts: int = 0, steps: int, batch: int) -> tuple[list[float], int]:
    """Digest and check over the rest of the step, CPU time, a step each, and in how many steps everything is looked at. Parts 0: as
    the budget wants it."""
    replica = Replica(256, 4, every=min(parts, 1), budget=0.0 if parts else BUDGET)
    replica.watch.parts = max(1, parts)
    inputs = torch.randn(batch, 64, 256, generator=torch.Generator().manual_seed(1))
    ratios: list[float] = []
    for step in range(1, steps + 4):
        begin = time.process_time()
        replica.backward(inputs)
        replica.optimizer.step()
        train_seconds = time.process_time() - begin
        begin = time.process_time()
        replica.watch.applied(step)
        replica.watch.before_update()
        digest_seconds = time.process_time() - begin
        if not parts:
            replica.watch.agreed_cost(int(replica.watch.cost_seconds() * 1e6), int(train_seconds * 1e6))
        if step > 3:  # the first steps allocate, and choose the number of parts
            ratios.append(digest_seconds / train_seconds)
    return ratios, replica.watch.parts


def curve(steps: int, batch: int, seeds: int) -> dict[str, dict[str, float | None]]:
    """Delay against overhead. Means of the overhead: parts are not quite equal."""
    found: dict[str, dict[str, float | None]] = {}
    for parts in PARTS:
        delays = [delay("parameter at rest", seed, parts=parts, limit=2 * parts + 2) for seed in range(seeds)]
        seen = [one for one in delays if one is not None]
        ratios, _ = cost(parts=parts, steps=max(steps, parts), batch=batch)
        found[str(parts)] = {
            "overhead_ratio": statistics.fmean(ratios),
            "delay_steps_median": statistics.median(seen) if len(seen) == len(delays) else None,
            "delay_steps_worst": max(seen) if len(seen) == len(delays) else None,
        }
    return found


def inject(kind: str, victim: Replica, seed: int) -> None:
    """Flip bit 20 of one word."""
    generator = torch.Generator().manual_seed(seed)
    place = int(torch.randint(1 << 20, (1,), generator=generator))
    target = victim.parameter(place) if kind == "parameter at rest" else victim.state(place)
    flip_bit(target, place % target.numel(), 20)


def delay(kind: str, seed: int, *, parts: int, limit: int) -> int | None:
    """Steps from the fault to its report, in two replicas that sum their gradients; None: not seen within `limit`."""
    pair = [Replica(32, 2, every=1), Replica(32, 2, every=1)]
    for replica in pair:
        replica.watch.parts = parts
    hook: Any = None
    for step in range(1, limit + 5):
        faulty = step == 4
        if faulty and kind == "GEMM output":
            hook = pair[0].model.layers[0].linear1.register_forward_hook(lambda *call: _damaged(call[2]))  # type: ignore[union-attr]
        for index, replica in enumerate(pair):
            replica.backward(torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(10 * step + index)))
        if hook is not None:
            hook.remove()
            hook = None
        if faulty and kind == "gradient before the sum":
            _poison(pair[0], seed)
        for left, right in zip(pair[0].model.parameters(), pair[1].model.parameters(), strict=True):
            assert left.grad is not None
            assert right.grad is not None
            left.grad += right.grad
            right.grad.copy_(left.grad)
        texts: list[str] = []
        for index, replica in enumerate(pair):
            replica.watch.before_update()
            replica.optimizer.step()
            if faulty and index == 0 and kind == "optimizer in the update":
                inject(kind, replica, seed)
            texts.append(replica.watch.applied(step))
            if faulty and index == 0 and kind.endswith("at rest"):
                inject(kind, replica, seed)
        if pair[0].watch.take_mismatch() or texts[0] != texts[1]:
            return step - 4
    return None


def _damaged(output: torch.Tensor) -> torch.Tensor:
    changed = output.clone()
    changed.view(-1)[0] += 1.0
    return changed


def _poison(victim: Replica, seed: int) -> None:
    gradients = [parameter.grad for parameter in victim.model.parameters() if parameter.grad is not None]
    flip_bit(gradients[seed % len(gradients)], 0, 20)


def clean(checks: int) -> int:
    """False accusations in so many checks of a training that nobody hurts."""
    replica = Replica(16, 1, every=1)
    wrong = 0
    for step in range(1, checks + 1):
        replica.backward(torch.randn(1, 2, 16))
        replica.watch.before_update()
        wrong += bool(replica.watch.take_mismatch())
        replica.optimizer.step()
        replica.watch.applied(step)
    return wrong


def rate(repeats: int) -> list[float]:
    """GB/s over one large tensor, one core."""
    tensor, digester = torch.randn(16 << 20), Digester(5)
    return [tensor.nbytes / _seconds(lambda: digester.tensor(tensor)) / 1e9 for _ in range(repeats)]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def found(steps: int, batch: int, seeds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, samples) of cost and delay."""
    by_budget, parts = cost(steps=steps, batch=batch)
    samples: dict[str, Any] = {
        "overhead_ratio": by_budget,
        "whole_ratio": cost(parts=1, steps=steps, batch=batch)[0],
        "gigabytes_per_second": rate(steps),
    }
    figures: dict[str, Any] = {name: statistics.median(values) for name, values in samples.items()}
    for label, parts in (("delay_steps", 1), ("delay_steps_in_8_parts", 8)):
        delays = {kind: [delay(kind, seed, parts=parts, limit=12) for seed in range(seeds)] for kind in KINDS}
        samples[label] = delays
        figures[label] = {kind: None if None in values else max(values) for kind, values in delays.items()}  # type: ignore[type-var]
    figures["overhead_mean"] = statistics.fmean(by_budget)
    figures["default_parts"] = parts
    figures["curve"] = curve(steps, batch, seeds)
    return figures, samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clean-only", action="store_true", help="count false accusations and nothing else")
    parser.add_argument("--checks", type=int, default=0, help="clean checks; default: 5000, quick: 500")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, batch, seeds, checks = (10, 16, 3, 500) if options.quick else (40, 32, 10, 5000)
    checks = options.checks or checks
    figures, samples = ({}, {}) if options.clean_only else found(steps, batch, seeds)
    wrong = clean(checks)
    figures |= {
        "clean_checks": checks,
        "false_accusations": wrong,
        "false_accusations_upper95_per_million": 3e6 / checks if not wrong else None,
    }
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({"figures": figures, "limits": LIMITS, "samples": samples, "machine": machine}))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
