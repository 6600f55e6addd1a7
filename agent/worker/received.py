"""What a rank receives when sharded parameters are gathered, against what their owners hold at rest (FSDP2, ZeRO-3).

Without copies of a shard there is nobody to vote with. But each shard is sent to every rank of its group, so what arrives can be compared
with the owner's own digest of it: taken at rest, after the update, before it is sent. A difference is the owner's when most receivers have
it, the receiver's when few have it (`supervisor/core/sdc.py`).

Hooks of the modules look at the parameters as the forward pass is about to use them, and again as the backward pass is: most often they
were gathered anew. The owners' sums are gathered once a step, before the update, over the group that shares the shards: 16 bytes a
parameter. Under tensor parallelism the group is that of the ranks with the same part of each tensor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from regrow.agent.worker.digest import Digester, local_part
from regrow.places import MASK, and_others, block_text, locate

Sums = tuple[int, int]
REPLICA_AXES = frozenset(("pp", "tp"))
"""Mesh axes whose shards differ by right between ranks that a digest compares; sharded over any other, nothing is compared."""
_FORWARD, _BACKWARD = "", " (for the backward pass)"
_LOOKS = (_FORWARD, _BACKWARD)


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What one comparison found."""

    wrong: dict[int, str]
    """{global rank of the owner: first parameter of it, and where, that arrived otherwise}."""
    receivers: int
    """Ranks of the group."""


@dataclasses.dataclass
class _Watched:
    """A sharded parameter, its owner's sums at rest, and the sums of what arrived."""

    name: str
    shard: DTensor
    axis: int
    """Of the device mesh: the one it is cut over."""
    dtype: torch.dtype | None = None
    """That it is gathered in."""
    own: Sums | None = None
    """None: not taken this time."""
    got: dict[str, list[Sums]] = dataclasses.field(default_factory=dict[str, list[Sums]])
    """{for which pass: of each owner's piece}."""
    sizes: list[int] = dataclasses.field(default_factory=list[int])
    """Bytes of each owner's piece."""


class GatherWatch:
    """Compares all-gathers of parameters with their owners' memory. One for all modules of a rank."""

    def __init__(self, modules: Sequence[torch.nn.Module], digester: Digester) -> None:
        self._digester = digester
        self._known: dict[str, _Watched] = {}
        self._armed: dict[str, _Watched] = {}
        self.seconds = 0.0
        """CPU time of the last comparison, all its parts."""
        for top in modules:
            for prefix, module in top.named_modules():
                if isinstance(module, FSDPModule):
                    self._hook(prefix, module)

    def _hook(self, prefix: str, module: Any) -> None:
        # After FSDP's own hook, which gathers: that one stands first.
        start = f"{prefix}." if prefix else ""
        module.register_forward_pre_hook(lambda *_: self._arrived(start, module, _FORWARD))
        module.register_forward_hook(lambda _module, _inputs, output: self._left(start, module, output))

    def _left(self, prefix: str, module: torch.nn.Module, output: Any) -> None:
        # Hooks of a tensor run in the order in which they came: FSDP's own, on the same tensors, has gathered when this one looks.
        if self._armed and torch.is_grad_enabled():
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: self._arrived(prefix, module, _BACKWARD))

    def arm(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """These parameters are looked at when they are gathered next; the same ones on all ranks of a group. They are at rest now."""
        begin = time.process_time()
        self._armed = {}
        for name, tensor in parameters:
            known = self._known.get(name)
            axis = sharded_over(tensor)
            if axis < 0 or not isinstance(tensor, DTensor):
                continue
            if known is None or known.shard is not tensor:
                known = self._known[name] = _Watched(name, tensor, axis)
            known.got = {}
            known.own = self._digester.sums(local_part(tensor).to(known.dtype)) if known.dtype is not None else None
            self._armed[name] = known
        self.seconds = time.process_time() - begin

    def _arrived(self, prefix: str, module: torch.nn.Module, look: str) -> None:
        """The module's parameters as a pass is about to use them."""
        if not self._armed:
            return
        begin = time.process_time()
        for name, parameter in module.named_parameters():
            watched = self._armed.get(prefix + name)
            if watched is None or look in watched.got or _is_shard(parameter, watched):
                continue
            if watched.dtype is None:
                watched.dtype = parameter.dtype
            if watched.own is None:
                continue
            # Copies, for NumPy may not look at FSDP's own memory: a storage that it has seen cannot be freed by resizing any more.
            pieces = _pieces(local_part(parameter.detach()), watched)
            watched.got[look] = [self._digester.sums(piece.clone()) for piece in pieces]
            watched.sizes = [piece.numel() * piece.element_size() for piece in pieces]
        self.seconds += time.process_time() - begin

    def compare(self) -> Received | None:
        """Exchange the owners' sums and compare; None when nothing was looked at. A collective of each group of shards."""
        begin = time.process_time()
        groups: dict[tuple[DeviceMesh, int], list[_Watched]] = {}
        for watched in self._armed.values():
            if watched.own is not None:
                groups.setdefault((watched.shard.device_mesh, watched.axis), []).append(watched)
        self._armed = {}
        wrong: dict[int, str] = {}
        receivers = 0
        for (mesh, axis), members in groups.items():
            group = mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
            receivers = max(receivers, len(ranks))
            for index, owned in enumerate(self._owners(members, group, len(ranks))):
                found = [text for one, sums in zip(members, owned, strict=True) if (text := _difference(one, index, sums))]
                if found:
                    wrong.setdefault(ranks[index], and_others(found[0], len(found) - 1))
        self.seconds += time.process_time() - begin
        return Received(wrong=wrong, receivers=receivers) if groups else None

    @staticmethod
    def _owners(members: list[_Watched], group: dist.ProcessGroup, size: int) -> list[list[Sums]]:
        """The sums of each owner's shards, by its index in the group."""
        device = local_part(members[0].shard).device
        mine = torch.tensor([[_signed(value) for value in one.own or (0, 0)] for one in members], dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine, group=group)
        return [[(plain & MASK, weighted & MASK) for plain, weighted in row.tolist()] for row in rows]


def sharded_over(tensor: torch.Tensor) -> int:
    """The axis of its device mesh that a tensor is cut over in whole pieces, as FSDP2 does, besides that of tensor parallelism; -1: none,
    or several."""
    if not isinstance(tensor, DTensor):
        return -1
    names = tensor.device_mesh.mesh_dim_names or ("",) * len(tensor.placements)
    cut = [
        number
        for number, (name, placement) in enumerate(zip(names, tensor.placements, strict=False))
        if name not in REPLICA_AXES and not placement.is_replicate()
    ]
    # By its name: what FSDP2 gives to tensor-parallel parameters, _StridedShard, has a dimension and is no Shard in torch 2.13.
    return cut[0] if len(cut) == 1 and isinstance(getattr(tensor.placements[cut[0]], "dim", None), int) else -1


def _is_shard(parameter: torch.Tensor, watched: _Watched) -> bool:
    """Is it still cut? Gathered it is a plain tensor, or under tensor parallelism one over that axis alone."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == watched.shard.device_mesh.ndim


def _pieces(whole: torch.Tensor, watched: _Watched) -> list[torch.Tensor]:
    """What each owner has sent."""
    placement: Any = watched.shard.placements[watched.axis]
    count = watched.shard.device_mesh.size(watched.axis)
    pieces = list(whole.chunk(count, dim=placement.dim))
    return pieces + [whole.new_empty(0)] * (count - len(pieces))


def _difference(one: _Watched, index: int, owned: Sums) -> str:
    """Where what arrived of an owner is not what it holds; empty: nowhere, or it was not gathered in this step."""
    for look in _LOOKS:
        if look not in one.got or one.got[look][index] == owned:
            continue
        plain, weighted = ((got - own) & MASK for got, own in zip(one.got[look][index], owned, strict=True))
        block = locate(plain, weighted)
        return (f"model.{one.name}, {block_text(block, one.sizes[index])}" if block else f"model.{one.name}") + look
    return ""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
