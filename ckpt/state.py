"""The full state of a training process: saved by one copy into an arena, restored in place on any mesh."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from regrow.ckpt import exchange as exchanges
from regrow.ckpt import flatten, remembered, restoring
from regrow.ckpt.commit import parent_of
from regrow.ckpt.differences import FieldDifference
from regrow.ckpt.finite import is_checked
from regrow.ckpt.firststep import FirstStep
from regrow.ckpt.flatten import Item
from regrow.ckpt.launch import Accepted, launched
from regrow.ckpt.layout import Box, Image, lay_out
from regrow.ckpt.loading import Loaded, threads_of
from regrow.ckpt.manifest import Metric, directory_name
from regrow.ckpt.objects import Live, Objects
from regrow.ckpt.place import Outcome, Place, SaveCounts
from regrow.ckpt.plan import assign, decode_boxes, encode_boxes
from regrow.ckpt.protocol import Submit
from regrow.ckpt.restoring import Opened, Together
from regrow.ckpt.sharing import ReadOnce
from regrow.ckpt.sinks import DirectSink, Sink, WriterSink, WriterStuckError
from regrow.ckpt.snapshot import Late, Snapshotter
from regrow.errors import ConfigurationError, FencedError, OperationalError, RegrowError
from regrow.wire import RestorePoint, SaveReport

log = logging.getLogger("regrow.ckpt.state")
STUCK_RETRY_SECONDS = 60.0
"""A writer that did not answer in time is not asked again before this: waiting for it holds training up."""

BackPressure = Literal["skip", "wait", "fail"]


class TrainState:
    """Model, optimizer, scheduler, loader, random state and whatever else has state_dict(), as one thing.

    `step` and `samples` are the completed step and the samples consumed by the whole job at the last restore or save.

    Args:
        model: A module, or the list of this rank's pipeline stages; names must be global.
        optimizer: One or a list.
        scheduler: One or a list; state_dict() must be plain data.
        data: Loader or sampler with state_dict(); kept per rank.
        extra: More objects with state_dict()/load_state_dict() by name: GradScaler, averaged weights …
        place: Who we are.
        sink: Where snapshots go.
        exchange: Lets all ranks of the generation see all boxes, once.
        aliases: {"head.weight": "tok.weight"}: names under which a shared tensor is also known.
        generators: Named torch generators besides the default ones.
        facts: Plain facts that go into the record (batch recipe, fingerprint of the configuration …).
        back_pressure: What a save does while both arenas are in use: skip it, wait up to `wait_seconds`, or fail.
        wait_seconds: For "wait".
        column_strips: Strips of columns that large matrices are stored as (docs/checkpoint-format.md). The same on all ranks.
        accept: Differences between launch and checkpoint that are meant (`regrow.ckpt.differences`); REGROW_ACCEPT adds to it.
        check_first_step: Refuse the first update when what was restored has been changed before it.
        late_copy: Copy parameters and optimizer state while the next forward and backward run; the optimizer waits for the
            rest. Nothing but the optimizer may write to them. Without a compiler, and for devices, there is no such copy.
        read_once: What replicas on several nodes need is read by one of them and sent to the others. The same on all ranks.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        place: Place,
        sink: Sink,
        exchange: exchanges.Exchange = exchanges.alone,
        aliases: Mapping[str, str] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        facts: Mapping[str, Any] | None = None,
        back_pressure: BackPressure = "skip",
        wait_seconds: float = 30.0,
        column_strips: int = 1,
        accept: Collection[str] = (),
        check_first_step: bool = True,
        late_copy: bool = False,
        read_once: ReadOnce = "measured",
    ) -> None:
        """Nothing is read, written or allocated until the first restore or save; arguments: see the class."""
        self.step = place.spec.restore.step if place.spec.restore else 0
        self.samples = place.spec.restore.samples if place.spec.restore else 0
        self.counts = SaveCounts()
        self._objects = Objects(
            model=model, optimizer=optimizer, scheduler=scheduler, data=data, extra=extra, aliases=aliases, generators=generators
        )
        self._place, self._sink, self._exchange = place, sink, exchange
        self._facts = dict(facts or {})
        self._back_pressure, self._wait_seconds = back_pressure, wait_seconds
        self.differences: list[FieldDifference] = []
        """Between this launch and the checkpoint that was restored."""
        self.loaded: Loaded | None = None
        """What the restore read."""
        self.recalled = False
        """It was a snapshot that only memory had."""
        self.metrics: dict[str, Metric] = {}
        """How good the state is, by name: goes into the record of the next saves."""
        self._column_strips = column_strips
        self._accept = restoring.accepted(accept)
        self._check_first_step = check_first_step
        self._first_step: FirstStep | None = None
        self._restored_step = self._last_submitted = -1
        self._launched: list[dict[str, Any]] = []
        self._nonce, self._retry_at = "", 0.0
        self._names, self._items, self._live = list[str](), dict[str, Item](), dict[str, torch.Tensor]()
        self._plan_boxes: list[Box] | None = None
        self._held: list[list[Box]] = []
        self._late_copy = late_copy
        self._read_once: ReadOnce = read_once
        self._alone = self._late_names = frozenset[str]()
        self._late: tuple[Late, Submit] | None = None
        self._snapshotter: Snapshotter | None = None

    @classmethod
    def attach(cls, place: Place, *, writer: str | None, exchange: exchanges.Exchange = exchanges.alone, **objects: Any) -> TrainState:
        """Bound to the node's writer socket, or straight to storage (`writer` None; one process only)."""
        spec = place.spec
        if writer is None:
            if spec.world_size != 1:
                raise ConfigurationError("saving without a writer works for one process only", hint="start it with `regrow run`")
            return cls(place=place, sink=DirectSink(spec, Path(place.folder), place.node), exchange=exchange, **objects)
        return cls(place=place, sink=WriterSink(writer, place.hello()), exchange=exchange, **objects)

    # --- save ------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a save now would find a free arena. True before the first save. Never blocks.

        Ranks should agree on it (all or none) before they save: once true it stays true until the next save.
        """
        if self._snapshotter is None:
            return True
        try:
            free = self._sink.take() is not None
        except OperationalError as error:
            self.counts.note(self._sink.released)
            self._lose_writer(error)
            return True  # the next save connects again, or says what is wrong
        self.counts.note(self._sink.released)
        return free

    def save(self, step: int, samples: int, *, memory: bool = False) -> SaveReport:
        """Copy the state into an arena and hand it to the writer. Call it on all ranks at the same step.

        The first call of a generation also plans, allocates and lets the ranks exchange what they hold. Storage
        trouble never raises: it is in the report, and training goes on.

        Args:
            step: The completed step.
            samples: Samples consumed by the whole job after this step.
            memory: Nothing is written: the snapshot stays in the node's memory, and its buddy's. Only `regrow run` can restore it.

        Raises:
            ConfigurationError: the state cannot be stored (names the part).
        """
        started = time.perf_counter()
        outcome: Outcome = "snapshot"
        try:
            reason = self._save(step, samples, memory=memory)
            outcome = "skipped" if reason else "snapshot"
        except ConfigurationError:
            raise
        except RegrowError as error:
            outcome, reason = "failed", str(error)
        stall = time.perf_counter() - started
        self.counts.count(outcome, reason, stall)
        return self._place.report(step, outcome, reason, stall)

    def skip(self, step: int, reason: str) -> SaveReport:
        """This rank takes no snapshot of a step that others may have taken: the step is void for all, counted and told."""
        with contextlib.suppress(OperationalError):  # no writer: then nothing of the step can become durable
            self._sink.skip(step, reason)
        self.counts.count("skipped", reason, 0.0)
        return self._place.report(step, "skipped", reason)

    def prepare(self) -> None:
        """Plan and ask for arenas now, so that the first save is as short as the others. Call it on all ranks.

        Raises:
            ConfigurationError: the state cannot be stored.
        """
        self._sink.begin(self._image(self._look()).plan)

    def _save(self, step: int, samples: int, *, memory: bool) -> str:
        if step == self._last_submitted:
            return "this step was saved already"
        if step <= self._restored_step:
            raise ConfigurationError(
                f"step {step} was completed after the restore of step {self._restored_step}: the loop started anew",
                hint="count steps from what restore() returned, or use run.steps",
            )
        self.join()
        live = self._look()
        snapshotter = self._connect(live)
        arena = self._sink.take(self._wait_seconds if self._back_pressure == "wait" else 0.0)
        self.counts.note(self._sink.released)
        if arena is None:
            reason = "both arenas are still being written"
            self._sink.skip(step, reason)
            if self._back_pressure == "fail":
                raise OperationalError(reason, where=f"rank {self._place.rank} step {step}", hint="save less often or use faster storage")
            return reason
        private = self._objects.private_state(live) | {"launched": self._launched}
        submit = Submit(
            arena=arena,
            step=step,
            samples=samples,
            directory=directory_name(step, self._place.spec.generation, self._nonce),
            parent=parent_of(self._place.spec),
            private=private,
            facts=self._objects.job_facts(self._place.spec, self._facts) if self._place.rank == 0 else {},
            metrics=dict(self.metrics),
            memory=self._place.spec.mesh if memory else None,
        )
        late = snapshotter.copy(arena)
        self.step, self.samples, self._last_submitted = step, samples, step
        if late is None:
            self._hand_over(submit)
        else:
            self._sink.reserve(arena)
            self._late = (late, submit)
        return ""

    def _hand_over(self, submit: Submit) -> None:
        self._sink.submit(submit)
        self.counts.in_flight += 1
        self.counts.note(self._sink.released)

    def join(self) -> None:
        """Wait for a late copy and hand it to the writer. A hook of the optimizers calls it before they write."""
        if self._late is None:
            return
        (late, submit), self._late = self._late, None
        started = time.perf_counter()
        late.join()
        try:
            self._hand_over(submit)
        except OperationalError as error:
            self.counts.in_flight += 1
            self._lose_writer(error)
        self.counts.join_seconds = time.perf_counter() - started

    def _look(self) -> Live:
        """What there is now; must be what was planned for."""
        if not self._nonce:
            return self._bind()
        live = self._objects.collect(self._place.rank)
        if live.tensors.keys() != self._live.keys():
            changed = sorted(live.tensors.keys() ^ self._live.keys())
            raise OperationalError(f"the state has other tensors than at the first save: {', '.join(changed[:5])}")
        if any(self._moved(name, value) for name, value in live.tensors.items()):
            self._rebind(live.tensors)
        return live

    def _moved(self, name: str, value: torch.Tensor) -> bool:
        return value is not self._live[name] or flatten.local_of(value).data_ptr() != self._items[name].local.data_ptr()

    def _rebind(self, live: dict[str, torch.Tensor]) -> None:
        """Tensor objects were replaced (set_to, load_state_dict …): same layout, other memory."""
        items = flatten.items_of(live)
        for name, item in items.items():
            if item.box != self._items[name].box:
                raise OperationalError(f"tensor {name} changed its shape or placement since the first save")
        self._items, self._live = items, live
        if self._snapshotter is not None:
            self._snapshotter.bind(items, self._late_names)

    def _connect(self, live: Live) -> Snapshotter:
        if self._snapshotter is not None:
            try:
                self._sink.take()
                return self._snapshotter
            except FencedError:
                raise
            except OperationalError as error:
                self._lose_writer(error)
        left = self._retry_at - time.monotonic()
        if left > 0:
            raise OperationalError(f"the checkpoint writer did not answer; asked again in {left:.0f} s")
        image = self._image(live)
        try:
            arenas = self._sink.prepare(image.plan)
        except WriterStuckError:
            self._retry_at = time.monotonic() + STUCK_RETRY_SECONDS
            raise
        snapshotter = Snapshotter(image, arenas, threads=threads_of(len(self._place.local_ranks), waits=False))
        snapshotter.bind(self._items, self._late_names)
        self._snapshotter = snapshotter
        return snapshotter

    def _image(self, live: Live) -> Image:
        if self._plan_boxes is None:  # not before the first save: a restore has no use for it
            self._plan_boxes, self._held = assign(self._held, self._column_strips)[self._place.rank], []
        image = lay_out(self._plan_boxes, {"job": self._place.spec.job, "rank": str(self._place.rank)})
        plan = msgspec.structs.replace(image.plan, may_be_infinite=self._objects.unchecked(live))
        return msgspec.structs.replace(image, plan=plan)

    def _lose_writer(self, error: OperationalError) -> None:
        self.counts.lost(error.what)
        self._snapshotter = None
        self._late = None

    # --- what there is ---------------------------------------------------------------------------------------------

    def _bind(self) -> Live:
        """Name everything, exchange boxes and a nonce with all ranks, plan who writes what. Once a generation."""
        self._objects.materialise()
        live = self._objects.collect(self._place.rank)
        if not self._nonce:
            self._launched = launched(self._objects.optimizer, live.names)
            for one in self._objects.optimizers() if self._late_copy else ():
                one.register_step_pre_hook(lambda *_: self.join())
        self._items = flatten.items_of(live.tensors)
        self._live = live.tensors
        if self._late_copy:
            unchecked = set(self._objects.unchecked(live))
            self._late_names = frozenset(name for name in live.tensors if is_checked(name) and name not in unchecked)
        mine = uuid.uuid4().hex[:8].encode() + encode_boxes([item.box for item in self._items.values()])
        answers = self._exchange(mine)
        self._held = held = [decode_boxes(answer[8:]) for answer in answers]
        self._nonce, self._plan_boxes = answers[0][:8].decode(), None
        self._names = sorted({box.name for boxes in held for box in boxes})
        others = {box for rank in self._place.local_ranks if rank != self._place.rank for box in held[rank]}
        self._alone = frozenset(box.name for box in held[self._place.rank] if box not in others)
        return live

    # --- restore ---------------------------------------------------------------------------------------------------

    def restore(self, point: RestorePoint | None = None) -> int:
        """Load a checkpoint in place, or where the generation allows it a later snapshot that nodes have in memory (`recalled`). Call
        it on all ranks; without a point (and none in the generation) it is a fresh start.

        Returns:
            The completed step that was restored; 0 for a fresh start.

        Raises:
            DamagedCheckpointError: bytes are not what was committed; names file and tensor. Live state is then undefined.
            OperationalError: names or shapes do not match the model; lists them.
        """
        point = point or self._place.spec.restore
        self.join()
        if point is None:  # a snapshot that cannot be taken up to the end leaves nothing to start afresh from: there must be a checkpoint
            return 0
        if self._place.spec.memory and (step := self._recall(point)):
            return step
        return self._take_up(restoring.open_point(self._place.folder, point))

    def _recall(self, point: RestorePoint) -> int:
        """The step of what is in memory; 0: nothing is, or not all ranks could take it up."""
        self.recalled, problem = False, ""
        with remembered.newest(self._exchange, self._place, self._sink, point) as opened:
            if opened is None:
                return 0
            try:
                self._take_up(opened)
            except (RegrowError, OSError) as error:
                problem = f"rank {self._place.rank}: {error}"
            if problem := remembered.agree(self._exchange, problem):
                log.warning("snapshot in memory not taken: %s", problem)
                return 0
        self.recalled = True
        return self.step

    def _take_up(self, opened: Opened) -> int:
        live, spec = self._bind(), self._place.spec
        restoring.check_names(opened, self._names)
        self.differences = restoring.compare(opened, self._objects.job_facts(spec, self._facts), self._launched, spec, self._accept)
        together = Together(self._exchange, self._place, self._held, self._read_once)
        copies = [flatten.item_of(name, value) for name, value in live.copies]
        self.loaded = restoring.load(opened, self._items, copies, self._sink, self._alone, together)
        self._objects.load(opened.record, opened.private, live, spec, self._place.rank, opened.read)
        accepted = {one.field for one in self.differences if one.accepted}
        Accepted(self._objects.optimizer, live.names, self._launched, opened.groups()).apply(accepted, self._objects.schedulers)
        self.step = self._restored_step = opened.record.step
        self.samples = opened.record.samples
        if self._first_step is not None:
            self._first_step.end()
        if self._check_first_step:
            self._first_step = self._objects.first_step(self._place.rank, self.step, live)
        return self.step

    def close(self) -> None:
        """Leave the writer; a snapshot that was handed over is still written."""
        self.join()
        with contextlib.suppress(OSError):
            self._sink.close()
