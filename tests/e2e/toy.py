"""A small model on the worker library: enough state to notice a wrong restore, steps of a few milliseconds plus a pause.

Each rank appends {"generation", "restored"} and {"step", "loss", "samples"} lines to LOG/g<generation>-r<rank>.jsonl.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

import regrow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--work", type=int, default=0, help="so many milliseconds of own work a step, told from waiting for others")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds added to each phase of a start")
    args = parser.parse_args()

    time.sleep(args.slow)
    run = regrow.attach(global_batch=8, micro_batch=1, seed=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    plan = run.batches(num_samples=64, seed=1)
    state = run.train_state(model=model, optimizer=optimizer)
    time.sleep(args.slow)
    restored = state.restore()
    args.log.mkdir(parents=True, exist_ok=True)
    with (args.log / f"g{run.spec.generation}-r{run.rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"generation": run.spec.generation, "restored": restored, "world": run.world_size}) + "\n")
        time.sleep(args.slow)
        for step in run.steps(args.steps):
            batch = plan.step(step)
            optimizer.zero_grad()
            total = torch.zeros(())
            for sample in batch.samples.tolist():
                x = torch.randn(8, generator=torch.Generator().manual_seed(sample))
                loss = (model(x) - x.sum()).square().sum() / run.global_batch
                loss.backward()
                total += loss.detach()
            for _ in range(args.work):
                time.sleep(0.001)  # a process that is stopped and continued gets through them slower, at no cost to others
            if args.work:
                run.computed()
            if run.world_size > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                dist.all_reduce(total)
            optimizer.step()
            time.sleep(args.pause)
            log.write(json.dumps({"step": step, "loss": float(total), "samples": batch.samples.tolist()}) + "\n")
            run.complete(step, loss=float(total))


if __name__ == "__main__":
    regrow.in_place(main)
