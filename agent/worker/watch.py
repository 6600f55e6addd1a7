"""Looks at parameters and optimizer state around each update: digest for the other replicas, check at rest for ourselves."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester, Digests, Words, local_part
from regrow.agent.worker.received import REPLICA_AXES, GatherWatch, Received
from regrow.ckpt.finite import unpublished
from regrow.places import MASK
from regrow.wire import AT_REST, DigestEvidence

WHOLE = (0, 1)
Named = list[tuple[str, torch.Tensor]]
MAX_PARTS = 1000
_HEADROOM = 0.8
"""Parts are cut by tensors, so they are not quite equal."""


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
    return state_of(named_parameters(modules), optimizers)


def state_of(parameters: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for parameters that were found already."""
    for name, parameter in parameters:
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


def num_shards(tensor: torch.Tensor) -> int:
    """Over how many replicas a tensor is cut whose shards are held in copies (HSDP: replicated over an outer axis of the data axis,
    sharded over an inner one); 0 where it is not."""
    if not isinstance(tensor, DTensor):
        return 0
    names, sizes = tensor.device_mesh.mesh_dim_names or (), tensor.device_mesh.shape
    data = [
        (size, placement.is_replicate())
        for name, size, placement in zip(names, sizes, tensor.placements, strict=False)
        if name not in REPLICA_AXES
    ]
    held = len(data) == 2 and len(names) == len(tensor.placements) and data[0][0] > 1 and data[0][1] and not data[1][1]
    return data[1][0] if held else 0


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
        self._looked: tuple[Named, Named] = ([], [])
        self._numbers: Words = np.empty(0, dtype=np.uint64)
        self._names: tuple[str, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._told: tuple[str, ...] = ()
        self._places = ""
        self._gathers = GatherWatch(modules, digester)
        self._received: Received | None = None
        self._apart = 0
        self._copies = ""
        self._mismatch = ""
        self._cost = 0.0
        self._parts_looked = 1
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
        self._received = self._gathers.compare()
        self._cost += self._gathers.seconds * self._parts_looked
        now = self._digests()  # of the tensors that were looked at: at rest, nobody puts others in their place
        self._mismatch = self._mismatch or replicated.first_difference(now[0]) or sharded.first_difference(now[1])

    def applied(self, step: int, *, whole: bool = False) -> str:
        """The update of `step` is applied: its digest as hex, AT_REST when nothing is replicated, empty when none is due."""
        self._rest = None
        self._faults.updated(step)
        if not self._every or (step % self._every and not whole):
            return ""
        part = WHOLE if whole or self.parts == 1 else (step // self._every % self.parts, self.parts)
        begin = time.process_time()
        self._look(part)
        self._rest = self._digests()
        self._cost = 2 * (time.process_time() - begin) * part[1]
        self._parts_looked = part[1]
        self._places = self._placed(self._rest[0])
        self._gathers.arm(part_of([entry for entry in named_parameters(self._modules) if not is_replicated(entry[1])], *part, whole=True))
        if self._apart:
            self._copies = f"{self._apart}/{self._rest[0].text}"
            return AT_REST
        return self._rest[0].text if self._rest[0].names else AT_REST if self._rest[1].names else ""

    def take_copies(self) -> str:
        """Beside AT_REST, under HSDP: "<k>/<hex>" of what every k-th replica holds, too. Once a step."""
        found, self._copies = self._copies, ""
        return found

    def take_evidence(self, *, names: bool) -> DigestEvidence | None:
        """Beside the digest, once a step: what tells the tensor that differs, and what was received otherwise than its owner has it.

        Args:
            names: tell the names that places refer to, when they are others than those told last.
        """
        places, self._places = self._places, ""
        received, self._received = self._received, None
        told: tuple[str, ...] = ()
        sizes: tuple[int, ...] = ()
        if names and places and self._names != self._told:
            told, sizes = self._names, self._sizes
            self._told = told
        if not places and (received is None or not received.wrong):
            return None
        wrong = received.wrong if received is not None else {}
        receivers = received.receivers if received is not None else 0
        return DigestEvidence(places=places, names=told, sizes=sizes, received=wrong, receivers=receivers)

    def _placed(self, shared: Digests) -> str:
        """Three words that tell, of two ranks with one differing tensor, which one and where (places.py)."""
        if not shared.names:
            return ""
        parts = self._digester.keyed(self._looked[0], shared)
        sums = (int((parts * self._numbers).sum()), int(shared.sums.sum()), int(shared.weighted.sum()))
        return "".join(f"{value & MASK:016x}" for value in sums)

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

    def _look(self, part: tuple[int, int]) -> None:
        """Find what is compared with other replicas, and what only with itself. The state of a sharded parameter is sharded, also
        what is not cut of it (the count of steps): that replicas agree on a counter would not mean that they agree."""
        parameters = list(named_parameters(self._modules))
        cut = {f"optimizer.{name}": num_shards(parameter) for name, parameter in parameters if not is_replicated(parameter)}
        tensors = [(f"model.{name}", parameter) for name, parameter in parameters]
        tensors += [(f"optimizer.{name}", tensor) for name, tensor in state_of(parameters, self._optimizers)]
        names = tuple(name for name, _ in tensors)
        if names != self._names:
            parts = [local_part(tensor) for _, tensor in tensors]
            self._names, self._sizes = names, tuple(one.numel() * one.element_size() for one in parts)
        numbers = {name: number for number, name in enumerate(self._names, start=1)}
        replicated: Named = []
        copied: Named = []
        sharded: Named = []
        apart = 0
        for name, tensor in part_of(tensors, *part):
            owner = name.rpartition(".")[0]
            shards = num_shards(tensor) or cut.get(owner, 0)
            if is_replicated(tensor) and owner not in cut:
                replicated.append((name, tensor))
            elif shards and apart in (0, shards):
                apart = shards
                copied.append((name, tensor))
            else:
                sharded.append((name, tensor))
        self._apart = apart if not replicated else 0
        self._looked = (copied, sharded) if self._apart else (replicated, sharded + copied)
        self._numbers = np.array([numbers[name] for name, _ in self._looked[0]], dtype=np.uint64)

    def _digests(self) -> tuple[Digests, Digests]:
        shared, alone = self._looked
        return self._digester.digest(shared), self._digester.digest(alone)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_parameters(self._modules):
            yield f"model.{name}", tensor
        for name, tensor in named_optimizer_state(self._modules, self._optimizers):
            yield f"optimizer.{name}", tensor


def part_of(tensors: list[tuple[str, torch.Tensor]], part: int, parts: int, *, whole: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The tensors of part 0..parts-1: runs of about equal size, every tensor in exactly one. Replicas cut alike, and with `whole`, where
    the sizes are those of whole tensors, the owners of their shards do, too."""
    if parts == 1:
        return tensors
    sizes = [tensor.numel() if whole else local_part(tensor).numel() for _, tensor in tensors]
    total, before = sum(sizes) or 1, 0
    chosen: list[tuple[str, torch.Tensor]] = []
    for entry, size in zip(tensors, sizes, strict=True):
        if min(parts - 1, (2 * before + size) * parts // (2 * total)) == part:
            chosen.append(entry)
        before += size
    return chosen
