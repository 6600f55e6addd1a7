"""The user's objects that make up a training state: what is in them, and how it goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from regrow.ckpt import flatten, perrank, plain, private, rng
from regrow.ckpt.firststep import FirstStep
from regrow.ckpt.manifest import Record
from regrow.ckpt.materialise import materialise
from regrow.ckpt.perrank import PerRank
from regrow.errors import OperationalError
from regrow.wire import GenerationSpec

_EXTRA_STATE = "_extra_state"

ReadTensors = Callable[[list[str]], dict[str, torch.Tensor]]
"""Reads stored tensors by name into new memory, each byte verified."""


class Live:
    """Live tensors by canonical name at one moment, and the plain state around them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.copies: list[tuple[str, torch.Tensor]] = []
        """Further tensors that are loaded with what is stored under a name, and not saved."""
        self.others: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        """id(parameter) -> canonical name."""
        self.composed: dict[str, torch.Tensor] = {}
        """Tensors that are stored as their parts (quantised ones), whole."""


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
        self.optimizer = optimizer
        self._schedulers = private.schedulers_of(scheduler)
        self._data = data
        self._extra = dict(extra or {})
        self._aliases = dict(aliases or {})
        self._generators = dict(generators or {})

    def materialise(self) -> None:
        """Make optimizer state exist that the optimizer would make at its first step."""
        for one in flatten.optimizers_of(self.optimizer):
            materialise(one)

    def collect(self, rank: int = 0) -> Live:
        """Name everything that there is now; `rank` is ours, for what is stored for each rank."""
        live = Live()
        live.names = flatten.parameter_names(self._model, self._aliases)
        model = flatten.model_tensors(self._model, self._aliases)
        optimizer = flatten.optimizer_state(self.optimizer, live.names)
        live.tensors = {f"model.{name}": value for name, value in model.tensors.items()}
        live.tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors.items()}
        live.copies = [(f"model.{name}", value) for name, value in model.copies]
        live.copies += [(f"optimizer.{name}", value) for name, value in optimizer.copies]
        live.others = {
            "model": {name: plain.encode(value, f"model.{name}") for name, value in model.others.items()},
            "values": optimizer.others,
            "extra": {key: self._split(key, thing, rank, live) for key, thing in self._extra.items()},
        }
        live.tensors = self._unwrapped(live)
        live.copies = [part for name, value in live.copies for part in flatten.unwrap(name, value).items()]
        return live

    def _split(self, key: str, thing: Any, rank: int, live: Live) -> Any:
        if isinstance(thing, PerRank):
            return flatten.split_tensors(thing.thing.state_dict(), perrank.prefix_of(rank, key), live.tensors)
        return flatten.split_tensors(thing.state_dict(), f"extra.{key}", live.tensors)

    def _unwrapped(self, live: Live) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in live.tensors.items():
            parts = flatten.unwrap(name, value)
            if name not in parts:
                live.composed[name] = value
            found |= parts
        return found

    def unchecked(self, live: Live) -> tuple[str, ...]:
        """Names of tensors of the model that may be infinite: buffers (masks), not parameters."""
        mine = {f"model.{name}" for name in live.names.values()}
        whole = {part: name for name, value in live.composed.items() for part in flatten.unwrap(name, value)}
        return tuple(name for name in live.tensors if name.startswith("model.") and whole.get(name, name) not in mine)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        return flatten.optimizers_of(self.optimizer)

    @property
    def schedulers(self) -> list[Any]:
        """All schedulers."""
        return self._schedulers

    def private_state(self, live: Live) -> dict[str, Any]:
        """This rank's own plain state."""
        return {
            "rng": rng.capture(self._generators),
            "groups": private.groups(self.optimizer, live.names),
            "data": None if self._data is None else plain.encode(self._data.state_dict(), "data"),
            **live.others,
        }

    def scheduler_state(self) -> list[Any]:
        """Job-wide plain state of the schedulers."""
        return [plain.encode(one.state_dict(), "scheduler") for one in self._schedulers]

    def first_step(self, rank: int, step: int, live: Live) -> FirstStep:
        """A watch over what was restored of `step`, until the first update."""
        return FirstStep(lambda: self.collect(rank).tensors, self.optimizers(), step=step, leave_out=self.unchecked(live))

    def job_facts(self, spec: GenerationSpec, more: Mapping[str, Any]) -> dict[str, Any]:
        """Job-wide plain facts for the record; `more`: the user's."""
        return {
            "scheduler": self.scheduler_state(),
            "batch": {"global_batch": spec.global_batch, "micro_batch": spec.micro_batch, "micro_batches": list(spec.micro_batches)},
            "layers_per_stage": list(spec.layers_per_stage),
            "torch": str(torch.__version__),
            **plain.encode(more, "facts"),
        }

    def load(
        self, record: Record, saved: dict[int, dict[str, Any]], live: Live, spec: GenerationSpec, rank: int, read: ReadTensors
    ) -> None:
        """Put everything back that is not a tensor; the tensors of `live` are loaded already.

        Args:
            record: Of the checkpoint.
            saved: Private state by the rank that saved it.
            live: From `collect`, its tensors loaded.
            spec: The generation that restores.
            rank: Ours in it.
            read: For the tensors of per-rank state.

        Raises:
            OperationalError: something is missing, or cannot follow the change of mesh.
        """
        same_mesh = record.mesh == spec.mesh
        own = saved[rank] if same_mesh else saved[0]
        self._load_optimizer(saved, live)
        self._load_extra(own, saved, live)
        self._load_per_rank(record, saved, spec, rank, read)
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
        if self.optimizer is None:
            return
        groups = [group for number in sorted(saved) for group in saved[number].get("groups", [])]
        private.restore_groups(self.optimizer, live.names, groups)
        values = {key: value for one in saved.values() for key, value in one.get("values", {}).items()}
        private.set_values(self.optimizer, live.names, values)

    def _load_extra(self, own: dict[str, Any], saved: dict[int, dict[str, Any]], live: Live) -> None:
        tensors = live.tensors | live.composed
        for key, thing in self._extra.items():
            if isinstance(thing, PerRank):
                continue
            if key not in own.get("extra", {}):
                raise OperationalError(f"extra state {key!r} is not in the checkpoint", hint=f"it has {sorted(own.get('extra', {}))}")
            thing.load_state_dict(flatten.join_tensors(own["extra"][key], tensors))
        stored = {name: value for one in saved.values() for name, value in one.get("model", {}).items()} | own.get("model", {})
        for name in live.others["model"]:
            if name not in stored:
                raise OperationalError(f"extra state of the model {name} is not in the checkpoint")
            for module in flatten.modules_of(self._model):
                for path, part in module.named_modules():
                    if f"{flatten.clean_name(path)}.{_EXTRA_STATE}".lstrip(".") == name:
                        part.set_extra_state(plain.decode(stored[name]))

    def _load_per_rank(self, record: Record, saved: dict[int, dict[str, Any]], spec: GenerationSpec, rank: int, read: ReadTensors) -> None:
        for key, mark in self._extra.items():
            if not isinstance(mark, PerRank):
                continue
            states = {number: one["extra"][key] for number, one in saved.items() if key in one.get("extra", {})}
            if len(states) != len(saved):
                raise OperationalError(f"per-rank state {key!r} is not in the checkpoint", hint="it was saved without it")
            readers = {number: partial(_joined, state, read) for number, state in states.items()}
            state = perrank.choose(mark, key, readers, saved_mesh=record.mesh, mesh=spec.mesh, rank=rank)
            if state is not None:
                mark.thing.load_state_dict(state)


def _joined(state: Any, read: ReadTensors) -> Any:
    return flatten.join_tensors(state, read(flatten.stored_names(state)))
