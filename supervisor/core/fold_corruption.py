"""What says that a result may be wrong: digests of replicas, memory at rest, repeated micro-steps, what is not finite."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core import events as e
from regrow.supervisor.core import quarantine, sdc, third
from regrow.supervisor.core.records import Accused, Undecided
from regrow.supervisor.core.view import Divergence, GenerationView, JobView, NonFinite, View

_change = msgspec.structs.replace
_AGREED_HISTORY = 256
_RESTED_HISTORY = 64
_ONCE_LIMIT = 2
"""Checks in which a rank was wrong once, each time right when repeated: so many are no accident."""


Fact = e.DigestsReported | e.AtRestMismatch | e.ReceivedWrong | e.NonFiniteSeen | e.ReplayJudged


def found(view: View, job: JobView, current: GenerationView, event: Fact) -> JobView:
    """One of these facts."""
    match event:
        case e.DigestsReported():
            return _digests(job, current, event)
        case e.AtRestMismatch():
            return _at_rest(job, current, event)
        case e.ReceivedWrong():
            return _received(job, current, event)
        case e.NonFiniteSeen():
            return _non_finite(job, current, event)
        case e.ReplayJudged():
            return _replayed(view, job, current, event)


def _digests(job: JobView, current: GenerationView, event: e.DigestsReported) -> JobView:
    """Digests of one step: who agrees."""
    result = sdc.vote(current.spec.mesh, event.digests)
    checks = job.digest_checks | {result.verdict: job.digest_checks.get(result.verdict, 0) + 1}
    job = _change(job, digest_checks=checks)
    if result.verdict == "agree":
        job = _change(job, agreed_steps=frozenset(sorted({*job.agreed_steps, event.step})[-_AGREED_HISTORY:]))
        return _settled(job, current, event)
    if result.rested:
        return _change(job, generation=_change(current, rested=(*current.rested, event.step)[-_RESTED_HISTORY:]))
    if result.verdict == "skipped" or current.divergence is not None:
        return job
    text = f"{result.reason}; {event.located}" if event.located else result.reason
    if result.suspects:
        found = Divergence(at=event.at, step=event.step, rank=result.suspects[0], text=text)
        return _change(job, generation=_change(current, divergence=found))
    asked = third.ask(job.ledger.undecided, current, event.step, event.digests)
    named = _named(job, current, event, asked)
    if named is not None:
        return named
    again = f"; the {len(asked.tries)}. time at this step" if len(asked.tries) > 1 else ""
    found = Divergence(at=event.at, step=event.step, rank=-1, text=f"{text}{again}")
    return _change(job, ledger=_change(job.ledger, undecided=asked), generation=_change(current, divergence=found))


def _settled(job: JobView, current: GenerationView, event: e.DigestsReported) -> JobView:
    """A step at which replicas differed without a majority was done again, and now they agree: who was wrong before?"""
    before = job.ledger.undecided
    if before is None or event.step < before.step:
        return job
    same = event.step == before.step and before.mesh == current.spec.mesh and current.divergence is None
    named = _named(job, current, event, third.ask(before, current, event.step, event.digests)) if same else None
    return named or _change(job, ledger=_change(job.ledger, undecided=None))


def _named(job: JobView, current: GenerationView, event: e.DigestsReported, asked: Undecided) -> JobView | None:
    """The job with whoever the answers show to be wrong; None: they do not tell."""
    wrong = third.judge(asked) if len(asked.tries) > 1 else ()
    if not wrong:
        return None
    job = _change(job, ledger=_change(job.ledger, undecided=None))
    here = {place: rank for rank, place in third.places(current, event.digests).items()}
    clean = sdc.vote(current.spec.mesh, event.digests).verdict == "agree"
    before = next((rank for one in asked.tries for rank, place in one.places.items() if place in wrong), -1)
    where = f"on {wrong[0].node}" + (f" ({wrong[0].device})" if wrong[0].device else "")
    text = f"step {event.step}, done again, gave what the other replicas had: rank {before} was wrong the first time, {where}"
    rank = next((here[place] for place in wrong if place in here), -1)
    if rank < 0:
        return _change(job, accused=Accused(at=event.at, place=wrong[0], text=text))
    found = Divergence(at=event.at, step=event.step, rank=rank, text=text, clean_step=event.step if clean else None)
    return _change(job, generation=_change(current, divergence=found))


def _at_rest(job: JobView, current: GenerationView, event: e.AtRestMismatch) -> JobView:
    """Bytes that nobody wrote have changed."""
    checks = job.digest_checks | {"at_rest_mismatch": job.digest_checks.get("at_rest_mismatch", 0) + 1}
    job = _change(job, digest_checks=checks)
    if current.divergence is not None:
        return job
    text = f"{event.tensor} of rank {event.rank} changed at rest before step {event.step}"
    return _change(job, generation=_change(current, divergence=Divergence(at=event.at, step=event.step, rank=event.rank, text=text)))


def _received(job: JobView, current: GenerationView, event: e.ReceivedWrong) -> JobView:
    """An all-gather gave out what its owner did not have: the gradients of the step are wrong, the state before it is not."""
    job = _change(job, digest_checks=job.digest_checks | {"received_wrong": job.digest_checks.get("received_wrong", 0) + 1})
    if current.divergence is not None:
        return job
    found = Divergence(at=event.at, step=event.step, rank=event.rank, text=f"step {event.step}: {event.reason}")
    return _change(job, generation=_change(current, divergence=found))


def _replayed(view: View, job: JobView, current: GenerationView, event: e.ReplayJudged) -> JobView:
    """A repeated micro-step. One wrong result that was replaced is remembered; the second of a rank, or of its hardware in weeks, accuses it."""
    verdict = event.verdict
    name = f"replay_{verdict.verdict}"
    job = _change(job, digest_checks=job.digest_checks | {name: job.digest_checks.get(name, 0) + 1})
    if verdict.verdict == "agree":
        return _change(job, generation=_change(current, replay_clean_step=max(event.step, current.replay_clean_step)))
    if verdict.verdict == "skipped" or current.divergence is not None:
        return job
    known = current.wrong_once | {rank: current.wrong_once.get(rank, 0) + 1 for rank in verdict.once}
    current = _change(current, wrong_once=known)
    suspects, text = verdict.suspects, verdict.reason
    often = [rank for rank in verdict.once if known[rank] >= _ONCE_LIMIT]
    before = [rank for rank in verdict.once if _suspected(view, current, rank, event.at)]
    if not suspects and often:
        suspects, text = (often[0],), f"{text}; the {known[often[0]]}. check that rank {often[0]} fails in this generation"
    elif not suspects and before:
        suspects, text = (before[0],), f"{text}; the hardware of rank {before[0]} has failed such checks in earlier generations"
    if not suspects and verdict.repaired:
        return _change(job, generation=current)
    one_place = len({current.node_of(rank) for rank in suspects}) == 1
    rank = suspects[0] if one_place else -1
    found = Divergence(at=event.at, step=event.step, rank=rank, text=f"step {event.step}: {text}", clean_step=current.replay_clean_step)
    return _change(job, generation=_change(current, divergence=found))


def _suspected(view: View, current: GenerationView, rank: int, now: float) -> bool:
    """Whether one more wrong result is too much for what is remembered of this rank's hardware."""
    node = view.nodes.get(current.node_of(rank))
    if node is None:
        return False
    record = view.quarantine.get(quarantine.key_of(view, node, current.device_of(rank)))
    return 1.0 + quarantine.suspicion(record, now) >= quarantine.SUSPICION_LIMIT


_WHOLE = ("loss", "grad_norm")
"""What is known after the sum over all ranks: it names nobody."""


def _non_finite(job: JobView, current: GenerationView, event: e.NonFiniteSeen) -> JobView:
    """Infinite or NaN: a streak of steps, and who began it."""
    known = current.non_finite
    if known is not None and event.step <= known.last_step:
        return job
    if known is None or event.step != known.last_step + 1:
        makers = [rank for rank, what in sorted(event.ranks.items()) if what not in _WHOLE]
        rank = makers[0] if len(makers) == 1 else -1
        size = current.spec.mesh.replica_size
        replicas = {maker // size for maker in makers}
        replica = replicas.pop() if len(replicas) == 1 and len(makers) > 1 and current.spec.mesh.dp > 1 else -1
        what = event.ranks[rank] if rank >= 0 else next(iter(event.ranks.values()), "loss")
        known = NonFinite(at=event.at, first_step=event.step, last_step=event.step, rank=rank, what=what, num_ranks=len(makers))
        known = _change(known, again=rank in event.again, replica=replica)
    else:
        known = _change(known, last_step=event.step)
    return _change(job, generation=_change(current, non_finite=known))
