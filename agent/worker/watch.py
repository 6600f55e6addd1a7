"""Looks at parameters and optimizer state around each update: digest for the other replicas, check at rest for ourselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester, Digests, local_part

REPLICA_AXES = frozenset(("pp", "tp"))
"""Mesh axes whose shards differ by right between ranks that a digest compares; sharded over any other, nothing is compared."""


def digest_key(job: str, seed: int) -> int:
    """The key of a job's digests: the same on all ranks and in all generations."""
    return int.from_bytes(hashlib.blake2b(f"regrow digest\0{job}\0{seed}".encode(), digest_size=8).digest(), "little")


def named_parameters(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of all modules by their names, each tensor once."""
    seen: set[int] = set()
    for module in modules:
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def named_optimizer_state(modules: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the optimizers' state, as ``<parameter>.<key>``; of state that is not kept by parameter there are none."""
    for name, parameter in named_parameters(modules):
        for optimizer in optimizers:
            entries = optimizer.state.get(parameter) if hasattr(optimizer, "state") else None
            for key, value in (entries or {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}.{key}", value


def is_replicated(tensor: torch.Tensor) -> bool:
    """Do ranks with equal pp and tp coordinates hold the same bytes of this tensor?"""
    if not isinstance(tensor, DTensor):
        return True
    names = tensor.device_mesh.mesh_dim_names or ()
    sharded = [name for name, placement in zip(names, tensor.placements, strict=False) if isinstance(placement, Shard)]
    return len(names) == len(tensor.placements) and all(name in REPLICA_AXES for name in sharded)


class StateWatch:
    """Digest every `every` steps and the check at rest before the update that follows each digest.

    At rest: between the update of step n and the update of step n+1 nothing may write parameters or optimizer state, so
    their digest must not change; when it does, memory did, or code that should not.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], optimizers: Sequence[Any], digester: Digester, faults: Faults, every: int
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._digester = digester
        self._faults = faults
        self._every = every
        self._rest: tuple[Digests, Digests] | None = None
        self._mismatch = ""
        self.num_checks = 0

    def before_sync(self) -> str:
        """Name of the first parameter whose own gradient is not finite; empty when all are, or checks are off."""
        if not self._every:
            return ""
        found = [(name, local_part(parameter.grad)) for name, parameter in named_parameters(self._modules) if parameter.grad is not None]
        if not found or bool(torch.isfinite(torch.stack([gradient.detach().sum(dtype=torch.float32) for _, gradient in found]).sum())):
            return ""
        return next((name for name, gradient in found if not bool(torch.isfinite(gradient).all())), "")

    def before_update(self) -> None:
        """Compare with the digest that was taken after the update before. Once a step; later calls do nothing."""
        if self._rest is None:
            return
        replicated, sharded = self._rest
        self._rest = None
        self.num_checks += 1
        now = self._take()
        self._mismatch = self._mismatch or replicated.first_difference(now[0]) or sharded.first_difference(now[1])

    def applied(self, step: int) -> str:
        """The update of `step` is applied: its digest as hex, empty when none is due or nothing is replicated."""
        self._rest = None
        self._faults.updated(step)
        text = ""
        if self._every and step % self._every == 0:
            self._rest = self._take()
            text = self._rest[0].text if self._rest[0].names else ""
        self._faults.at_rest(step)
        return text

    def take_mismatch(self) -> str:
        """Name of the first tensor that changed at rest since the last call; empty: none."""
        found, self._mismatch = self._mismatch, ""
        return found

    def _take(self) -> tuple[Digests, Digests]:
        """Digests of what is replicated over the data axis, and of what is sharded over it."""
        replicated: list[tuple[str, torch.Tensor]] = []
        sharded: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._tensors():
            (replicated if is_replicated(tensor) else sharded).append((name, tensor))
        return self._digester.digest(replicated), self._digester.digest(sharded)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_parameters(self._modules):
            yield f"model.{name}", tensor
        for name, tensor in named_optimizer_state(self._modules, self._optimizers):
            yield f"optimizer.{name}", tensor
