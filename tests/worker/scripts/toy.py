"""A small MLP with dropout, Adam and index data over any number of data-parallel ranks; one file keeps the state.

Settings by environment: STEPS, STEP_SECONDS (a floor that makes a step long enough to be caught), FAIL_AT (raise there),
KEEP (a folder: snapshots are written there, and restored from when there is one).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import regrow
from regrow import wire
from regrow.agent.worker.binding import watch_state


class FileKeeper:
    """Snapshots as files: what the step loop asks of a state, without a writer process."""

    def __init__(self, folder: Path, rank: int, state: dict[str, Any]) -> None:
        self._folder = folder
        self._rank = rank
        self._state = state
        self.saved: list[int] = []
        self.refuse_until = int(os.environ.get("BUSY_UNTIL", "0"))
        self.run: Any = None

    def ready(self) -> bool:
        return self.run.step >= self.refuse_until

    def save(self, step: int, samples: int) -> wire.SaveReport:
        torch.save({**self._state, "step": step, "samples": samples}, self._folder / f"{step}-{self._rank}.pt")
        self.saved.append(step)
        return wire.SaveReport(generation=self.run.spec.generation, rank=self._rank, step=step, outcome="snapshot", stall_seconds=1e-4)

    def skip(self, step: int, reason: str) -> None:
        (self._folder / f"{step}-{self._rank}.skipped").write_text(reason)

    def measured(self, name: str, value: float, step: int) -> None:
        del name, value, step

    def last_reason(self) -> str:
        return ""

    def wait_durable(self, step: int, seconds: float) -> bool:
        return (self._folder / f"{step}-{self._rank}.pt").exists()

    def write_seconds(self) -> float:
        return 1e-3


def main() -> None:
    run = regrow.attach(global_batch=12, micro_batch=2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    plan = run.batches(num_samples=int(os.environ.get("NUM_SAMPLES", "1003")))
    watch_state(
        run,
        run._loop,
        [model],
        [optimizer],
        every=int(os.environ.get("DIGEST_EVERY", "1")),
        budget=float(os.environ.get("DIGEST_BUDGET", "0")),
    )
    keeper = None
    if "KEEP" in os.environ:
        keeper = FileKeeper(Path(os.environ["KEEP"]), run.rank, {"model": model.state_dict()})
        keeper.run = run
        run._loop.keeper = keeper
    point = run.spec.restore
    if point is not None:
        saved = torch.load(Path(point.directory) / f"{point.step}-0.pt")
        model.load_state_dict(saved["model"])
        run.restored(saved["step"], saved["samples"])
    log: list[dict[str, Any]] = []
    total = int(os.environ.get("STEPS", "6"))
    for step in run.steps(total):
        begin = time.perf_counter()
        batch = plan.step(step)
        loss = torch.zeros(())
        for samples in batch:
            inputs = torch.stack([torch.sin(torch.arange(4) * float(index + 1)) for index in samples])
            part = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).sum() / run.global_batch
            part.backward()
            loss += part.detach()
        run.computed()
        if os.environ.get("FAIL_AT") == f"{step}:{run.rank}":
            raise ValueError(f"no good at step {step}")
        if run.world_size > 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, float(os.environ.get("STEP_SECONDS", "0")) - (time.perf_counter() - begin)))
        with Path(f"ids-{run.rank}.jsonl").open("a") as ids:
            ids.write(json.dumps([step, batch.samples.tolist()]) + "\n")
        log.append({"step": step, "samples": batch.samples.tolist(), "loss": float(loss)})
        run.complete(step, loss=loss, learning_rate=1e-2)
    result = {
        "rank": run.rank,
        "log": log,
        "stopped": run.stopped,
        "step": run.step,
        "samples": run.samples,
        "saved": keeper.saved if keeper else [],
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "exchanges": run._loop._control.num_exchanges,
        "skipped": run._loop.num_skipped_saves,
        "mesh": run.mesh_shape.__str__(),
    }
    output = Path(os.environ["OUTPUT"])
    part = output.with_name(f"{output.name}.{os.getpid()}")  # ranks of a plain torchrun share the name: whole or not at all
    part.write_text(json.dumps(result))
    part.replace(output)


if __name__ == "__main__":
    main()
