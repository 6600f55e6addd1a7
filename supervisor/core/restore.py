"""Which checkpoint the next generation loads, and what it means when there is none."""

from __future__ import annotations

import statistics

import msgspec

from regrow import wire
from regrow.supervisor.core.view import CheckpointView, JobView

START_OVER_SECONDS = 600.0
"""After a corruption that no checkpoint predates, a run that is no longer than this starts over; a longer one asks."""

VERIFIED = ("replica_consistent", "read_back", "replay_clean")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The restore point (None: step 0), or why the job may not start."""

    point: wire.RestorePoint | None = None
    forbidden: str = ""
    reason: str = ""


def usable(job: JobView, damaged: dict[int, str]) -> list[CheckpointView]:
    """Checkpoints that may be loaded, newest first."""
    return sorted((item for item in job.checkpoints.values() if not item.damaged and item.step not in damaged), key=lambda item: -item.step)


def choose(job: JobView, damaged: dict[int, str], *, verified_only: bool = False) -> Choice:
    """The newest usable checkpoint. Nothing usable although there should be is an error, never a silent step 0.

    Args:
        damaged: checkpoints that this decision rules out.
        verified_only: prefer checkpoints with evidence; without any, the newest usable one is taken and the reason says so.
    """
    items = usable(job, damaged)
    verified = [item for item in items if any(name in VERIFIED for name in item.evidence)]
    if verified_only and verified:
        return Choice(point=_point(verified[0]), reason=f"step {verified[0].step}, verified by {', '.join(verified[0].evidence)}")
    if items:
        note = ", which nothing has verified" if verified_only else ""
        return Choice(point=_point(items[0]), reason=f"step {items[0].step}{note}")
    ruled_out = len(job.checkpoints) + job.num_damaged
    lost_seconds = job.frontier * statistics.median(job.step_seconds or (0.0,))
    if verified_only and lost_seconds <= START_OVER_SECONDS:
        return Choice(reason=f"from step 0: no checkpoint before the corruption, and all {job.frontier} steps cost {lost_seconds:.0f} s")
    if ruled_out and not job.spec.checkpoint.fresh_start:
        reasons = {step: damaged.get(step) or item.damaged for step, item in sorted(job.checkpoints.items())}
        detail = "; ".join(f"step {step}: {why}" for step, why in reasons.items())
        return Choice(
            forbidden=f"no usable checkpoint, {ruled_out} exist and none can be loaded"
            + (f" ({detail[:500]})" if detail else "")
            + f"; repair {job.spec.checkpoint.path or 'the checkpoint folder'}, or start at step 0 with --fresh-start"
        )
    return Choice(reason="from step 0")


def _point(item: CheckpointView) -> wire.RestorePoint:
    return wire.RestorePoint(
        step=item.step, directory=item.directory, record_digest=item.record_digest, generation=item.generation, samples=item.samples
    )
