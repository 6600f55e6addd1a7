"""The small job of a chaos plan (`kind = "small"`): steps of a few hundredths of a second, evaluations, repeated micro-steps.

Data parallel, gradients summed by hand, so that a rank's own gradient is there before the reduction.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

import regrow
from regrow.agent.worker.data import Batch

INPUTS, HIDDEN = 16, 64


def parse() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a step takes at least so long")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--replay-rate", type=float, default=1.0, help="share of steps of which a micro-step is repeated")
    return parser.parse_args()


def samples(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of data set entries: functions of their numbers."""
    rows = torch.tensor(indices, dtype=torch.float32).unsqueeze(1)
    inputs = torch.sin(rows * torch.arange(1, INPUTS + 1) * 0.1)
    return inputs, inputs.sum(1, keepdim=True)


def main() -> None:
    """Train until the plan is over."""
    args = parse()
    run = regrow.attach(global_batch=16, micro_batch=2)
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    plan = run.batches(num_samples=4096)
    state = run.train_state(model=model, optimizer=optimizer, digest_every=1)
    state.restore()
    replay = run.replay(model, rate=args.replay_rate)

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = (model(inputs) - targets).pow(2).sum() / run.global_batch
        loss.backward()
        return loss.detach()

    def train(batch: Batch) -> torch.Tensor:
        loss = torch.zeros(())
        for micro in batch:
            loss += replay(compute, *samples(micro.tolist()))
        run.computed()
        if run.world_size > 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), loss.reshape(1)])
            dist.all_reduce(flat)
            *parts, loss = flat.split([*(gradient.numel() for gradient in gradients), 1])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return loss

    for step in run.steps(args.steps):
        began = time.perf_counter()
        loss = train(plan.step(step))
        optimizer.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0:
            with run.phase("eval"), torch.no_grad():
                model(samples(list(range(64)))[0])
        time.sleep(max(0.0, args.step_seconds - (time.perf_counter() - began)))
        run.complete(step, loss=float(loss))


if __name__ == "__main__":
    main()
