"""A small model that tells everything it can: digests, own compute, loss, gradient norm, tokens."""

import argparse
import time

import torch
import torch.distributed as dist

import regrow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.1)
    args = parser.parse_args()

    run = regrow.attach(global_batch=8, micro_batch=1, seed=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    plan = run.batches(num_samples=64, seed=1)
    state = run.train_state(model=model, optimizer=optimizer, digest_every=1)
    state.restore()
    for step in run.steps(args.steps):
        batch = plan.step(step)
        optimizer.zero_grad()
        total = torch.zeros(())
        for sample in batch.samples.tolist():
            x = torch.randn(8, generator=torch.Generator().manual_seed(sample))
            loss = (model(x) - x.sum()).square().sum() / run.global_batch
            loss.backward()
            total += loss.detach()
        run.computed()
        if run.world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(total)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        time.sleep(args.pause)
        run.complete(step, loss=float(total), grad_norm=norm, tokens=run.global_batch * 8)


if __name__ == "__main__":
    main()
