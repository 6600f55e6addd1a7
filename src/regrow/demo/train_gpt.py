"""Train a small byte-level GPT under Regrow, on any DP x TP x PP mesh.

    regrow run --local 4 --nproc-per-node 2 --mesh 2x2x2 --global-batch 16 --micro-batch 2 train_gpt.py --steps 45
    python train_gpt.py --steps 45            # the same run on one process

Started again, on whatever mesh, it goes on where the newest checkpoint ends, and the loss curve is that of a run that
was never interrupted: the order of samples, the dropout masks and the normalisation of the loss do not know the mesh.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import regrow
from regrow.demo.model import Config, Gpt
from regrow.demo.steplog import StepLog
from regrow.demo.text import Corpus
from regrow.ids import MeshShape
from regrow.parallel.apply import MeshModel, Strategy, apply_mesh
from regrow.parallel.dropout import sample_keys
from regrow.parallel.quantised import AdamW8

GLOBAL_BATCH = 16
MICRO_BATCH = 2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45, help="optimizer steps in all")
    parser.add_argument("--seed", type=int, default=None, help="of weights, sample order and dropout (default: the job's)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=96, help="width of the model, a multiple of the heads")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=96, help="bytes per sample")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=512, help="size of the training set, in samples of --seq bytes")
    parser.add_argument("--zero", type=int, default=None, choices=(0, 1, 2, 3), help="shard over the data axis (default: the job's)")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline: gpipe, 1f1b, interleaved, interleaved-zb, zbv, dualpipev")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"), help="activations in the backward pass")
    parser.add_argument("--tied", action="store_true", help="one matrix for embedding and output")
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer, of which a byte uses two (0: dense)")
    parser.add_argument("--eight-bit", action="store_true", help="AdamW with its moments in 8 bits")
    parser.add_argument("--replay-rate", type=float, default=0.0, help="share of steps whose gradients are computed twice and compared")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=8, help="steps of linear warm-up before the cosine")
    return parser.parse_args(argv)


def strategy(
    args: argparse.Namespace, micro_batch: int, micro_batches: tuple[int, ...], layers_per_stage: tuple[int, ...] = ()
) -> Strategy:
    """How a step runs: sizes from the job, the rest from the command line."""
    return Strategy(
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        layers_per_stage=layers_per_stage,
        zero_stage=args.zero or 0,
        schedule=args.schedule,
        recompute=args.recompute,
    )


def build(
    args: argparse.Namespace, mesh: Any, shape: MeshShape, plan: Strategy, device: torch.device
) -> tuple[MeshModel, torch.optim.Optimizer, LambdaLR]:
    """Model on its mesh, optimizer and learning-rate schedule."""
    torch.manual_seed(args.seed)
    sizes = {"layers": args.layers, "hidden": args.hidden, "heads": args.heads, "seq": args.seq, "experts": args.experts}
    config = Config(**sizes, dropout=args.dropout, tied=args.tied)
    net = apply_mesh(Gpt(config).to(device), mesh, shape, plan)
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    groups = [group for group in ({"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}) if group["params"]]
    options = {"lr": args.lr, "betas": (0.9, 0.95)}
    optimizer = net.optimizer(AdamW8, groups, **options) if args.eight_bit else net.optimizer(AdamW, groups, **options, foreach=False)

    def rate(completed: int) -> float:
        if completed < args.warmup:
            return (completed + 1) / args.warmup
        progress = (completed - args.warmup) / max(1, args.steps - args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return net, optimizer, LambdaLR(optimizer, rate)


def seed_generators(seed: int, rank: int) -> None:
    """A stream of its own for each rank and generator."""
    for generator, value in ((random.seed, 0), (np.random.seed, 1), (torch.manual_seed, 2)):
        generator((seed * 1_000_003 + rank * 3 + value) % 2**32)


def main() -> None:
    """Train to the last step, then report the loss on held-out text."""
    args = parse()
    run = regrow.attach(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=args.seed)
    torch.set_num_threads(1)  # one order of summation; the workers of a machine share its cores anyway
    args.seed = run.seed if args.seed is None else args.seed
    args.zero = run.job_spec.zero_stage if args.zero is None else args.zero
    corpus = Corpus(seq=args.seq, num_samples=args.samples)
    net, optimizer, scheduler = build(
        args, run.mesh, run.mesh_shape, strategy(args, run.micro_batch, run.spec.micro_batches, run.spec.layers_per_stage), run.device
    )
    seed_generators(args.seed, run.rank)

    plan = run.batches(num_samples=len(corpus), seed=args.seed)
    state = run.train_state(model=net.module, optimizer=optimizer, scheduler=scheduler, aliases=net.aliases, digest_every=1)
    restored = state.restore()
    if args.replay_rate:  # one call a step: all of a rank's forward and backward passes
        equal = len(set(run.spec.micro_batches)) < 2
        net.around = run.replay(net.module, rate=args.replay_rate, units=1, buddy=equal)
    alone = run.mesh_shape.replica_size == 1 and args.zero < 2  # no rank waits for another before the gradients are summed
    if alone:
        net.computed = run.computed
    named = alone and run.supervised  # whose gradient is not finite is reported: no rank has to raise for it
    log = StepLog.from_environment(generation=run.spec.generation, restart=run.spec.restart_count, rank=run.rank)
    log.start(net, restored=restored, num_samples=len(corpus), global_batch=run.global_batch)

    for step in run.steps(args.steps):
        batch = plan.step(step)
        inputs, targets = (part.to(run.device) for part in corpus.samples(torch.from_numpy(batch.samples)))
        keys = sample_keys(args.seed, step, torch.from_numpy(batch.positions).to(run.device))
        result = net.forward_backward(inputs, targets, keys)
        if result.broken_ranks and not named:
            raise FloatingPointError(f"step {step}: gradient of rank {result.broken_ranks[0]} is not finite")
        optimizer.step()
        rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        log.step(step, result, first=batch.first, samples=batch.samples.tolist(), learning_rate=rate)
        run.complete(step, loss=result.loss, learning_rate=rate, grad_norm=result.grad_norm, tokens=result.tokens)

    if run.stopped:
        log.close()
        return
    with run.phase("eval"):
        start = sum(run.spec.micro_batches[: net.coordinates["dp"]]) * run.micro_batch
        inputs, targets = (part[start : start + net.num_samples].to(run.device) for part in corpus.held_out(run.global_batch))
        held_out = net.evaluate(inputs, targets)
    log.end(net, optimizer, step=args.steps, held_out=held_out)
    if run.rank == 0:
        print(f"finished step={args.steps} held_out_loss={held_out:.6f} mesh={run.mesh_shape}", flush=True)


if __name__ == "__main__":
    regrow.in_place(main)
