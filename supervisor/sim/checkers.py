"""Safety checkers: always on, all-knowing, and independent of the fences that they watch."""

from __future__ import annotations

from collections.abc import Iterable

from regrow import wire
from regrow.errors import InternalError
from regrow.supervisor.core import ledger
from regrow.supervisor.core.invariants import check
from regrow.supervisor.core.view import View


class SafetyError(InternalError):
    """The simulated system did what must never happen: a bug in the core, a fence, or the simulator."""


class Checkers:
    """Holds what has happened. Each method raises at the first violation; `where` says the virtual second."""

    def __init__(self) -> None:
        self.num_checked = 0
        self.specs: dict[int, wire.GenerationSpec] = {}
        """Every generation that was recorded."""
        self._stores: dict[str, int] = {}
        """{address of a TCPStore: the generation that used it}."""
        self._newest_epoch = 0
        self._obeyed: dict[str, tuple[int, int]] = {}

    def fail(self, now: float, text: str) -> None:
        """Report a violation.

        Raises:
            SafetyError: always.
        """
        raise SafetyError(text, where=f"t={now:.3f} s")

    def view(self, now: float, view: View) -> None:
        """The core's own invariants."""
        self.num_checked += 1
        broken = check(view)
        if broken:
            self.fail(now, "; ".join(broken[:3]))

    def recorded(self, now: float, spec: wire.GenerationSpec, epoch: int, *, current_epoch: int) -> None:
        """A generation record reached the store: numbers only rise, one record a number, only the leader of the day writes."""
        self.num_checked += 1
        if spec.generation in self.specs:
            self.fail(now, f"generation {spec.generation} is recorded twice: two generations of one number could publish")
        if self.specs and spec.generation < max(self.specs):
            self.fail(now, f"generation {spec.generation} is recorded after {max(self.specs)}")
        if epoch < current_epoch or epoch < self._newest_epoch:
            self.fail(
                now, f"a leader of epoch {epoch} records generation {spec.generation} in epoch {max(current_epoch, self._newest_epoch)}"
            )
        self._newest_epoch = max(self._newest_epoch, epoch)
        self.specs[spec.generation] = spec

    def restore_point(self, now: float, spec: wire.GenerationSpec, checkpoints: Iterable[wire.CheckpointRecord], corrupt: set[int]) -> None:
        """What a recorded generation will load: committed, not known to be damaged, and the newest such one or a verified one."""
        self.num_checked += 1
        known = {record.step: record for record in checkpoints}
        usable = [step for step, record in known.items() if not record.damaged]
        point = spec.restore
        if point is None:
            if usable:
                self.fail(now, f"generation {spec.generation} starts at step 0 although step {max(usable)} is committed")
            return
        record = known.get(point.step)
        if record is None or record.directory != point.directory:
            self.fail(now, f"generation {spec.generation} restores {point.directory}, which is not committed")
        elif record.damaged:
            self.fail(now, f"generation {spec.generation} restores step {point.step}, which is known to be damaged: {record.damaged}")
        newer = [step for step in usable if step > point.step and step not in corrupt]
        if newer and not (record is not None and record.evidence):
            self.fail(now, f"generation {spec.generation} goes back to step {point.step} although step {max(newer)} is committed")

    def obeyed(self, now: float, node: str, epoch: int, generation: int, what: str) -> None:
        """An agent carried out an order: tokens never go back on a node, and workers belong to a recorded generation."""
        self.num_checked += 1
        last = self._obeyed.get(node, (0, 0))
        starts = what == "start"
        if epoch < last[0] or (starts and generation <= last[1]):
            self.fail(now, f"{node} obeys {what} of (epoch {epoch}, generation {generation}) after {last}")
        if starts and generation not in self.specs:
            self.fail(now, f"{node} starts generation {generation}, which is not in the store")
        self._obeyed[node] = (epoch, generation if starts else last[1])

    def rendezvous_store(self, now: float, address: str, generation: int) -> None:
        """A TCPStore serves one generation."""
        self.num_checked += 1
        used = self._stores.setdefault(address, generation)
        if used != generation:
            self.fail(now, f"TCPStore {address} of generation {used} is used again by generation {generation}")

    def committed(self, now: float, spec: wire.GenerationSpec, step: int, *, current: wire.GenerationSpec | None) -> None:
        """A commit reached the store: only the current generation publishes."""
        self.num_checked += 1
        if current is None or spec.generation != current.generation:
            number = current.generation if current is not None else 0
            self.fail(now, f"generation {spec.generation} commits step {step} while generation {number} is current")
        if spec.restore is not None and step <= spec.restore.step:
            self.fail(now, f"generation {spec.generation} commits step {step}, which is not beyond its restore point {spec.restore.step}")

    def charges(self, now: float, view: View, num_faults: int) -> None:
        """The ledger is honest: no more charges than things that broke."""
        self.num_checked += 1
        for name, job in view.jobs.items():
            charged = ledger.num_charges(job.ledger)
            if charged > num_faults:
                self.fail(now, f"{name} is charged {charged} times for {num_faults} faults")
