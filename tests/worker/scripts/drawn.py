"""Every rank draws from each of its generators at every step, and its state is checkpointed with them.

The loss depends on the draws of this rank, the weights do not: all ranks hold the same model whatever the mesh.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch

import regrow


def main() -> None:
    run = regrow.attach(global_batch=12, micro_batch=2, checkpoint=os.environ.get("FOLDER", ""))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    own = torch.Generator().manual_seed(70 + run.rank)
    torch.manual_seed(100 + run.rank)
    random.seed(200 + run.rank)
    np.random.seed(300 + run.rank)
    plan = run.batches(num_samples=500)
    state = run.train_state(
        model=model, optimizer=optimizer, scheduler=scheduler, digest_every=1, generators={"own": own}, back_pressure="wait"
    )
    restored = state.restore()
    log = []
    for step in run.steps(int(os.environ.get("STEPS", "8"))):
        batch = plan.step(step)
        inputs = torch.sin(torch.arange(8) * float(step))
        loss = model(inputs).pow(2).sum()
        loss.backward()
        run.computed()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        draws = [float(torch.rand(1)), random.random(), float(np.random.rand()), float(torch.rand(1, generator=own))]
        rate = optimizer.param_groups[0]["lr"]
        log.append({"step": step, "draws": draws, "lr": rate, "loss": float(loss), "samples": batch.samples.tolist()})
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        run.complete(step, loss=loss, learning_rate=rate)
        if os.environ.get("SAVE_AT") == str(step):
            run.request_save()
    Path(os.environ["OUTPUT"]).write_text(json.dumps({"restored": restored, "log": log, "stopped": run.stopped}))


if __name__ == "__main__":
    main()
