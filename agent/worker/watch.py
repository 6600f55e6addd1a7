"""Looks at parameters and optimizer state around each update: digest for the other replicas, check at rest for ourselves."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester, Digests, local_part
from regrow.ckpt.finite import unpublished

WHOLE = (0, 1)
MAX_PARTS = 1000
_HEADROOM = 0.8
"""Parts are cut by tensors, so they are not quite equal."""
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
    # Not by isinstance(.., Shard): the placement that FSDP2 gives to tensor-parallel parameters, _StridedShard, is no Shard in torch 2.13.
    cut = [name for name, placement in zip(names, tensor.placements, strict=False) if not placement.is_replicate()]
    return len(names) == len(tensor.placements) and all(name in REPLICA_AXES for name in cut)


class StateWatch:
    """Digest every `every` steps and the check at rest before the update that follows each digest.

    At rest: between the update of step n and the update of step n+1 nothing may write parameters or optimizer state, so
    their digest must not change; when it does, memory did, or code that should not.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        digester: Digester,
        faults: Faults,
        *,
        every: int = 0,
        budget: float = 0.0,
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._digester = digester
        self._suspects: tuple[str, ...] = ()
        self._faults = faults
        self._every = every or int(budget > 0.0)
        self._budget = budget
        self._rest: tuple[Digests, Digests] | None = None
        self._resting_part = WHOLE
        self._mismatch = ""
        self._cost = 0.0
        self.parts = 1
        """In how many steps everything is looked at once."""
        self.num_checks = 0

    def before_sync(self) -> str:
        """Name of the first parameter whose own gradient is not finite; empty when all are, or checks are off."""
        if not self._every:
            return ""
        found = [(name, local_part(parameter.grad)) for name, parameter in named_parameters(self._modules) if parameter.grad is not None]
        if not found or bool(torch.isfinite(torch.stack([gradient.detach().sum(dtype=torch.float32) for _, gradient in found]).sum())):
            return ""
        name = next((name for name, gradient in found if not bool(torch.isfinite(gradient).all())), "")
        if name:
            self._suspects = (f"model.{name}", f"optimizer.{name}.")
        return name

    def doubt(self, reason: str) -> None:
        """Why a snapshot was not published: what it says of a tensor that is not finite is looked into."""
        name = unpublished(reason)
        if name:
            self._suspects = (name,)

    def poisoned(self) -> str:
        """Name of a parameter or tensor of optimizer state that is not finite after an update from a gradient that was not, or in a
        snapshot that was refused; empty: none. Such state can last without any sign in loss and gradients (a row of an embedding that
        is never used), and nothing can be saved meanwhile."""
        for name, tensor in self._tensors() if self._suspects else ():
            if not name.startswith(self._suspects) or not tensor.is_floating_point():
                continue
            values = local_part(tensor)
            declared = name.startswith("optimizer.") and name not in self._suspects  # some optimizers keep infinities by right
            if bool((torch.isnan(values) if declared else ~torch.isfinite(values)).any()):
                return name
        self._suspects = ()
        return ""

    def before_update(self) -> None:
        """Compare with the digest that was taken after the update before. Once a step; later calls do nothing."""
        if self._rest is None:
            return
        replicated, sharded = self._rest
        self._rest = None
        self.num_checks += 1
        now = self._take(self._resting_part)
        self._mismatch = self._mismatch or replicated.first_difference(now[0]) or sharded.first_difference(now[1])

    def applied(self, step: int, *, whole: bool = False) -> str:
        """The update of `step` is applied: its digest as hex, empty when none is due or nothing is replicated."""
        self._rest = None
        self._faults.updated(step)
        if not self._every or (step % self._every and not whole):
            return ""
        self._resting_part = WHOLE if whole or self.parts == 1 else (step // self._every % self.parts, self.parts)
        begin = time.process_time()
        self._rest = self._take(self._resting_part)
        self._cost = 2 * (time.process_time() - begin) * self._resting_part[1]
        return self._rest[0].text if self._rest[0].names else ""

    def resting(self, step: int) -> None:
        """From here to the next update nothing may change."""
        self._faults.at_rest(step)

    def agreed_cost(self, digest_us: int, step_us: int) -> None:
        """Choose the number of parts so that a step's part costs the budget at most; the same on all ranks."""
        if self._budget > 0.0 and step_us > 0:
            self.parts = min(MAX_PARTS, max(1, math.ceil(digest_us / (_HEADROOM * self._budget * step_us))))

    def cost_seconds(self) -> float:
        """CPU time of a whole digest and its check at rest."""
        return self._cost

    def take_mismatch(self) -> str:
        """Name of the first tensor that changed at rest since the last call; empty: none."""
        found, self._mismatch = self._mismatch, ""
        return found

    def _take(self, part: tuple[int, int]) -> tuple[Digests, Digests]:
        """Digests of what is replicated over the data axis, and of what is sharded over it."""
        replicated: list[tuple[str, torch.Tensor]] = []
        sharded: list[tuple[str, torch.Tensor]] = []
        for name, tensor in part_of(list(self._tensors()), *part):
            (replicated if is_replicated(tensor) else sharded).append((name, tensor))
        return self._digester.digest(replicated), self._digester.digest(sharded)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_parameters(self._modules):
            yield f"model.{name}", tensor
        for name, tensor in named_optimizer_state(self._modules, self._optimizers):
            yield f"optimizer.{name}", tensor


def part_of(tensors: list[tuple[str, torch.Tensor]], part: int, parts: int) -> list[tuple[str, torch.Tensor]]:
    """The tensors of part 0..parts-1: runs of about equal size, every tensor in exactly one. Replicas cut alike."""
    if parts == 1:
        return tensors
    sizes = [local_part(tensor).numel() for _, tensor in tensors]
    total, before = sum(sizes) or 1, 0
    chosen: list[tuple[str, torch.Tensor]] = []
    for entry, size in zip(tensors, sizes, strict=True):
        if min(parts - 1, (2 * before + size) * parts // (2 * total)) == part:
            chosen.append(entry)
        before += size
    return chosen
