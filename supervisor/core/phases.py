"""Recovery as spans that add up: detect, decide, fence, stop, start, rendezvous, restore, first_step."""

from __future__ import annotations

from regrow.supervisor.core.view import GenerationView, Incident

NAMES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step")
"""In order; each begins where the one before ended."""

_MEMBER_PHASE = {"stop": "stopped", "start": "started", "rendezvous": "rendezvous", "restore": "restored"}


def spans(incident: Incident) -> dict[str, float]:
    """Seconds of each phase. They sum to `whole(incident)`; a phase that was passed unseen is 0.

    Phases after the last known mark are left out: the recovery is in that phase now.
    """
    ends: dict[str, float] = {"detect": incident.detected_at, "decide": incident.decided_at} | incident.marks
    if incident.recovered_at is not None:
        ends["first_step"] = incident.recovered_at
    known = [name for name in NAMES if name in ends]
    if not known:
        return {}
    result: dict[str, float] = {}
    last = incident.symptom_at
    for name in NAMES[: NAMES.index(known[-1]) + 1]:
        end = max(last, ends.get(name, last))
        result[name] = end - last
        last = end
    return result


def current(incident: Incident) -> str:
    """The phase that an open recovery is in; empty when it is over."""
    if incident.closed:
        return ""
    done = spans(incident)
    return next((name for name in NAMES if name not in done), "")


def whole(incident: Incident) -> float | None:
    """Seconds from the first symptom to the first completed step beyond the frontier; None until then."""
    return None if incident.recovered_at is None else max(0.0, incident.recovered_at - incident.symptom_at)


def restart_seconds(incident: Incident) -> float | None:
    """Seconds from the decision to the first completed step of the new generation, computed again or not."""
    return None if incident.first_step_at is None else max(0.0, incident.first_step_at - incident.decided_at)


def marks(generation: GenerationView) -> dict[str, float]:
    """When the last member passed each phase of a start, as far as all have."""
    result: dict[str, float] = {}
    if generation.recorded_at is not None:
        result["fence"] = generation.recorded_at
    for name, phase in _MEMBER_PHASE.items():
        passed = _passed(generation, phase)
        if passed is not None:
            result[name] = passed
    return result


def _passed(generation: GenerationView, phase: str) -> float | None:
    """When the last member passed a phase. Asked at each member's report, so it gives up at the first one that has not: with
    thousands of members that report in any order few are looked at."""
    latest: float | None = None
    for member in reversed(generation.members.values()):
        at = member.phases.get(phase)
        if at is None:
            return None
        latest = at if latest is None or at > latest else latest
    return latest
