"""The restart ledger: one incident is one charge, by cause, windowed, restored by healthy progress."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import msgspec

from regrow import wire
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, LedgerRecord
from regrow.supervisor.core.tracebacks import error_line

PROGRAM = "program"
BUDGETED = ("infrastructure", "preemption", "program", "unknown")
MACHINE = ("infrastructure", "preemption")
"""Causes that are not the program's."""
KEPT = 1024
"""Charges that are kept one by one, as many as the largest default budget of a day: the record must fit into a value of etcd
(1.5 MB) however long a job runs."""
BLAMES_PROGRAM = (PROGRAM, "unknown")
DO_NOT_REQUEUE = 78
"""Exit code for a scheduler: the program is at fault, the same start would fail again (EX_CONFIG of sysexits)."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says to one more restart."""

    allowed: bool
    reason: str
    delay_seconds: float = 0.0
    exit_code: int = 1


def budget(spec: wire.JobSpec, policy: Policy, cause: str) -> int:
    """Restarts that a cause may take within the window."""
    factor = policy.infrastructure_factor if cause in MACHINE else 1
    return spec.max_restarts * factor


def counted(ledger: LedgerRecord, policy: Policy, now: float, cause: str | None = None) -> list[Charge]:
    """Charges that count now: inside the window and not restored."""
    since = now - policy.budget_window_seconds
    restored = ledger.restored_at
    return [
        charge
        for charge in ledger.charges
        if charge.at >= since and (restored is None or charge.at > restored) and (cause is None or charge.cause == cause)
    ]


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job beside its charges."""

    since: float | None = None
    """When it was submitted; None: not known, so no failure is excused by the rate of earlier ones."""
    step_seconds: float | None = None
    """Median duration of a step; None: it reports none."""


def judge(ledger: LedgerRecord, charge: Charge, spec: wire.JobSpec, policy: Policy, past: Past | None = None) -> Verdict:
    """May the job restart after this incident? The first rule that forbids it is the reason.

    1. A program error before the first step ever completed: stop at once.
    2. A program error at the same place, at the same step, twice: stop.
    3. `no_progress_limit` failures in a row that no machine explains, without a step in between, and more than chance brings
       at the rate at which this job failed before: stop.
    4. The budget of the cause is used up. A restart that a machine caused does not count once progress has paid for it: a
       long job on many machines is not stopped for their number.
    """
    past = past or Past()
    same_step = [] if charge.ran_seconds >= policy.silent_progress_seconds else _without_progress(ledger, charge)
    if charge.cause == PROGRAM and charge.early:
        return Verdict(allowed=False, reason="the program failed before the first step", exit_code=DO_NOT_REQUEUE)
    twins = [other for other in same_step if other.cause == PROGRAM and other.fingerprint == charge.fingerprint]
    if charge.cause == PROGRAM and charge.fingerprint and twins:
        reason = f"the program failed twice at the same place at step {charge.step}"
        return Verdict(allowed=False, reason=reason, exit_code=DO_NOT_REQUEUE)
    unexplained = [other for other in same_step if other.cause in BLAMES_PROGRAM]
    limit = policy.no_progress_limit if charge.cause == PROGRAM else policy.no_progress_unknown_limit
    chance = _chance(ledger, charge, unexplained, spec, past)
    if charge.cause in BLAMES_PROGRAM and len(unexplained) + 1 >= limit and chance < policy.no_progress_chance:
        reason = f"{len(unexplained) + 1} failures in a row without a step beyond {charge.step}"
        return Verdict(allowed=False, reason=f"no progress: {reason}", exit_code=DO_NOT_REQUEUE)
    known = [other for other in counted(ledger, policy, charge.at, charge.cause) if other.incident != charge.incident]
    paid = _paid_back(ledger, charge, policy, past) if charge.cause in MACHINE else set[str]()
    used = sum(1 for other in known if other.incident not in paid) + 1
    most = budget(spec, policy, charge.cause)
    if used > most:
        return Verdict(allowed=False, reason=f"restart {used} of {most} by cause {charge.cause} in {policy.budget_window_seconds:.0f} s")
    delay = 0.0
    if unexplained and charge.cause in BLAMES_PROGRAM:
        delay = min(policy.backoff_most_seconds, policy.backoff_seconds * 2 ** (len(unexplained) - 1))
    earned = f" ({len(known) + 1 - used} more paid back by progress)" if len(known) >= used else ""
    return Verdict(allowed=True, reason=f"restart {used} of {most} by cause {charge.cause}{earned}", delay_seconds=delay)


def _chance(ledger: LedgerRecord, charge: Charge, unexplained: list[Charge], spec: wire.JobSpec, past: Past) -> float:
    """Probability that failures as many as those behind the first one of the streak come in its time by chance alone, at the
    rate before it (the posterior mean of rates.failure_rate): at a failure each quarter of an hour and restarts of ten minutes
    three in a row happen daily."""
    if past.since is None or not unexplained:
        return 0.0
    first = min(other.at for other in unexplained)
    before = sum(1 for other in ledger.charges if other.at < first and other.incident != charge.incident) + sum(ledger.forgotten.values())
    rate = posterior_rate(before, max(0.0, first - past.since), spec.checkpoint.prior_failures_per_hour)
    return poisson_tail(len(unexplained), rate * max(0.0, charge.at - first))


GUESSED_PER_SECOND = 1.0 / 86_400.0
"""One failure a day until something is known."""
_GUESS_WEIGHT = 0.05


def posterior_rate(failures: int, seconds: float, stated_per_hour: float) -> float:
    """Posterior mean of a failure rate, per second, after so many failures in so many seconds.

    Gamma(a, a / prior) updated to (a + n) / (a / prior + T), the conjugate update of a Poisson rate (Gelman et al., Bayesian
    Data Analysis, section 2.6). A prior that the user states weighs as one incident, our own guess as a twentieth of one.
    """
    weight, prior = (1.0, stated_per_hour / 3600.0) if stated_per_hour > 0 else (_GUESS_WEIGHT, GUESSED_PER_SECOND)
    return (weight + failures) / (weight / prior + seconds)


def poisson_tail(least: int, mean: float) -> float:
    """P(N >= least) of a Poisson variable, summed from its largest term on, so that small values are exact."""
    if mean <= 0.0:
        return 1.0 if least <= 0 else 0.0
    if least <= mean:
        return 1.0 - sum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(least))
    term = math.exp(least * math.log(mean) - mean - math.lgamma(least + 1))
    total, number = 0.0, least
    while term > total * 1e-12:
        total += term
        number += 1
        term *= mean / number
    return total


def _paid_back(ledger: LedgerRecord, charge: Charge, policy: Policy, past: Past) -> set[str]:
    """Incidents after which the job made progress for at least `paid_share` of the time to the next one."""
    charges = [*(other for other in ledger.charges if other.incident != charge.incident), charge]
    found: set[str] = set()
    for this, following in itertools.pairwise(charges):
        useful = (following.step - this.step) * past.step_seconds if past.step_seconds is not None else following.ran_seconds
        if useful > 0 and useful >= policy.paid_share * (following.at - this.at):
            found.add(this.incident)
    return found


def _without_progress(ledger: LedgerRecord, charge: Charge) -> list[Charge]:
    """Charges of other incidents just before this one at the same frontier. Its own is there when the record that it was
    written with failed and is tried again."""
    result: list[Charge] = []
    for other in reversed([other for other in ledger.charges if other.incident != charge.incident]):
        if other.step != charge.step or (ledger.restored_at is not None and other.at <= ledger.restored_at):
            break
        result.append(other)
    return result


def add(ledger: LedgerRecord, charge: Charge) -> LedgerRecord:
    """The ledger with one more charge. An incident that is in it already is not charged again: when the machine turns out to
    be at fault, its charge moves to that cause."""
    known = next((other for other in ledger.charges if other.incident == charge.incident), None)
    if known is not None:
        if charge.cause not in MACHINE or known.cause in MACHINE:
            return ledger
        moved = msgspec.structs.replace(known, cause=charge.cause, fingerprint="", early=False, text=charge.text)
        return msgspec.structs.replace(ledger, charges=tuple(moved if other is known else other for other in ledger.charges))
    charges = (*ledger.charges, charge)
    old, kept = charges[:-KEPT], charges[-KEPT:]
    forgotten = dict(Counter(ledger.forgotten) + Counter(item.cause for item in old)) if old else ledger.forgotten
    return msgspec.structs.replace(ledger, charges=kept, forgotten=forgotten, frontier=max(ledger.frontier, charge.step))


REFUNDED = "refunded"
"""Among what is forgotten: restarts that happened and are held against nobody."""


def refund(ledger: LedgerRecord, incident: str) -> LedgerRecord:
    """The ledger without the charge of an incident; that there was a restart is kept in the number of all."""
    left = tuple(charge for charge in ledger.charges if charge.incident != incident)
    taken = len(ledger.charges) - len(left)
    forgotten = ledger.forgotten | {REFUNDED: ledger.forgotten.get(REFUNDED, 0) + taken} if taken else ledger.forgotten
    return msgspec.structs.replace(ledger, charges=left, forgotten=forgotten)


def num_charges(ledger: LedgerRecord, cause: str | None = None) -> int:
    """How many restarts were ever charged, to one cause or to any."""
    if cause is None:
        return len(ledger.charges) + sum(ledger.forgotten.values())
    return sum(1 for charge in ledger.charges if charge.cause == cause) + ledger.forgotten.get(cause, 0)


def restore_due(ledger: LedgerRecord, policy: Policy, now: float) -> float | None:
    """When the budgets may be restored if no incident comes; None when nothing is charged."""
    open_charges = counted(ledger, policy, now)
    return open_charges[-1].at + policy.healthy_seconds if open_charges else None


_NOISE = re.compile(r"0x[0-9a-f]+|\b\d+\b|/[^\s\"']*/")


def fingerprint(error: str) -> str:
    """Where and what of a traceback without what changes from run to run: the last frame and the exception line."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    frames = [line for line in lines if line.startswith("File ")]
    place = frames[-1] if frames else ""
    where = re.search(r'File "([^"]*)", line (\d+)', place)
    name = f"{where[1].rsplit('/', 1)[-1]}:{where[2]}" if where else ""
    return f"{name} {_NOISE.sub('#', error_line(error))}"[:200].strip()
