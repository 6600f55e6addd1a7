"""Compares a run that lost nodes with its twin that did not: losses, samples, learning rates, generators, final state.

Files in, verdict out; numpy only, no supervisor. See lineage.py for the files.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from regrow.demo.lineage import Array, Lineage, Step, read_final, read_lineage

LOSS_TOLERANCE = 1e-6
"""Relative. Fresh runs on different meshes differ by at most 1e-7 over hundreds of steps, faulty restores by 5e-4 and more."""

STATE_FACTOR = 10.0
STATE_FLOOR = 3e-5
"""Relative norm. Rounding grows by chance: over ten seeds the worst tensor of a fresh run differed from its twin by 5e-7 to
8e-6, that of a run with four faults by 9e-7 to 9e-6, and one seed's pair says little about the same seed's run."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing compared."""

    name: str
    passed: bool
    worst: float
    """The largest deviation found, in the unit of `limit`."""
    limit: float
    detail: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All checks of a run against its twin."""

    checks: tuple[Check, ...]
    steps: int
    lost_steps: int
    meshes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.passed)


@dataclasses.dataclass(frozen=True)
class Control:
    """A restore with something left out: the comparison has to catch it, except for the complete one."""

    omitted: str
    """Empty: nothing."""
    caught_by: tuple[str, ...]
    loss_deviation: float

    @property
    def passed(self) -> bool:
        """Caught when it should be, and only then."""
        return bool(self.caught_by) == bool(self.omitted)


def compare(
    run: Path,
    twin: Path,
    *,
    last_step: int,
    tolerances: Mapping[str, float] | None = None,
    loss_tolerance: float = LOSS_TOLERANCE,
) -> Comparison:
    """Compare the surviving steps of `run` up to `last_step`, and its final state, with `twin`.

    Args:
        tolerances: relative norm per tensor (`state_tolerances`); None: the final state is not compared.

    Raises:
        OperationalError: logs or final state are missing or damaged.
    """
    ours, theirs = read_lineage(run), read_lineage(twin)
    checks = compare_steps(ours, theirs, range(1, last_step + 1), loss_tolerance)
    if tolerances is not None:
        checks.append(compare_state(read_final(run), read_final(twin), tolerances))
    return Comparison(checks=tuple(checks), steps=len(ours.steps), lost_steps=len(ours.lost), meshes=ours.meshes)


def compare_steps(ours: Lineage, theirs: Lineage, expected: Iterable[int], loss_tolerance: float = LOSS_TOLERANCE) -> list[Check]:
    """Compare the `expected` steps of two lineages."""
    wanted = list(expected)
    missing = [step for step in wanted if step not in ours.steps or step not in theirs.steps]
    first = f", first {missing[0]}" if missing else ""
    checks = [Check("steps", not missing, len(missing), 0, f"{len(wanted) - len(missing)} of {len(wanted)} steps in both{first}")]
    pairs = [(ours.steps[step], theirs.steps[step]) for step in wanted if step not in missing]
    if not pairs:
        return checks
    checks.append(_worst("loss", pairs, _loss_deviation, loss_tolerance))
    checks.append(_worst("learning_rate", pairs, _rate_deviation, 0.0))
    checks.append(_worst("sample_order", pairs, lambda mine, twin: float(mine.samples != twin.samples), 0.0))
    checks.append(_worst("position", pairs, lambda mine, twin: float(mine.positions != twin.positions), 0.0))
    checks.append(_worst("tokens", pairs, lambda mine, twin: float(mine.tokens != twin.tokens), 0.0))
    checks.append(_generators(pairs, ours.before_first_reshard))
    checks.append(_once([mine for mine, _ in pairs], ours.num_samples))
    return checks


def _worst(name: str, pairs: list[tuple[Step, Step]], deviation: Callable[[Step, Step], float], limit: float) -> Check:
    values = [deviation(mine, twin) for mine, twin in pairs]
    bad = [mine for value, (mine, _) in zip(values, pairs, strict=True) if not value <= limit]
    worst = max(values, key=lambda value: np.inf if np.isnan(value) else value)
    detail = f"{len(pairs)} steps"
    if bad:
        detail = f"{len(bad)} of {len(pairs)} steps differ, first step {bad[0].step} (generation {bad[0].generation}, {bad[0].mesh})"
    return Check(name, not bad, worst, limit, detail)


def _loss_deviation(mine: Step, twin: Step) -> float:
    """Largest relative deviation of what any rank says; NaN anywhere gives NaN, which passes no limit."""
    reference = twin.losses[0]
    return float(np.max(np.abs(np.array(mine.losses) - reference) / abs(reference)))


def _rate_deviation(mine: Step, twin: Step) -> float:
    return float(np.max(np.abs(np.array(mine.learning_rates) - twin.learning_rates[0])))


def _generators(pairs: list[tuple[Step, Step]], comparable: frozenset[int]) -> Check:
    """Rank 0's draws are the twin's until the mesh changes, where streams are derived anew; no number is ever drawn twice.

    A generator that was not restored starts again from its seed, so its draws repeat those of the first steps.
    """
    wrong = [mine.step for mine, twin in pairs if mine.step in comparable and mine.draws != twin.draws]
    draws = Counter(item for mine, _ in pairs for item in mine.draws.items())
    repeated = sum(count - 1 for count in draws.values())
    equal = sum(mine.step in comparable for mine, _ in pairs) - len(wrong)
    first = f", first different at step {wrong[0]}" if wrong else ""
    detail = f"{equal} steps drew as the twin did, {len(draws)} draws of rank 0, {repeated} of them repeated{first}"
    return Check("rng", not wrong and repeated == 0, len(wrong) + repeated, 0, detail)


def _once(steps: list[Step], num_samples: int) -> Check:
    """Every stream position is used once, and within an epoch no sample twice."""
    uses = Counter(position for step in steps for position in step.positions)
    repeated = sum(count - 1 for count in uses.values())
    samples = Counter(
        (position // num_samples, sample) for step in steps for position, sample in zip(step.positions, step.samples, strict=True)
    )
    repeated += sum(count - 1 for count in samples.values())
    missing = max(uses) + 1 - min(uses) - len(uses) if uses else 0
    detail = f"{len(uses)} samples used, {repeated} repeated, {missing} skipped"
    return Check("exactly_once", repeated == 0 and missing == 0, repeated + missing, 0, detail)


def compare_state(ours: Mapping[str, Array], theirs: Mapping[str, Array], tolerances: Mapping[str, float]) -> Check:
    """Compare every tensor by norm: |ours - theirs| / |theirs| against its own tolerance. `worst` is a multiple of that."""
    unknown = set(ours) ^ set(theirs)
    if unknown:
        return Check("final_state", passed=False, worst=float("inf"), limit=1.0, detail=f"only one run has {min(unknown)}")
    ratios = {name: relative(ours[name], theirs[name]) / tolerances.get(name, STATE_FLOOR) for name in theirs}
    worst = max(ratios, key=lambda name: np.inf if np.isnan(ratios[name]) else ratios[name])
    passed = all(ratio <= 1.0 for ratio in ratios.values())
    detail = f"{len(ratios)} tensors, worst {worst}: {relative(ours[worst], theirs[worst]):.2e} of {tolerances.get(worst, STATE_FLOOR):.2e}"
    return Check("final_state", passed, ratios[worst], 1.0, detail)


def relative(mine: Array, twin: Array) -> float:
    """|mine - twin| / |twin| in float64; the norm itself where the twin is zero."""
    reference = float(np.linalg.norm(twin.astype(np.float64)))
    difference = float(np.linalg.norm(mine.astype(np.float64) - twin.astype(np.float64)))
    return difference / reference if reference else difference


def state_tolerances(one: Path, other: Path, *, factor: float = STATE_FACTOR, floor: float = STATE_FLOOR) -> dict[str, float]:
    """Tolerance of every tensor, from the final states of two fresh runs on two meshes: `factor` times their difference.

    That difference is pure rounding (another order of summation), carried through all steps. The factor allows for a
    run that changed its mesh several times. A tensor that came out almost equal by chance gets what is usual for the
    others (the median), and never less than the floor. What a faulty restore leaves out moves tensors by 1e-3 and more.
    """
    first, second = read_final(one), read_final(other)
    differences = {name: relative(first[name], second[name]) for name in first}
    usual = float(np.median(list(differences.values())))
    return {name: max(floor, factor * max(difference, usual)) for name, difference in differences.items()}


def judge_controls(folder: Path, twin: Path, *, loss_tolerance: float = LOSS_TOLERANCE) -> list[Control]:
    """Judge the runs that `reference --controls` continued: folder/complete and folder/without-<what>."""
    theirs = read_lineage(twin)
    verdicts: list[Control] = []
    for path in sorted(folder.iterdir()):
        ours = read_lineage(path)
        checks = compare_steps(ours, theirs, ours.steps, loss_tolerance)
        omitted = path.name.removeprefix("without-") if path.name != "complete" else ""
        loss = next((check.worst for check in checks if check.name == "loss"), float("nan"))
        verdicts.append(Control(omitted, tuple(check.name for check in checks if not check.passed), loss))
    return verdicts
