"""One incident for a post-mortem: the first bad event, who it was, how sure that is, what was lost, what would have helped."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.supervisor import documents
from regrow.supervisor.stats.parts import Case, JobStory
from regrow.supervisor.stats.story import seconds_lost

_HARDWARE = frozenset(("node_health", "at_rest_mismatch", "received_wrong"))
_DIRECT = frozenset(("workers_exited", "restore_was_refused", "start_was_refused", "non_finite_seen", "command_given", "node_leaving"))
_INDIRECT = frozenset(("node_disconnected", "node_silent", "lease_expired", "progress_stalled", "peers_were_probed"))


def document(case: Case, job: JobStory, end_at: float) -> dict[str, Any]:
    """Plain data of one incident; times in Unix seconds, durations in seconds."""
    incident = case.incident
    base = documents.incident_document(incident)
    lost = seconds_lost(case, end_at)
    world = next((item.world_size for item in job.generations if item.number == incident.generation_before), 0)
    sure, why = confidence(case)
    return base | {
        "first_bad_event": first_bad(case),
        "device": case.device,
        "class": f"{incident.kind} / {incident.cause}",
        "confidence": sure,
        "confidence_reason": why,
        "evidence": msgspec.to_builtins(case.evidence),
        "traceback": case.traceback,
        "reason": case.reason,
        "action": incident.rung or "none",
        "rules": f"regrow {case.version}" if case.version else "not recorded",
        "lost_seconds": lost,
        "lost_gpu_hours": lost * world / 3600,
        "similar": similar(case, job),
        "earlier": earlier(case),
    }


def first_bad(case: Case) -> dict[str, Any] | None:
    """The earliest evidence that points at the incident's node, else the earliest of all: not the loudest, which is often a victim's."""
    if not case.evidence:
        return None
    order = sorted(case.evidence, key=lambda item: item.at)
    own = [item for item in order if item.node and item.node == case.incident.node and item.kind != "output_kept"]
    return msgspec.to_builtins(own[0] if own else order[0])


def confidence(case: Case) -> tuple[str, str]:
    """(high, medium or low, why): by what kind of evidence names the culprit."""
    incident = case.incident
    own = {item.kind for item in case.evidence if not incident.node or item.node in ("", incident.node)}
    if own & _HARDWARE:
        return "high", "a hardware check or a checksum names it"
    if case.traceback:
        return "high", "the rank's own traceback is there"
    if own & _DIRECT:
        return "high" if incident.rank >= 0 or incident.node else "medium", "it said so itself: an exit, a refusal or an order"
    if own & _INDIRECT:
        sure = "medium" if len(own & _INDIRECT) > 1 or len(case.evidence) > 1 else "low"
        return sure, "only silence or a stall was seen: the node, its network or its host may be at fault"
    return "low", "no line of the journal names a cause"


def similar(case: Case, job: JobStory) -> list[dict[str, Any]]:
    """Other incidents of the same GPU, node or kind, the most alike first."""
    mine = case.incident
    found: list[tuple[int, dict[str, Any]]] = []
    for other in job.cases:
        theirs = other.incident
        if theirs.id == mine.id:
            continue
        shared = [
            name
            for name, same in (
                ("GPU", bool(case.device) and case.device == other.device),
                ("node", bool(mine.node) and mine.node == theirs.node),
                ("kind", mine.kind == theirs.kind),
            )
            if same
        ]
        if shared:
            found.append((len(shared), {"id": theirs.id, "same": shared}))
    return [item for _, item in sorted(found, key=lambda pair: (-pair[0], pair[1]["id"]))[:5]]


def earlier(case: Case) -> str:
    """What would have caught it earlier or made it cheaper, from where its time went; empty when nothing stands out."""
    incident = case.incident
    spans = documents.incident_document(incident)["phases"]
    if incident.kind == "hang":
        return f"a shorter hang limit: {spans.get('detect', 0.0):.1f} s went by before the stall counted as one"
    if incident.kind == "sdc":
        return "digests at every step (digest_every=1) and a checkpoint verified nearer to the fault bound what is computed again"
    if incident.kind == "ended" or incident.cause == "program":
        return "a short run of the same script on one node before the long one: no restart cures a program error"
    if incident.kind in ("unhealthy", "node_lost") and not any(item.kind in _HARDWARE for item in case.evidence):
        return "hardware checks on the node (`regrow doctor`, the pre-flight test): nothing warned before it was gone"
    if not spans:
        return ""
    longest = max(spans, key=lambda name: spans[name])
    advice = {
        "detect": "a shorter silence limit",
        "decide": "a shorter wait for victims' reports",
        "start": "warm workers on this node (the shim was not ready)",
        "rendezvous": "a look at the network between the members",
        "restore": "checkpoints in a nearer tier",
        "first_step": "a shorter save interval: most of the time went into steps computed again or the first step's warm-up",
    }.get(longest, "")
    return f"{advice} ({longest} took {spans[longest]:.1f} s)" if advice else ""
