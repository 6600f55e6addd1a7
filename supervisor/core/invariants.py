"""check(view): what must hold after every fold, whatever the order of events. Names what is broken; empty: all holds."""

from __future__ import annotations

from regrow import wire
from regrow.supervisor.core.memo import Memo
from regrow.supervisor.core.view import GenerationView, JobView, View


def check(view: View) -> list[str]:
    """All broken invariants, for tests, the simulator and the driver (which logs and pages)."""
    broken: list[str] = []
    holders: dict[str, str] = {}
    for name, job in view.jobs.items():
        broken += [f"{name}: {text}" for text in _job(view, job)]
        if job.generation is None or job.generation.stage == "ended":
            continue
        members = job.generation.members
        for node in sorted(holders.keys() & members.keys()):
            broken.append(f"{node} is a member of {holders[node]} and of {name}")
        holders |= dict.fromkeys(members, name)
    for key, record in view.quarantine.items():
        if key != record.key:
            broken.append(f"quarantine record of {record.key} is filed under {key}")
        if record.state == "quarantined" and record.until is None:
            broken.append(f"{key} is quarantined without a way out by time")
    return broken


def _job(view: View, job: JobView) -> list[str]:
    broken: list[str] = []
    generation = job.generation
    if _charged_twice.get((job.ledger,), None, lambda: _is_charged_twice(job)):
        broken.append("an incident is charged twice")
    if sum(1 for incident in job.incidents if not incident.closed) > 1:
        broken.append("two incidents are open")
    if job.incidents and any(not incident.closed for incident in job.incidents[:-1]):
        broken.append("an incident that is not the last is open")
    if job.outcome is not None and generation is not None and generation.stage != "ended":
        broken.append("the job is over and its generation is not")
    if job.paused and generation is not None and generation.stage != "ended":
        broken.append("the job is paused and its generation is not over")
    if job.boundary is not None and (generation is None or job.boundary.generation != generation.number):
        broken.append("a save is awaited from a generation that is not the current one")
    if generation is not None:
        broken += _generation(view, job, generation)
    broken += [f"checkpoint {step} is filed under another step" for step, item in job.checkpoints.items() if item.step != step]
    return broken


_charged_twice: Memo[bool] = Memo()


class _Ranks:
    """All ranks of the members: who works where stays the same while a generation lives, and is looked at after every turn."""

    def __init__(self) -> None:
        self._workers: list[tuple[wire.WorkerAssignment, ...]] = []
        self._ranks: list[int] = []
        self._filled = 0

    def of(self, workers: list[tuple[wire.WorkerAssignment, ...]]) -> tuple[list[int], int]:
        """All in rising order, and the world size that they fill without a gap; -1: none."""
        if workers != self._workers:
            self._workers, self._ranks = workers, sorted(worker.rank for each in workers for worker in each)
            self._filled = len(self._ranks) if self._ranks == list(range(len(self._ranks))) else -1
        return self._ranks, self._filled


_ranks = _Ranks()


def _is_charged_twice(job: JobView) -> bool:
    incidents = [charge.incident for charge in job.ledger.charges]
    return len(incidents) != len(set(incidents))


def _generation(view: View, job: JobView, generation: GenerationView) -> list[str]:
    spec = generation.spec
    broken: list[str] = []
    if generation.number > job.highest_generation:
        broken.append(f"generation {generation.number} is above the highest {job.highest_generation}")
    if spec.epoch > view.epoch:
        broken.append(f"generation {generation.number} has epoch {spec.epoch}, ours is {view.epoch}")
    if tuple(generation.members) != spec.nodes and (set(spec.nodes) != set(generation.members) or len(spec.nodes) != len(set(spec.nodes))):
        broken.append("members and nodes of the record differ")
    ranks, filled = _ranks.of([member.workers for member in generation.members.values()])
    if not generation.adopted and (filled != spec.world_size or spec.mesh.world_size != spec.world_size):
        broken.append(f"ranks {ranks[:8]} do not fill mesh {spec.mesh} of {spec.world_size}")
    if spec.micro_batches and sum(spec.micro_batches) * spec.micro_batch != spec.global_batch:
        broken.append(f"micro-batches {spec.micro_batches} do not give the global batch {spec.global_batch}")
    if generation.stage == "recording" and any(member.sent_at is not None for member in generation.members.values()):
        broken.append("workers were started before the generation was recorded")
    return broken
