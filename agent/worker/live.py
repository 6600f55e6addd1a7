"""State without the disk: what survivors hold in memory is taken up by the next generation, where all of it is there at one step.

A rank's state counts when nothing wrote to it since the boundary of its last completed step: not the optimizer (it may have
been stopped in the middle of an update), and nobody else (version counters of all tensors tell, so batch statistics that a
broken forward pass moved are seen too; `unseen` tells of writes that they do not count). It is used when every part that a rank of the new mesh needs is held by somebody at
one step that is not older than the checkpoint: always so for replicas (DDP, HSDP), never for shards that died with their
only holder. Who lacks it gets it from a peer. On another mesh the parts are other ones: then they are cut and carried
(`handover`).

Not offered, so that the disk is used: loaders with a state (`data=`), `extra=`, named generators. A rank that was replaced
continues with the random streams of the process before it where that ran on the same node and mesh (`streams`), else with
streams derived anew, as after a change of mesh.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from regrow import wire
from regrow.agent.worker import handover, streams
from regrow.agent.worker.replicas import Replicas
from regrow.agent.worker.unseen import Marks
from regrow.ckpt import flatten, plain, private, rng
from regrow.ckpt.exchange import Exchange
from regrow.ckpt.layout import Box
from regrow.ckpt.materialise import materialise
from regrow.ckpt.plan import encode_boxes

_log = logging.getLogger("regrow.worker")


class Held(msgspec.Struct, kw_only=True):
    """State of a rank at a completed step, out of the hands of the script."""

    step: int
    samples: int
    shard: str
    """Digest of the names and boxes of all tensors: who has the same holds the same parts of the whole."""
    tensors: dict[str, torch.Tensor]
    """The data alone: a parameter has hooks, and they hold its model, its groups, their threads and sockets."""
    schedules: list[Any]
    groups: list[Any]
    values: dict[str, Any]
    boxes: list[Box]
    """Of the whole tensors, by name as in `tensors`; not those of copies (tied weights)."""
    streams: rng.Streams


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says before the state is taken up."""

    step: int = -1
    """Of what it holds; -1: nothing."""
    samples: int = 0
    has: str = ""
    needs: str = ""
    num_boxes: int = 0
    """That it would have to tell of, if the mesh is another one."""
    able: bool = True


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Who gives what to whom: {rank that lacks it: rank that holds it}."""

    step: int
    samples: int
    givers: dict[int, int]


def choose(offers: list[Offer], oldest: int) -> Source | None:
    """The newest step at which every needed part is held by somebody; None: the disk.

    Args:
        offers: in rank order.
        oldest: step of the checkpoint; what is older in memory is of no use.
    """
    if not all(offer.able for offer in offers):
        return None
    for step in sorted({offer.step for offer in offers if offer.step >= max(oldest, 1)}, reverse=True):
        holders: dict[str, int] = {}
        for rank, offer in enumerate(offers):
            if offer.step == step:
                holders.setdefault(offer.has, rank)
        if all(offer.needs in holders for offer in offers):
            lacking = {rank: holders[offer.needs] for rank, offer in enumerate(offers) if (offer.step, offer.has) != (step, offer.needs)}
            samples = max(offer.samples for offer in offers if offer.step == step)
            return Source(step=step, samples=samples, givers=lacking)
    return None


class LiveState:
    """The live training state of a rank: marked at each boundary, held when the generation ends, taken up in the next."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        aliases: Any,
        *,
        able: bool,
        kept: streams.StreamFile | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedulers = private.schedulers_of(scheduler)
        self._aliases = dict(aliases or {})
        self._able = able
        self._kept = kept
        self._replicas = replicas
        self._updating = False
        self._step = -1
        self._samples = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []
        self._marks = Marks(())
        self._mark = 0
        self._streams: rng.Streams | None = None
        self._schedules: list[Any] = []

    def updating(self) -> None:
        """The optimizer is about to write."""
        self._updating = True

    def resting(self, step: int, samples: int) -> None:
        """The boundary of `step` is over: what there is now is the state of that step."""
        if self._able:
            self._rest(step, samples)
        if self._replicas is not None:  # a peer may die meanwhile: what is marked counts
            self._replicas.boundary(lambda: _boxes(self._collect()[0]))

    def _rest(self, step: int, samples: int) -> None:
        if not self._versions:
            tensors = self._collect()[0]
            self._tensors = {name: flatten.local_of(value) for name, value in tensors.items()}
            self._marks = Marks(value for name, value in tensors.items() if name.startswith("model."))
        self._step, self._samples, self._updating = step, samples, False
        self._versions = [value._version for value in self._tensors.values()]  # noqa: SLF001
        self._mark = self._marks.take()
        self._streams = rng.now()
        if self._kept is not None:
            self._kept.write(step, self._streams)
        self._schedules = [plain.encode(one.state_dict(), "scheduler") for one in self._schedulers]

    def still(self, held: Held) -> bool:
        """Is what was held untouched? Asked when it was copied."""
        if self._updating or self._step != held.step:
            return False
        return [value._version for value in self._tensors.values()] == self._versions and self._marks.take() == self._mark  # noqa: SLF001

    def hold(self) -> Held | None:
        """The state of the last completed step, if it is whole; None when something wrote to it since."""
        if self._updating or self._step < 1 or self._streams is None:
            return None
        tensors, values, names = self._collect()
        local = {name: flatten.local_of(value) for name, value in tensors.items()}
        known = {name: value.data_ptr() for name, value in self._tensors.items()}
        if {name: value.data_ptr() for name, value in local.items()} != known:
            return None
        if [value._version for value in local.values()] != self._versions or self._marks.take() != self._mark:  # noqa: SLF001
            return None
        boxes = {name: flatten.item_of(name, value).box for name, value in tensors.items()}
        return Held(
            step=self._step,
            samples=self._samples,
            shard=_digest(list(boxes.values())),
            tensors={name: value.detach() for name, value in local.items()},
            schedules=self._schedules,
            groups=list(private.groups(self._optimizer, names)),
            values=values,
            boxes=[box for name, box in boxes.items() if "#" not in name],
            streams=self._streams,
        )

    def take_up(self, held: Held | None, spec: wire.GenerationSpec, rank: int, exchange: Exchange, group: Any) -> Source | None:
        """Put what is held somewhere into the objects of the script. Collective; None on all ranks: use the disk."""
        for one in flatten.optimizers_of(self._optimizer):
            materialise(one)
        tensors, _, names = self._collect()
        began = time.perf_counter()
        boxes = _boxes(tensors)
        mine = Offer(needs=_digest(boxes), num_boxes=len(tensors), able=self._able)
        if held is not None:
            mine = msgspec.structs.replace(mine, step=held.step, samples=held.samples, has=held.shard)
        offers = [msgspec.json.decode(data, type=Offer) for data in exchange(msgspec.json.encode(mine))]
        oldest = spec.restore.step if spec.restore else 0
        source = choose(offers, oldest)
        if source is None:
            source = self._reshape(held, offers, oldest, tensors, boxes, names, spec, rank, exchange, group)
            if source is None:
                told = (
                    "no whole state in memory (steps held: %s): what came after step %d, or a later snapshot in memory, is computed again"
                )
                _log.log(logging.WARNING if rank == 0 else logging.INFO, told, [offer.step for offer in offers], oldest)
            return source
        local = {name: flatten.local_of(value) for name, value in tensors.items()}
        if rank not in source.givers:
            assert held is not None
            for name, value in local.items():
                value.copy_(held.tensors[name])
            self._load(held.schedules, held.groups, held.values, names)
            rng.put_back(held.streams)
        for taker, giver in sorted(source.givers.items()):
            if rank == giver:
                _give(local, self._plain(names), taker, group)
            elif rank == taker:
                schedules, groups, values, stream = _take(local, giver, group)
                self._load(schedules, groups, values, names)
                rng.derive(stream, step=source.step, rank=rank, world_size=spec.world_size, generators={})
                mine = self._kept.read(source.step) if self._kept is not None else None
                if mine is not None:
                    rng.put_back(mine)
        _log.info(
            "in place: state of step %d from memory, %d ranks from peers, %.3f s",
            source.step,
            len(source.givers),
            time.perf_counter() - began,
        )
        return source

    def _reshape(
        self,
        held: Held | None,
        offers: list[Offer],
        oldest: int,
        tensors: dict[str, torch.Tensor],
        boxes: list[Box],
        names: dict[int, str],
        spec: wire.GenerationSpec,
        rank: int,
        exchange: Exchange,
        group: Any,
    ) -> Source | None:
        """Cut and carry what is held, for a mesh on which ranks need other parts. The same answer on all ranks."""
        newest = max(offer.step for offer in offers)
        if not all(offer.able for offer in offers) or newest < max(oldest, 1) or spec.world_size == 1:
            return None
        if sum(offer.num_boxes for offer in offers) > handover.MOST_BOXES:
            return None
        began = time.perf_counter()
        needs, has = [offer.needs for offer in offers], [offer.has for offer in offers]
        mine = handover.Catalog(needs=tuple(boxes) if needs.index(needs[rank]) == rank else ())
        if held is not None:
            mine = msgspec.structs.replace(
                mine,
                step=held.step,
                samples=held.samples,
                holds=tuple(held.boxes) if has.index(has[rank]) == rank else (),
                schedules=held.schedules,
                groups=held.groups,
                values=held.values,
                random=plain.encode(held.streams.torch_state, "rng"),
            )
        catalogs = [msgspec.json.decode(data, type=handover.Catalog) for data in exchange(msgspec.json.encode(mine))]
        plan = handover.plan(handover.filled(catalogs, needs, has), oldest, rank)
        if plan is None:
            return None
        local = {name: flatten.local_of(value) for name, value in tensors.items()}
        with torch.no_grad():
            num_bytes = handover.carry(plan, rank, held.tensors if held is not None else {}, local, group)
        holding = [catalog for catalog in catalogs if catalog.step == plan.step]
        groups = [entry for catalog in holding for entry in catalog.groups]
        values = {name: value for catalog in holding for name, value in catalog.values.items()}
        self._load(catalogs[plan.first].schedules, groups, values, names)
        stream = {"torch": catalogs[plan.first].random}
        rng.derive(stream, step=plan.step, rank=rank, world_size=spec.world_size, generators={})
        _log.info("in place: state of step %d re-sharded, %d bytes here, %.3f s", plan.step, num_bytes, time.perf_counter() - began)
        return Source(step=plan.step, samples=plan.samples, givers=plan.receivers)

    def _collect(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[int, str]]:
        names = flatten.parameter_names(self._model, self._aliases)
        model = flatten.model_tensors(self._model, self._aliases)
        optimizer = flatten.optimizer_state(self._optimizer, names)
        tensors = {f"model.{name}": value for name, value in model.tensors.items()}
        tensors |= {f"model.{name}#{index}": value for index, (name, value) in enumerate(model.copies)}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors.items()}
        tensors |= {f"optimizer.{name}#{index}": value for index, (name, value) in enumerate(optimizer.copies)}
        if model.others:
            self._able = False
        return dict(sorted(tensors.items())), dict(optimizer.others), names

    def _plain(self, names: dict[int, str]) -> bytes:
        schedules = [plain.encode(one.state_dict(), "scheduler") for one in self._schedulers]
        values = dict(flatten.optimizer_state(self._optimizer, names).others)
        return msgspec.json.encode([schedules, list(private.groups(self._optimizer, names)), values, rng.capture({})])

    def _load(self, schedules: list[Any], groups: list[Any], values: dict[str, Any], names: dict[int, str]) -> None:
        for scheduler, state in zip(self._schedulers, schedules, strict=True):
            scheduler.load_state_dict(plain.decode(state))
        if self._optimizer is not None:
            private.restore_groups(self._optimizer, names, groups)
            private.set_values(self._optimizer, names, values)


def _boxes(tensors: dict[str, torch.Tensor]) -> list[Box]:
    return [flatten.item_of(name, value).box for name, value in tensors.items()]


def _digest(boxes: list[Box]) -> str:
    return xxhash.xxh3_128_hexdigest(encode_boxes(boxes))


def _give(tensors: dict[str, torch.Tensor], rest: bytes, taker: int, group: Any) -> None:
    dist.send(torch.tensor([len(rest)], dtype=torch.int64), taker, group=group)
    dist.send(torch.frombuffer(bytearray(rest), dtype=torch.uint8), taker, group=group)
    for value in tensors.values():
        if value.numel():
            dist.send(value.cpu().contiguous(), taker, group=group)


def _take(tensors: dict[str, torch.Tensor], giver: int, group: Any) -> list[Any]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, giver, group=group)
    rest = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(rest, giver, group=group)
    for value in tensors.values():
        if value.numel():
            buffer = torch.empty(value.shape, dtype=value.dtype)
            dist.recv(buffer, giver, group=group)
            value.copy_(buffer)
    return msgspec.json.decode(rest.numpy().tobytes())
