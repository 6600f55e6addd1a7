"""Limits of a hang by phase, learned and stated; scripts that report nothing. Tables and the edge's own objects."""

from __future__ import annotations

import msgspec
import pytest

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.local.job import hang_phases
from regrow.supervisor.core import events as e
from regrow.supervisor.core.hang_limits import PHASES, limit
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import LearnedRecord
from regrow.supervisor.core.view import Effort, GenerationView, JobView, Member
from regrow.supervisor.detector import Stall
from regrow.supervisor.learned import Learned
from regrow.supervisor.linger import Linger
from regrow.supervisor.phase_times import PhaseTimes

SPEC = wire.GenerationSpec(job="j", epoch=1, generation=1, mesh=MeshShape(dp=2), world_size=2, nodes=("a",))


def generation(*, first_step_at: float | None = 1.0) -> GenerationView:
    workers = tuple(wire.WorkerAssignment(rank=rank, local_rank=rank) for rank in range(2))
    members = {"a": Member(node="a", group_rank=0, workers=workers)}
    return GenerationView(spec=SPEC, stage="running", members=members, created_at=0.0, first_step_at=first_step_at)


def job(*, first_step_at: float | None = 1.0, **spec: object) -> JobView:
    stated = wire.JobSpec(job="j", argv=("x.py",), **spec)  # type: ignore[arg-type]
    return JobView(
        spec=stated,
        submitted_at=0.0,
        effort=Effort(since=0.0, reserved_at=0.0),
        generation=generation(first_step_at=first_step_at),
        step_seconds=(1.0,) * 5,
    )


def words(*phases: str, step: int = 7) -> tuple[wire.RankProgress, ...]:
    return tuple(
        wire.RankProgress(rank=rank, started_step=step, applied_step=step - 1, phase=phase, age_seconds=0.0)
        for rank, phase in enumerate(phases)
    )


@pytest.mark.parametrize(
    ("spec", "phases", "longest", "stopped", "seconds"),
    [
        ({}, {"step"}, {}, False, 30.0),
        ({}, {"eval"}, {}, False, PHASES["eval"]),
        ({}, {"eval"}, {"eval": 20.0}, False, 80.0),
        ({}, {"save", "step"}, {"save": 0.1}, False, 30.0),
        ({}, {"save", "eval"}, {"save": 50.0, "eval": 20.0}, False, 200.0),
        ({"hang_seconds": 6.0}, {"step"}, {"eval": 20.0}, False, 6.0),
        ({"hang_seconds": 6.0}, {"eval"}, {"eval": 20.0}, False, 80.0),
        ({"hang_seconds": 6.0, "hang_phase_seconds": {"eval": 9.0}}, {"eval"}, {"eval": 20.0}, False, 9.0),
        ({"hang_phase_seconds": {"eval": 900.0}}, {"eval", "stopped"}, {}, True, 30.0),
    ],
)
def test_e01_limit_of_what_the_ranks_are_doing(
    spec: dict[str, object], phases: set[str], longest: dict[str, float], stopped: bool, seconds: float
) -> None:
    assert limit(job(**spec), Policy(), stopped=stopped, phases=phases, longest=longest) == seconds


def test_before_the_first_step_a_restore_has_at_least_the_time_of_a_start() -> None:
    fresh = job(first_step_at=None, hang_phase_seconds={"restore": 5.0})
    assert limit(fresh, Policy(), stopped=False, phases={"restore"}, longest={}) == Policy().hang_first_step_seconds


def test_a_generation_that_a_new_leader_took_over_is_not_before_its_first_step() -> None:
    """It may hang in an evaluation since long ago; the leader that saw its first step is gone."""
    taken = job(first_step_at=None, hang_phase_seconds={"eval": 5.0})
    assert taken.generation is not None
    taken = msgspec.structs.replace(taken, generation=msgspec.structs.replace(taken.generation, adopted=True))
    assert limit(taken, Policy(), stopped=False, phases={"eval"}, longest={}) == 5.0
    assert limit(taken, Policy(), stopped=False, phases={"restore"}, longest={}) == PHASES["restore"]


def test_phases_are_learned_when_they_end_and_only_then() -> None:
    times = PhaseTimes()
    times.words(1, words("step", "step"), 0.0)
    times.words(1, words("eval", "eval"), 1.0)
    assert not times.longest()
    times.words(1, words("eval", "stopped"), 5.0)
    times.words(1, words("step", "eval"), 11.0)
    assert times.longest() == {"eval": 10.0}
    times.words(2, words("restore", "restore"), 50.0)
    assert times.longest() == {"eval": 10.0}, "the end of a generation is not the end of a phase"
    times.words(2, words("model", "restore"), 53.0)
    times.took("save", 0.25)
    assert times.longest() == {"eval": 10.0, "restore": 3.0, "save": 0.25}


def test_what_was_long_once_is_forgotten() -> None:
    times = PhaseTimes()
    times.took("save", 500.0)
    for _ in range(16):
        times.took("save", 1.0)
    assert times.longest() == {"save": 1.0}


def test_e01_a_rank_that_sleeps_in_an_evaluation_is_found_within_its_limit() -> None:
    """Beats go on, the others wait in the next step: the limit is the evaluation's, not the step's."""
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words(words("eval", "eval"), 10.0)
    stall.words(words("step", "eval"), 14.0)
    one = job(hang_phase_seconds={"eval": 60.0})
    for now in (40.0, 73.9):
        stall.words(words("step", "eval"), now)
        assert stall.look(now, limit(one, Policy(), stopped=False, phases=stall.phases, longest={})) is None
    found = stall.look(74.0, limit(one, Policy(), stopped=False, phases=stall.phases, longest={}))
    assert found is not None
    assert found.limit_seconds == 60.0


def test_e03_a_save_that_a_kill_cut_off_is_held_against_nobody() -> None:
    """The rank died in a save: the next generation trains ten limits long without a verdict, and nothing was learned of that save."""
    times, one = PhaseTimes(), job(hang_seconds=5.0)
    times.words(1, words("save", "save"), 0.0)
    stall = Stall(job="j", generation=2, changed_at=10.0)
    for number in range(50):
        now = 10.0 + number
        times.words(2, words("step", "step", step=8 + number), now)
        stall.words(words("step", "step", step=8 + number), now)
        assert stall.look(now, limit(one, Policy(), stopped=False, phases=stall.phases, longest=times.longest())) is None
    assert times.longest() == {}


def test_e03_a_second_stall_in_one_generation_is_a_second_verdict() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    told = []
    for now in range(40):
        step = 1 if now < 15 else 2
        stall.words(words("step", "step", step=step), float(now))
        told += [now] if stall.look(float(now), 8.0) is not None else []
    assert told == [8, 23]


class TestScriptsThatReportNothing:
    def test_idle_ranks_are_hung_once_and_taken_back_when_they_work(self) -> None:
        linger, view = Linger("j", 1), generation(first_step_at=None)
        for second in range(41):
            linger.used({0: 5.0 + 0.0001 * second, 1: 7.0}, float(second))
            found = linger.idle(view, float(second), 40.0)
            assert (found is not None) == (second == 40)
        assert found is not None
        assert ([word.rank for word in found.ranks], found.since, found.lingering) == ([0, 1], 0.0, False)
        linger.used({0: 5.0, 1: 7.0}, 41.0)
        assert linger.idle(view, 41.0, 40.0) is None, "said once"
        (resumed,) = linger.used({0: 6.0, 1: 7.0}, 42.0)
        assert isinstance(resumed, e.ProgressResumed)

    def test_one_that_works_excuses_all(self) -> None:
        linger, view = Linger("j", 1), generation(first_step_at=None)
        for second in range(200):
            linger.used({0: 0.2 * second, 1: 7.0}, float(second))
            assert linger.idle(view, float(second), 40.0) is None

    def test_a_rank_that_is_not_heard_of_is_not_idle(self) -> None:
        linger, view = Linger("j", 1), generation(first_step_at=None)
        for second in range(100):
            linger.used({0: 5.0}, float(second))
            assert linger.idle(view, float(second), 40.0) is None


def test_flags() -> None:
    assert hang_phases(("eval=600", "save=2.5")) == {"eval": 600.0, "save": 2.5}
    for word in ("evaluation=3", "eval", "eval=", "eval=-1", "eval=0", "eval=inf", "eval=nan", "eval=x"):
        with pytest.raises(ConfigurationError, match="cannot read"):
            hang_phases((word,))
    assert msgspec.json.decode(msgspec.json.encode(job().spec), type=wire.JobSpec).hang_phase_seconds == {}


def test_what_was_learned_goes_on_in_the_next_leaders_term() -> None:
    """An evaluation of 200 s is no hang after ten minutes of the old leader and is none for the new one; nor is a step before its first."""
    written: list[LearnedRecord] = []
    old = Learned(Policy(), lambda _, record: written.append(record))
    old.times("j").words(1, words("eval", "eval"), 0.0)
    old.times("j").words(1, words("step", "step"), 200.0)
    old.keep({"j": job()}, 200.0)
    assert written == [LearnedRecord(generation=1, step_seconds=1.0, phase_seconds={"eval": 200.0})]
    new = Learned(Policy(), lambda _, record: written.append(record))
    new.loaded("j", written[0], 0.0)
    taken = msgspec.structs.replace(job(first_step_at=None), step_seconds=(), learned=written[0])
    assert taken.generation is not None
    taken = msgspec.structs.replace(taken, generation=msgspec.structs.replace(taken.generation, adopted=True))
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words(words("eval", "eval"), 1.0)
    assert new.limit(taken, stall) == 800.0
    stall.words(words("step", "step"), 2.0)
    assert new.limit(taken, stall) == Policy().hang_floor_seconds
    later = msgspec.structs.replace(SPEC, generation=2)
    fresh = msgspec.structs.replace(taken, generation=msgspec.structs.replace(taken.generation, spec=later))
    assert new.limit(fresh, stall) == Policy().hang_first_step_seconds, "the next generation has its first step before it"


def test_times_are_written_when_they_matter_and_not_at_every_turn() -> None:
    written: list[LearnedRecord] = []
    kept = Learned(Policy(), lambda _, record: written.append(record))
    steady = job()
    for now in range(600):
        kept.keep({"j": steady}, float(now))
    assert len(written) == 1
    for now in range(600, 1200):
        kept.keep({"j": msgspec.structs.replace(steady, step_seconds=(1.0 + now,) * 5)}, float(now))
    assert 2 < len(written) <= 11
