"""A small single-process training state on real storage, for tests that need a checkpoint and not a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint


class Small:
    """Model, AdamW with two groups, a warm-up schedule, real steps."""

    def __init__(
        self,
        folder: Path,
        generation: int = 1,
        restore: RestorePoint | None = None,
        *,
        seed: int = 1,
        writer: str | None = None,
        **objects: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
        groups = [
            {"params": self.model[0].parameters(), "lr": 0.01},
            {"params": self.model[3].parameters(), "lr": 0.02, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, foreach=False)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, cosine], [5])
        spec = GenerationSpec(
            job="small", epoch=1, generation=generation, mesh=MeshShape(), world_size=1, nodes=("alone",), restore=restore
        )
        place = Place(spec=spec, rank=0, node="alone", local_ranks=(0,), folder=str(folder))
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler} | objects
        self.state = TrainState.attach(place, writer=writer, **parts)
        self.trace: list[tuple[float, list[float]]] = []

    def train(self, steps: int) -> None:
        """Real steps on random data, so that the random state matters."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 8)).square().mean()
            loss.backward()
            self.trace.append((float(loss.detach()), [group["lr"] for group in self.optimizer.param_groups]))
            self.optimizer.step()
            self.scheduler.step()

    def save(self, step: int) -> None:
        """Save and insist."""
        report = self.state.save(step, step * 4)
        assert report.outcome == "snapshot", report
        assert not self.state.counts.last_reason

    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and optimizer state."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found
