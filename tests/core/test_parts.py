"""Tables of the small parts: votes, ladder, ledger, quarantine, odd ranks, goodput, membership."""

from __future__ import annotations

import msgspec
import pytest
from world import PROGRAM, World, hello, running, spec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core import goodput, hang, ladder, ledger, membership, quarantine, rates, restore, sdc, tracebacks
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, LedgerRecord, QuarantineRecord
from regrow.supervisor.core.symptoms import find

# --- digest votes


@pytest.mark.parametrize(
    ("mesh", "digests", "verdict", "suspects"),
    [
        (MeshShape(), {0: "a"}, "skipped", ()),
        (MeshShape(dp=2), {0: "a", 1: "a"}, "agree", ()),
        (MeshShape(dp=2), {0: "a", 1: "b"}, "diverged", ()),
        (MeshShape(dp=3), {0: "a", 1: "a", 2: "b"}, "diverged", (2,)),
        (MeshShape(dp=3), {0: "a", 1: "b", 2: "c"}, "diverged", ()),
        (MeshShape(dp=4), {0: "a", 1: "a", 2: "b", 3: "b"}, "diverged", ()),
        (MeshShape(dp=5), {0: "a", 1: "a", 2: "a", 3: "b", 4: "c"}, "diverged", (3, 4)),
        (MeshShape(dp=3), {0: "a", 1: "a"}, "skipped", ()),
        (MeshShape(dp=3), {0: "a", 1: "a", 2: ""}, "skipped", ()),
        (MeshShape(dp=3, tp=2), {0: "a", 1: "x", 2: "a", 3: "x", 4: "a", 5: "x"}, "agree", ()),
        (MeshShape(dp=3, tp=2), {0: "a", 1: "x", 2: "a", 3: "y", 4: "a", 5: "x"}, "diverged", (3,)),
        (MeshShape(dp=3, pp=2), {0: "a", 1: "x", 2: "b", 3: "x", 4: "a", 5: "x"}, "diverged", (2,)),
        (MeshShape(dp=4), {0: "2/a", 1: "2/b", 2: "2/a", 3: "2/b"}, "agree", ()),
        (MeshShape(dp=4), {0: "2/a", 1: "2/b", 2: "2/a", 3: "2/c"}, "diverged", ()),
        (MeshShape(dp=6), {0: "2/a", 1: "2/b", 2: "2/a", 3: "2/c", 4: "2/a", 5: "2/b"}, "diverged", (3,)),
        (MeshShape(dp=3), dict.fromkeys(range(3), wire.AT_REST), "skipped", ()),
        (MeshShape(dp=3, pp=2), {0: "a", 1: "rest", 2: "b", 3: "rest", 4: "a", 5: "rest"}, "diverged", (2,)),
        (MeshShape(dp=2, pp=2), {0: "a", 1: "rest", 2: "a", 3: "rest"}, "agree", ()),
    ],
)
def test_vote(mesh: MeshShape, digests: dict[int, str], verdict: str, suspects: tuple[int, ...]) -> None:
    result = sdc.vote(mesh, digests)
    assert (result.verdict, result.suspects) == (verdict, suspects)
    assert result.reason


def test_one_replica_that_looked_at_its_own_memory_is_told_from_one_that_did_not() -> None:
    mesh = MeshShape(tp=2)
    assert [sdc.vote(mesh, digests).rested for digests in ({0: "a", 1: "b"}, {0: "a"}, {0: "a", 1: ""})] == [True, False, False]


# --- ladder


def situation(**changes: object) -> ladder.Situation:
    values: dict[str, object] = {
        "world_before": 8,
        "world_after": 8,
        "same_members": True,
        "uses_spare": False,
        "restart_seconds": 10.0,
        "redo_seconds": 5.0,
        "older_redo_seconds": 0.0,
        "wait_seconds": 600.0,
        "horizon_seconds": 600.0,
    }
    return ladder.Situation(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rung"),
    [
        ({}, "warm_restart"),
        ({"world_before": 1, "world_after": 1}, "warm_restart"),
        ({"same_members": False, "uses_spare": True}, "spare"),
        ({"same_members": False, "world_after": 6}, "shrink"),
        ({"same_members": False, "world_after": 6, "wait_seconds": 1.0}, "wait"),
        ({"older_redo_seconds": 60.0}, "roll_back"),
        ({"same_members": False, "world_after": 1, "wait_seconds": float("inf")}, "shrink"),
        ({"same_members": False, "world_after": 0, "wait_seconds": float("inf")}, "park"),
    ],
)
def test_ladder(changes: dict[str, object], rung: str) -> None:
    chosen, rungs = ladder.climb(situation(**changes))
    assert chosen.name == rung
    assert [item.name for item in rungs] == ["wait", "warm_restart", "in_place", "spare", "shrink", "roll_back", "park"]
    text = ladder.explain(chosen, rungs)
    assert text.startswith(rung)
    assert "GPU-s" in text or text == "park (nothing better: nothing can be formed)"
    assert ("park" in text) == (rung == "park"), "it is no choice where something can be formed"


def test_ladder_takes_the_least_and_prints_the_numbers() -> None:
    chosen, rungs = ladder.climb(situation(same_members=False, world_after=6))
    assert chosen.lost_gpu_seconds == min(item.lost_gpu_seconds for item in rungs)
    assert ladder.explain(chosen, rungs) == "shrink (1320 GPU-s: 6 of 8 workers for 600 s) < wait (4920 GPU-s)"


# --- ledger


def charge(number: int, **changes: object) -> Charge:
    values: dict[str, object] = {"at": float(number), "cause": "program", "generation": number, "incident": f"i{number}", "step": number}
    return Charge(**(values | changes))  # type: ignore[arg-type]


def test_one_incident_is_one_charge() -> None:
    book = ledger.add(ledger.add(LedgerRecord(), charge(1)), charge(2, incident="i1"))
    assert len(book.charges) == 1


@pytest.mark.parametrize(
    ("before", "now", "allowed", "words"),
    [
        ([], charge(1, step=5), True, "restart 1 of 2"),
        ([], charge(1, step=0, early=True), False, "before the first step"),
        ([], charge(1, step=0, cause="unknown"), True, "restart 1 of 2"),
        ([charge(1, step=5, fingerprint="x")], charge(2, step=5, fingerprint="x"), False, "twice at the same place at step 5"),
        ([charge(1, step=5, fingerprint="x")], charge(2, step=6, fingerprint="x"), True, "restart 2 of 2"),
        ([charge(1, step=5, fingerprint="x")], charge(2, step=5, fingerprint="y"), True, "restart 2 of 2"),
        ([charge(1), charge(2)], charge(3), False, "restart 3 of 2 by cause program"),
        ([charge(1), charge(2)], charge(3, cause="infrastructure"), True, "restart 1 of 20"),
        ([charge(n, step=5, cause="unknown") for n in range(5)], charge(9, step=5, cause="unknown"), False, "no progress: 6 failures"),
        ([charge(n, step=5, cause="infrastructure") for n in range(9)], charge(9, step=5, cause="unknown"), True, "restart 1 of 2"),
    ],
)
def test_judge(before: list[Charge], now: Charge, allowed: bool, words: str) -> None:
    verdict = ledger.judge(LedgerRecord(charges=tuple(before)), now, spec(max_restarts=2), Policy())
    assert verdict.allowed == allowed
    assert words in verdict.reason
    if not allowed:  # a used up budget may be tried again by a scheduler, the others would fail the same way
        assert verdict.exit_code == (1 if words.startswith("restart") else ledger.DO_NOT_REQUEUE)


def test_delays_double_without_progress_and_vanish_with_it() -> None:
    policy = Policy(no_progress_unknown_limit=100)
    delays = []
    book = LedgerRecord()
    for number in range(6):
        new = charge(number, step=5, cause="unknown")
        delays.append(ledger.judge(book, new, spec(), policy).delay_seconds)
        book = ledger.add(book, new)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert ledger.judge(book, charge(9, step=6, cause="unknown"), spec(), policy).delay_seconds == 0.0
    assert ledger.judge(book, charge(9, step=5, cause="infrastructure"), spec(), policy).delay_seconds == 0.0


def test_old_and_restored_charges_do_not_count() -> None:
    book = LedgerRecord(charges=(charge(1), charge(2), charge(3)), restored_at=2.0)
    assert [item.generation for item in ledger.counted(book, Policy(), 10.0)] == [3]
    assert not ledger.counted(book, Policy(budget_window_seconds=5.0), 100.0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (PROGRAM, PROGRAM.replace("/x/", "/tmp/run-77/"), True),
        (PROGRAM, PROGRAM.replace("line 12", "line 13"), False),
        ("ValueError: rank 3 at 0x7f01", "ValueError: rank 5 at 0x7fff", True),
        ("ValueError: a", "KeyError: a", False),
        ("", "", True),
    ],
)
def test_fingerprint(one: str, other: str, same: bool) -> None:
    assert (ledger.fingerprint(one) == ledger.fingerprint(other)) == same


MANY = (
    'Traceback (most recent call last):\n  File "/x/a.py", line 1, in f\n    g()\n    ^^^\n'
    "regrow.errors.OperationalError: rank 0: not durable\n  try: look at the writer's log\n"
)


GROUP = (
    '  + Exception Group Traceback (most recent call last):\n  |   File "/x/a.py", line 1, in f\n  |     g()\n'
    "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
    '    | Traceback (most recent call last):\n    |   File "/x/a.py", line 2, in g\n    |     h()\n    | ValueError: b\n'
    "    +------------------------------------\n"
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PROGRAM, PROGRAM.strip().splitlines()[-1]),
        (MANY, "regrow.errors.OperationalError: rank 0: not durable"),
        ("During handling of the above exception\n\n" + MANY, "regrow.errors.OperationalError: rank 0: not durable"),
        (MANY.replace("  try: look", "try: look"), "regrow.errors.OperationalError: rank 0: not durable"),
        ("ValueError: a\nsecond", "ValueError: a"),
        (GROUP, "ValueError: b"),
        ("\n", ""),
    ],
)
def test_the_line_that_names_the_error(text: str, line: str) -> None:
    assert tracebacks.error_line(text) == line


# --- quarantine


def node(world: World, name: str = "a"):  # type: ignore[no-untyped-def]
    return world.view.nodes[name]


def record(state: str, **changes: object) -> QuarantineRecord:
    values: dict[str, object] = {"key": "GPU-a-0", "state": state, "since": 0.0, "until": 10.0, "strikes": 1, "node": "a", "boot_id": "b1"}
    return QuarantineRecord(**(values | changes))  # type: ignore[arg-type]


def test_every_bad_state_has_a_way_out() -> None:
    world = World()
    world.join("a")
    policy = Policy(burn_in_seconds=5.0, probation_seconds=7.0)
    seen = [record("quarantined")]
    now = 1_000.0
    while seen[-1].state != "healthy":
        now += 20.0
        moved = quarantine.next_state(seen[-1], node(world), policy, now)
        assert moved is not None
        seen.append(moved)
    assert [item.state for item in seen] == ["quarantined", "burn_in", "probation", "healthy"]
    assert seen[-1].strikes == 1


def test_reboot_is_evidence_and_a_bad_verdict_holds() -> None:
    world = World()
    world.join("a", boot_id="b2")
    moved = quarantine.next_state(record("quarantined", until=1e9), node(world), Policy(), 1.0)
    assert moved is not None
    assert moved.state == "burn_in"
    bad = wire.HealthVerdict(state="unhealthy", action="replace", reason="ECC")
    world.tell(e.NodeHealth(at=world.now, node="a", verdict=bad))
    assert quarantine.next_state(record("quarantined", until=0.0), node(world), Policy(), 1e9) is None
    again = quarantine.next_state(record("burn_in"), node(world), Policy(), 20.0)
    assert again is not None
    assert (again.state, again.strikes) == ("quarantined", 2)


def test_cool_down_doubles_with_strikes() -> None:
    world = World()
    world.join("a")
    policy = Policy(quarantine_seconds=10.0, quarantine_most_seconds=60.0)
    last = None
    spans = []
    for _ in range(5):
        last = quarantine.put_out(last, key="k", node=node(world), now=100.0, reason="r", evidence=(), policy=policy)
        spans.append((last.until or 0) - 100.0)
    assert spans == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_second_soft_sign_quarantines_and_an_old_one_does_not() -> None:
    world = World()
    world.join("a")
    policy = Policy(suspect_seconds=100.0)
    first = quarantine.suspect(None, key="k", node=node(world), now=0.0, reason="hang", policy=policy)
    assert first.state == "suspect"
    assert quarantine.suspect(first, key="k", node=node(world), now=50.0, reason="hang", policy=policy).state == "quarantined"
    for later in (100.0, 150.0):
        assert quarantine.suspect(first, key="k", node=node(world), now=later, reason="hang", policy=policy).state == "suspect"
    assert quarantine.next_state(first, node(world), policy, 99.9) is None
    faded = quarantine.next_state(first, node(world), policy, 100.0)
    assert faded is not None
    assert faded.state == "healthy"
    on_probation = record("probation", until=200.0)
    assert quarantine.suspect(on_probation, key="k", node=node(world), now=50.0, reason="hang", policy=policy).state == "quarantined"


def test_breaker_stops_mass_quarantine() -> None:
    world = World(Policy(breaker_nodes=3, breaker_share=0.2))
    names = [f"n{index}" for index in range(10)]
    world.join(*names)
    for name in names[:6]:
        verdict = wire.HealthVerdict(state="unhealthy", action="replace", reason="XID 79", device_uuids=(f"GPU-{name}-0",))
        world.tell(e.NodeHealth(at=world.now, node=name, verdict=verdict))
    assert len(world.view.quarantine) == 3
    window = world.policy.breaker_window_seconds
    for later, is_open in ((0.0, True), (window, True), (window + 0.1, False)):
        assert ("look for a common cause" in quarantine.breaker_open(world.view, world.policy, world.now + later)) == is_open
    assert len(world.view.pages) == 3


def test_hardware_is_known_by_its_own_name() -> None:
    world = World()
    world.join("a", hardware_id="same")
    world.join("b", hardware_id="same")
    assert quarantine.chassis(world.view, node(world, "a")) == "node:a"
    world.join("c", hardware_id="other")
    assert quarantine.chassis(world.view, node(world, "c")) == "other"
    world.tell(e.QuarantineLoaded(at=world.now, records=(record("quarantined", key="GPU-a-1", node="old-name"),)))
    blocked = quarantine.blocked(world.view, node(world, "a"))
    assert blocked is not None
    assert quarantine.blocked(world.view, node(world, "b")) is None


# --- odd ranks


def words(*values: tuple[int, int, str, float]) -> tuple[wire.RankProgress, ...]:
    return tuple(
        wire.RankProgress(rank=rank, started_step=started, applied_step=applied, phase=phase, age_seconds=age)
        for rank, (started, applied, phase, age) in enumerate(values)
    )


SAME = (4, 3, "step", 9.0)


def dumped(place: str, *, current: bool = True) -> str:
    """As faulthandler writes it, newest thread first: a thread of the worker library's own, and the program's."""
    head = "Current thread" if current else "Thread"
    return f'Thread 0x7f (most recent call first):\n  File "regroup.py", line 144 in _watch\n\n{head} 0x8f (most recent call first):\n  {place}'


YOUNGER = '\n\nThread 0x9f (most recent call first):\n  File "threading.py", line 327 in wait'
COLLECTIVE, LOOP = 'File "distributed_c10d.py", line 3252 in all_reduce', 'File "job.py", line 150 in compute'


@pytest.mark.parametrize(
    ("ranks", "stacks", "odd"),
    [
        (words(SAME, SAME, SAME, SAME), {}, -1),
        (words(SAME, SAME, (4, 3, "stopped", 9.0), SAME), {}, 2),
        (words(SAME, (3, 2, "step", 9.0), SAME, SAME), {}, 1),
        (words(SAME, (3, 3, "step", 9.0), SAME, SAME), {}, 1),
        (words(SAME, SAME, (4, 3, "eval", 9.0), SAME), {}, 2),
        (words(SAME, SAME, SAME, (4, 3, "step", 11.0)), {}, 3),
        (words(SAME, SAME, SAME, SAME), {0: "x", 1: "x", 3: "x"}, 2),
        (words(SAME, SAME, SAME, SAME), {0: 'File "a"', 1: 'File "a"', 2: 'File "b"', 3: 'File "a"'}, 2),
        (words(*[SAME] * 4), {rank: dumped(LOOP if rank == 2 else COLLECTIVE) for rank in range(4)}, 2),
        (words(*[SAME] * 4), {rank: dumped(LOOP if rank == 1 else COLLECTIVE, current=False) for rank in range(4)}, 1),
        (words(*[SAME] * 4), {rank: dumped(LOOP if rank == 3 else COLLECTIVE) + YOUNGER for rank in range(4)}, 3),
        (words(SAME, (3, 2, "step", 9.0), (3, 2, "step", 9.0), SAME), {}, -1),
        (words(SAME), {}, 0),
        ((), {}, -1),
    ],
)
def test_odd_rank(ranks: tuple[wire.RankProgress, ...], stacks: dict[int, str], odd: int) -> None:
    found = hang.odd_rank(ranks, stacks)
    assert found.rank == odd
    assert found.why


# --- limits, goodput, membership


def test_hang_limit_is_learned_and_a_fixed_one_wins() -> None:
    world = running("a", steps=0, commit=None)
    assert rates.hang_limit(world.job, Policy()) == Policy().hang_first_step_seconds
    for number in range(1, 6):
        world.step(number, seconds=10.0)
    assert rates.hang_limit(world.job, Policy()) == 80.0
    assert rates.hang_limit(world.job, Policy(hang_floor_seconds=200.0)) == 200.0
    assert rates.hang_limit(world.job, Policy(hang_floor_seconds=5.0), stopped=True) == 30.0
    fixed = msgspec.structs.replace(world.job, spec=msgspec.structs.replace(world.job.spec, hang_seconds=3.0))
    assert rates.hang_limit(fixed, Policy()) == 3.0


def test_failure_rate_is_a_gamma_posterior() -> None:
    world = running("a", checkpoint=wire.CheckpointPolicy(path="/c", prior_failures_per_hour=1.0))
    job = world.job
    assert rates.failure_rate(job, job.submitted_at) == pytest.approx(1 / 3600)
    assert rates.failure_rate(job, job.submitted_at + 3600) == pytest.approx(1 / 7200)
    assert rates.failure_rate(job, job.submitted_at + 3600, more=1) == pytest.approx(2 / 7200)


def test_batches_of_failures_are_told_from_chance() -> None:
    world = running("a")

    def with_charges(times: list[float]) -> float | None:
        book = LedgerRecord(charges=tuple(charge(index, at=time) for index, time in enumerate(times)))
        return rates.over_dispersed(msgspec.structs.replace(world.job, ledger=book))

    regular = [100.0 * index for index in range(12)]
    bursts = [10_000.0 * (index // 4) + index % 4 for index in range(12)]
    assert with_charges(regular) is None
    assert with_charges(bursts[:7]) is None, "seven incidents are too few"
    assert with_charges(bursts[:8]) is not None, "eight are not"
    found = with_charges(bursts)
    assert found is not None
    assert found > 3.0


def test_goodput_counts_lost_work_and_idle_time() -> None:
    world = running("a", steps=20, commit=20, nproc_per_node=2)
    began = world.job.effort.since
    assert goodput.ratio(world.job, world.now) == pytest.approx(20 / (world.now - began), rel=0.01)
    world.steps(21, 25)
    world.exit(0, signal=9)
    world.wait(1)
    assert world.job.effort.lost_steps == 5
    before = goodput.ratio(world.job, world.now)
    world.now += 100
    after = goodput.ratio(world.job, world.now)
    assert before is not None
    assert after is not None
    assert after < before < 1.0
    assert goodput.ettr(world.job, world.now) == pytest.approx(20 / (world.now - began))


def test_scaling_efficiency_is_relative_to_the_smallest_world() -> None:
    world = running("a", "b")
    job = msgspec.structs.replace(world.job, mesh_seconds={"small": (2, 4.0), "big": (4, 2.5)})
    assert goodput.scaling_efficiency(job) == {"small": 1.0, "big": pytest.approx(0.8)}


@pytest.mark.parametrize(
    ("previous", "now", "least", "may"),
    [
        (("a", "b", "c"), "ab", 0, True),
        (("a", "b", "c"), "a", 0, False),
        (("a", "b"), "a", 0, False),
        (("a", "b", "c"), "xyz", 0, False),
        (("a", "b", "c"), "a", 1, True),
        ((), "a", 1, True),
        ((), "", 1, False),
    ],
)
def test_majority_or_an_explicit_bound(previous: tuple[str, ...], now: str, least: int, may: bool) -> None:
    seats = tuple(membership.Seat(node=name, slots=1) for name in now)
    assert (membership.may_form(previous, seats, least) == "") == may


def test_uneven_nodes_are_filled_in_order_and_the_rest_is_spare() -> None:
    world = World()
    world.join("a", slots=2)
    world.join("b", slots=1)
    world.join("c", slots=2)
    seats = tuple(membership.Seat(node=name, slots=world.view.nodes[name].slots) for name in "abc")
    made = membership.assign(seats, 3, world.view.nodes)
    assert {name: [worker.rank for worker in workers] for name, workers in made.items()} == {"a": [0, 1], "b": [2]}
    with pytest.raises(ValueError, match="do not fit"):
        membership.assign(seats, 6, world.view.nodes)


def test_a_long_run_never_starts_over_in_silence_after_a_corruption() -> None:
    world = running("a", steps=6)
    world.commit(5)
    ruled_out = dict.fromkeys(world.job.checkpoints, "later than the corruption")
    job = msgspec.structs.replace(world.job, frontier=50_000, step_seconds=(2.0, 2.0))
    assert "no usable checkpoint" in restore.choose(job, ruled_out, verified_only=True).forbidden
    short = msgspec.structs.replace(job, frontier=10)
    assert "from step 0" in restore.choose(short, ruled_out, verified_only=True).reason


def test_restore_prefers_verified_after_corruption_and_says_when_it_cannot() -> None:
    world = running("a", steps=6, commit=2)
    world.commit(5)
    assert restore.choose(world.job, {}).point.step == 5  # type: ignore[union-attr]
    assert restore.choose(world.job, {5: "bad"}).point.step == 2  # type: ignore[union-attr]
    unverified = restore.choose(world.job, {}, verified_only=True)
    assert "nothing has verified" in unverified.reason
    world.tell(e.CheckpointMoved(at=world.now, job="j", generation=1, step=2, state="committed", directory="/c", evidence=("read_back",)))
    assert restore.choose(world.job, {}, verified_only=True).point.step == 2  # type: ignore[union-attr]


def test_findings_say_when_to_look_again() -> None:
    world = running("a", "b")
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    found = find(world.view, world.job, world.generation, world.policy, world.now)
    assert not found.symptoms
    assert found.look_at is not None
    assert found.look_at > world.now
    assert "progress excuses it" in found.waiting


def test_unknown_events_of_other_jobs_change_nothing() -> None:
    world = running("a")
    before = world.view
    world.tell(
        e.StepsCompleted(at=world.now, job="nope", generation=1, step=9),
        e.NodeHeard(at=world.now, node="nobody"),
        e.WorkersExited(at=world.now, node="a", job="j", generation=77, exits=()),
        e.MemberPhase(at=world.now, node="zz", job="j", generation=1, phase="started"),
    )
    assert world.view.jobs == before.jobs
    assert world.view.nodes == before.nodes
    assert hello("a").node == "a"
