"""The user's objects that make up a training state: what is in them, and how it goes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from regrow.ckpt import flatten, plain, private, rng
from regrow.ckpt.manifest import Record
from regrow.ckpt.materialise import materialise
from regrow.errors import OperationalError
from regrow.wire import GenerationSpec

_EXTRA_STATE = "_extra_state"


class Live:
    """Live tensors by canonical name at one moment, and the plain state around them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.copies: list[tuple[str, torch.Tensor]] = []
        """Further tensors that are loaded with what is stored under a name, and not saved."""
        self.others: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        """id(parameter) -> canonical name."""


class Objects:
    """Model, optimizer, scheduler, loader, generators and whatever else has state_dict()."""

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        data: Any,
        extra: Mapping[str, Any] | None,
        aliases: Mapping[str, str] | None,
        generators: Mapping[str, torch.Generator] | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedulers = private.schedulers_of(scheduler)
        self._data = data
        self._extra = dict(extra or {})
        self._aliases = dict(aliases or {})
        self._generators = dict(generators or {})

    def materialise(self) -> None:
        """Make optimizer state exist that the optimizer would make at its first step."""
        for one in flatten.optimizers_of(self._optimizer):
            materialise(one)

    def collect(self) -> Live:
        """Name everything that there is now."""
        live = Live()
        live.names = flatten.parameter_names(self._model, self._aliases)
        model = flatten.model_tensors(self._model, self._aliases)
        optimizer = flatten.optimizer_state(self._optimizer, live.names)
        live.tensors = {f"model.{name}": value for name, value in model.tensors.items()}
        live.tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors.items()}
        live.copies = [(f"model.{name}", value) for name, value in model.copies]
        live.copies += [(f"optimizer.{name}", value) for name, value in optimizer.copies]
        live.others = {
            "model": {name: plain.encode(value, f"model.{name}") for name, value in model.others.items()},
            "values": optimizer.others,
            "extra": {key: flatten.split_tensors(thing.state_dict(), f"extra.{key}", live.tensors) for key, thing in self._extra.items()},
        }
        return live

    def private_state(self, live: Live) -> dict[str, Any]:
        """This rank's own plain state."""
        return {
            "rng": rng.capture(self._generators),
            "groups": private.groups(self._optimizer, live.names),
            "data": None if self._data is None else plain.encode(self._data.state_dict(), "data"),
            **live.others,
        }

    def scheduler_state(self) -> list[Any]:
        """Job-wide plain state of the schedulers."""
        return [plain.encode(one.state_dict(), "scheduler") for one in self._schedulers]

    def load(self, record: Record, saved: dict[int, dict[str, Any]], live: Live, spec: GenerationSpec, rank: int) -> None:
        """Put everything back that is not a tensor; the tensors of `live` are loaded already.

        Args:
            record: Of the checkpoint.
            saved: Private state by the rank that saved it.
            live: From `collect`, its tensors loaded.
            spec: The generation that restores.
            rank: Ours in it.

        Raises:
            OperationalError: something is missing, or cannot follow the change of mesh.
        """
        same_mesh = record.mesh == spec.mesh
        own = saved[rank] if same_mesh else saved[0]
        self._load_optimizer(saved, live)
        self._load_extra(own, saved, live)
        schedules = record.facts.get("scheduler", [])
        if len(schedules) != len(self._schedulers):
            raise OperationalError(f"the checkpoint has {len(schedules)} schedulers, the state has {len(self._schedulers)}")
        for scheduler, state in zip(self._schedulers, schedules, strict=True):
            scheduler.load_state_dict(plain.decode(state))
        if self._data is not None:
            states = {number: one.get("data") for number, one in saved.items()}
            state = private.choose_rank_state(states, saved_mesh=record.mesh, mesh=spec.mesh, rank=rank, what="loader state")
            if state is None:
                raise OperationalError("the checkpoint has no loader state", hint="it was saved without data=")
            self._data.load_state_dict(plain.decode(state))
        if same_mesh:
            rng.restore(own["rng"], self._generators)
        else:
            rng.derive(own["rng"], step=record.step, rank=rank, world_size=spec.world_size, generators=self._generators)

    def _load_optimizer(self, saved: dict[int, dict[str, Any]], live: Live) -> None:
        if self._optimizer is None:
            return
        groups = [group for number in sorted(saved) for group in saved[number].get("groups", [])]
        private.restore_groups(self._optimizer, live.names, groups)
        values = {key: value for one in saved.values() for key, value in one.get("values", {}).items()}
        private.set_values(self._optimizer, live.names, values)

    def _load_extra(self, own: dict[str, Any], saved: dict[int, dict[str, Any]], live: Live) -> None:
        for key, thing in self._extra.items():
            if key not in own.get("extra", {}):
                raise OperationalError(f"extra state {key!r} is not in the checkpoint", hint=f"it has {sorted(own.get('extra', {}))}")
            thing.load_state_dict(flatten.join_tensors(own["extra"][key], live.tensors))
        stored = {name: value for one in saved.values() for name, value in one.get("model", {}).items()} | own.get("model", {})
        for name in live.others["model"]:
            if name not in stored:
                raise OperationalError(f"extra state of the model {name} is not in the checkpoint")
            for module in flatten.modules_of(self._model):
                for path, part in module.named_modules():
                    if f"{flatten.clean_name(path)}.{_EXTRA_STATE}".lstrip(".") == name:
                        part.set_extra_state(plain.decode(stored[name]))
