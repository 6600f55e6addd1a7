"""A small MLP with dropout and batch norm whose micro-steps are repeated at RATE. KIND: plain, noisy (gradients that do not
repeat to the bit), flip_once (one gradient wrong at step FLIP_AT of rank 1 in
one run), nan (one micro-step of NAN_RANK at step NAN_AT leaves NaN; NAN_ALWAYS=1: again when repeated)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import regrow
from regrow.agent.worker.binding import watch_state
from regrow.agent.worker.replay_judge import sample

FLIP_AT = 6


def main() -> None:
    run = regrow.attach(global_batch=12, micro_batch=2)
    torch.manual_seed(3)
    parts = (torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(16, 1))
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    plan = run.batches(num_samples=1003)
    watch_state(run, run._loop, [model], [optimizer], every=1)
    replay = run.replay(model, rate=float(os.environ.get("RATE", "1")))
    kind = os.environ.get("KIND", "plain")
    bad = (int(os.environ.get("NAN_AT", "0")), int(os.environ.get("NAN_RANK", "-1")))
    always = bool(os.environ.get("NAN_ALWAYS"))
    calls = 0
    torch.manual_seed(100 + run.rank)

    def compute(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if always and (run._loop.started, run.rank) == bad and first(calls):
            parts[3].register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
        loss = (model(inputs) - target).pow(2).sum() / run.global_batch
        loss.backward()
        gradient = parts[0].weight.grad
        assert gradient is not None
        if kind == "noisy":
            gradient.mul_(1.0 + calls * 1e-6)
        if kind == "flip_once" and (run._loop.started, run.rank, unit) == (FLIP_AT, 1, turn.unit) and first(calls):
            gradient[0, 0] += 1.0
        if kind == "nan" and not always and (run._loop.started, run.rank) == bad and first(calls):
            gradient[0, 0] = float("nan")
        return loss.detach()

    seen: set[int] = set()

    def first(call: int) -> bool:
        if not seen:
            seen.add(call)
        return call in seen

    turn = sample(run.seed, FLIP_AT, 1.0, min(run.spec.micro_batches))
    assert turn is not None
    unit = 0
    log: list[dict[str, Any]] = []
    for step in run.steps(int(os.environ.get("STEPS", "6"))):
        loss = torch.zeros(())
        for unit, samples in enumerate(plan.step(step)):  # noqa: B007 - compute reads it
            inputs = torch.stack([torch.sin(torch.arange(4) * float(index + 1)) for index in samples])
            loss += replay(compute, inputs, inputs.sum(1, keepdim=True))
        run.computed()
        if run.world_size > 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        run.complete(step, loss=loss)
        log.append({"step": step, "loss": float(loss)})
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    result = {
        "log": log,
        "state": hashlib.sha256(state).hexdigest(),
        "random": random,
        "repeated": replay.num_repeated,
        "floor": replay.floor,
    }
    Path(os.environ["OUTPUT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
