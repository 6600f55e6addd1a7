"""Facts about the running generation of a job."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import goodput, phases, rates
from regrow.supervisor.core.fold_nodes import with_member
from regrow.supervisor.core.links import Reach
from regrow.supervisor.core.view import (
    CheckpointView,
    ExitFact,
    GenerationView,
    Incident,
    JobView,
    Refusal,
    Slow,
    Stall,
    VoidSaves,
)

_change = msgspec.structs.replace
_STEP_HISTORY = 32
_SETTLED_STEPS = 5
"""Steps of a generation before its step time is taken for typical."""


def recorded(job: JobView, current: GenerationView, event: e.GenerationRecorded) -> JobView:
    """The record is in the store."""
    if current.stage != "recording":
        return job
    current = _change(current, stage="starting", recorded_at=event.at, progress_at=event.at)
    return _marked(_change(job, generation=current, before=None))


def member_phase(job: JobView, current: GenerationView, event: e.MemberPhase) -> JobView:
    """A node passed a phase."""
    member = current.members.get(event.node)
    if member is None:
        return job
    if event.phase == wire.LOST_PEER_PHASE:
        return _change(job, generation=_change(current, lost_peer_at=event.at))
    if event.phase == wire.REPLICAS_PHASE:
        ranks, nodes = event.detail.get("ranks"), event.detail.get("nodes")
        if not isinstance(ranks, int) or not isinstance(nodes, int):
            return job
        return _change(job, generation=_change(current, num_sole_ranks=ranks, num_sole_nodes=nodes))
    passed = member.phases if event.phase in member.phases else member.phases | {event.phase: event.at}
    current = _change(with_member(current, _change(member, phases=passed, empty_at=None)), progress_at=event.at)
    if event.phase == "restored" and event.step >= 0:
        current = _change(current, taken_up=event.step if current.taken_up is None else min(current.taken_up, event.step))
    return _marked(_change(job, generation=current))


def _marked(job: JobView) -> JobView:
    """Carry the generation's phase instants over to the open incident."""
    incident = open_incident(job)
    if incident is None or job.generation is None or incident.generation_after != job.generation.number:
        return job
    return with_incident(job, _change(incident, marks=phases.marks(job.generation)))


def open_incident(job: JobView) -> Incident | None:
    """The incident that is not over, if there is one: always the last."""
    return job.incidents[-1] if job.incidents and not job.incidents[-1].closed else None


def same_incident(job: JobView, names: tuple[str, ...]) -> Incident | None:
    """The open incident, when it began on one of these nodes: bad news of the machine before the first new step belong to it."""
    last = open_incident(job)
    return last if last is not None and last.node in names else None


def with_incident(job: JobView, incident: Incident) -> JobView:
    """The job with its last incident replaced."""
    return _change(job, incidents=(*job.incidents[:-1], incident))


def exited(job: JobView, current: GenerationView, event: e.WorkersExited) -> JobView:
    """Workers ended. The first report of a rank counts."""
    new = {ended.rank: ExitFact(node=event.node, at=event.at, exit=ended) for ended in event.exits if ended.rank not in current.exits}
    return _change(job, generation=_change(current, exits=current.exits | new)) if new else job


def steps_completed(job: JobView, current: GenerationView, event: e.StepsCompleted) -> JobView:
    """Every rank applied a step."""
    if current.completed_step is not None and event.step <= current.completed_step:
        return job
    first = current.first_step_at is None
    wrong = _wrong_step(current, event) if first else current.wrong_step
    if first and not wrong:
        job = _kept_work(job, current, event)
    current = _change(
        current,
        stage="running",
        completed_step=event.step,
        first_step_at=event.at if first else current.first_step_at,
        progress_at=event.at,
        stall=None,
        stacks_asked_at=None,
        stacks={},
        reach_asked_at=None,
        reach={},
        wrong_step=wrong,
        slow=_slow(current, event),
    )
    seconds = job.step_seconds
    if event.step_seconds > 0:
        seconds = (*seconds, event.step_seconds)[-_STEP_HISTORY:]
    meshes, typical = _typical(job, current, event)
    num_new = max(0, event.step - max(job.frontier, event.step - event.num_steps))
    if current.adopted:
        num_new += goodput.untold(job, event.step - event.num_steps + 1, event.at)
    job = _change(
        job,
        generation=current,
        step_seconds=seconds,
        mesh_seconds=meshes,
        frontier=max(job.frontier, event.step),
        loss=event.loss if event.loss is not None else job.loss,
        samples=event.samples or job.samples,
        unstarted=0,
        effort=goodput.completed(
            job.effort, seconds=event.step_seconds * num_new, world_size=current.spec.world_size, num_new=num_new, median=typical
        ),
    )
    return _recovered(job, event)


def _slow(current: GenerationView, event: e.StepsCompleted) -> dict[int, Slow]:
    """Who is slow now, and since when."""
    known = current.slow
    since = {rank: known[rank].since if rank in known else event.at for rank in event.slow}
    return {rank: Slow(excess_ratio=ratio, since=since[rank]) for rank, ratio in event.slow.items()}


def _kept_work(job: JobView, current: GenerationView, event: e.StepsCompleted) -> JobView:
    """Steps after the checkpoint that were not lost: survivors held their state, and the generation went on from there."""
    restored = current.spec.restore.step if current.spec.restore else 0
    began_after = event.step - event.num_steps
    incident = open_incident(job)
    if not _takes_up_memory(current) or incident is None or incident.generation_after != current.number:
        return job
    if current.adopted:  # its first step may have been told to the leader before this one: only its members know
        began_after = current.taken_up if current.taken_up is not None else restored
    num_kept = min(began_after, incident.frontier) - restored
    if num_kept <= 0:
        return job
    if current.adopted:  # the account of this term begins after the decision that counted those steps as lost
        return with_incident(job, _change(incident, restored_step=min(began_after, incident.frontier)))
    kept = goodput.rolled_back(job.effort, num_steps=-num_kept, step_seconds=rates.median_step(job) or 0.0)
    job = _change(job, effort=kept, frontier=max(job.frontier, began_after))
    if current.spec.memory and any(charge.incident == incident.id for charge in job.ledger.charges):
        job = _change(job, ledger=_change(job.ledger, num_from_memory=job.ledger.num_from_memory + 1))
    return with_incident(job, _change(incident, restored_step=min(began_after, incident.frontier)))


def _takes_up_memory(current: GenerationView) -> bool:
    return current.spec.in_place or current.spec.memory or bool(current.spec.gasp)


def _wrong_step(current: GenerationView, event: e.StepsCompleted) -> str:
    restore = current.spec.restore
    began = event.step - event.num_steps + 1
    if restore is None or current.adopted or began == restore.step + 1:
        return ""
    if _takes_up_memory(current) and began - 1 > restore.step:
        return ""  # they went on with what survivors, or nodes, held in memory
    return f"the first completed step is {began}, the restored checkpoint is of step {restore.step}: its state was not taken up"


def _typical(job: JobView, current: GenerationView, event: e.StepsCompleted) -> tuple[dict[str, tuple[int, float]], float | None]:
    """Step seconds by mesh, smoothed; and that of this mesh once it is settled."""
    start = current.spec.restore.step if current.spec.restore else 0
    unsettled = event.step - start < _SETTLED_STEPS or (current.adopted and len(job.step_seconds) < _SETTLED_STEPS)
    if event.step_seconds <= 0 or unsettled:
        return job.mesh_seconds, None
    name = str(current.spec.mesh)
    known = job.mesh_seconds.get(name)
    smooth = event.step_seconds if known is None else 0.8 * known[1] + 0.2 * event.step_seconds
    return job.mesh_seconds | {name: (current.spec.world_size, smooth)}, smooth


def _recovered(job: JobView, event: e.StepsCompleted) -> JobView:
    incident = open_incident(job)
    if incident is None or incident.generation_after != event.generation:
        return job
    if incident.first_step_at is None:
        incident = _change(incident, first_step_at=event.at)
        job = _change(job, restart_seconds=phases.restart_seconds(incident))
    if event.step > incident.frontier:
        incident = _change(incident, recovered_at=event.at, closed=True)
    return with_incident(job, incident)


def stalled(job: JobView, current: GenerationView, event: e.ProgressStalled) -> JobView:
    """No progress."""
    stall = Stall(at=event.at, since=event.since, limit_seconds=event.limit_seconds, ranks=event.ranks, lingering=event.lingering)
    return _change(job, generation=_change(current, stall=stall))


def output(job: JobView, current: GenerationView, event: e.OutputKept) -> JobView:
    """Stacks of a rank; other outputs are for people only."""
    if event.kind != "stacks":
        return job
    return _change(job, generation=_change(current, stacks=current.stacks | {event.rank: event.text[:16_384]}))


def probed(job: JobView, current: GenerationView, event: e.PeersWereProbed) -> JobView:
    """What a member found when it was asked. Words that nobody waits for any more are dropped."""
    if current.reach_asked_at is None or event.node not in current.reach_asked:
        return job
    found = Reach(reached=frozenset(event.reached), unreached=frozenset(event.unreached))
    return _change(job, generation=_change(current, reach=current.reach | {event.node: found}))


def restore_refused(job: JobView, current: GenerationView, event: e.RestoreWasRefused) -> JobView:
    """The restore point does not load."""
    if current.refusal is not None:
        return job
    found = Refusal(at=event.at, node=event.node, rank=event.rank, step=event.step, problem=event.problem)
    return _change(job, generation=_change(current, refusal=found))


def start_refused(job: JobView, current: GenerationView, event: e.StartWasRefused) -> JobView:
    """An agent did not start."""
    member = current.members.get(event.node)
    if member is None:
        return job
    return _change(job, generation=with_member(current, _change(member, refused_at=event.at, refused=event.reason)))


def checkpoint_moved(job: JobView, event: e.CheckpointMoved) -> JobView:
    """A checkpoint reached another state."""
    boundary = job.boundary
    if event.tiers:
        job = _change(job, tiers=event.tiers)
    waited_for = boundary is not None and event.generation == boundary.generation and event.step >= boundary.asked_step
    if event.state in ("failed", "skipped"):
        before = job.void_saves.count if job.void_saves is not None else 0
        job = _change(job, void_saves=VoidSaves(count=before + 1, step=event.step, reason=event.reason or event.state))
        if boundary is None or not waited_for:
            return job
        return _change(job, boundary=_change(boundary, failed=event.reason or event.state))
    if event.state != "committed":
        return job
    known = job.checkpoints.get(event.step)
    if known is None and any(item.generation == event.generation and item.step > event.step for item in job.checkpoints.values()):
        return job  # word that was kept while nobody led: a generation commits in order, this one was removed since
    found = CheckpointView(
        step=event.step,
        generation=event.generation,
        directory=event.directory,
        record_digest=event.record_digest,
        samples=event.samples,
        committed_at=known.committed_at if known is not None and known.generation == event.generation else event.at,
        evidence=event.evidence or (known.evidence if known is not None and known.directory == event.directory else ()),
        damaged=event.damaged or (known.damaged if known is not None and known.directory == event.directory else ""),
    )
    job = _change(job, checkpoints=job.checkpoints | {event.step: found}, void_saves=None if known is None else job.void_saves)
    if boundary is not None and waited_for:
        job = _change(job, boundary=_change(boundary, committed_step=event.step))
    return job
