"""K07: victims are not the cause. No wall clock goes in, so none can invert the answer; what the agents' clocks say is only shown to people."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.health.attribution import Attribution, NodeEvidence, RankEvidence, attribute
from regrow.wire import HealthVerdict, RankProgress, WorkerExit

TIMEOUT = "[rank{}]:[E1128 04:41:0{}.3 ProcessGroupNCCL.cpp:632] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38311"


def ended(rank: int, *, code: int = 1, signal: int = 0, lines: tuple[str, ...] = (), step: int = 10, **values: object) -> RankEvidence:
    fields = {key: values.pop(key) for key in ("torn_down", "oom_killed", "declared_end", "error") if key in values}
    end = WorkerExit(
        rank=rank, local_rank=rank % 2, pid=1000 + rank, exit_code=0 if signal else code, signal=signal, last_step=step, **fields
    )  # type: ignore[arg-type]
    return RankEvidence(rank=rank, node=f"n{rank // 2}", exit=end, last_lines=lines, **values)  # type: ignore[arg-type]


def running(rank: int, *, step: int = 10, age: float = 30.0, stopped: bool = False) -> RankEvidence:
    progress = RankProgress(rank=rank, started_step=step + 1, applied_step=step, phase="step", age_seconds=age)
    return RankEvidence(rank=rank, node=f"n{rank // 2}", progress=progress, stopped=stopped)


def timeout(rank: int, second: int = 7) -> RankEvidence:
    return ended(rank, signal=6, lines=(TIMEOUT.format(rank, second, rank),))


def roles(got: Attribution) -> dict[int, str]:
    return {one.rank: one.role for one in got.ranks}


def test_a_silent_rank_is_the_cause_when_the_others_time_out() -> None:
    got = attribute([timeout(0), timeout(1), timeout(2), running(3)])
    assert (got.kind, got.cause_ranks) == ("hang", (3,))
    assert roles(got) == {0: "victim", 1: "victim", 2: "victim", 3: "cause"}


def test_a_stopped_process_among_ranks_that_wait_silently() -> None:
    got = attribute([running(0), running(1), running(2), running(3, stopped=True)])
    assert got.cause_ranks == (3,)
    assert set(roles(got).values()) == {"cause", "victim"}


def test_the_one_that_is_behind_among_several_silent() -> None:
    got = attribute([timeout(0), timeout(1), running(2, step=10), running(3, step=9)])
    assert got.cause_ranks == (3,)


def test_nobody_stands_out_is_unknown() -> None:
    got = attribute([timeout(0), timeout(1), running(2), running(3)])
    assert (got.kind, got.cause_ranks) == ("unknown", ())
    assert attribute([timeout(rank) for rank in range(4)]).kind == "unknown"
    assert attribute([]).kind == "unknown"


def test_a_python_error_while_the_others_lose_their_peer() -> None:
    trace = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: bad batch")
    got = attribute([ended(0, lines=(RESET,)), ended(1, lines=trace), ended(2, lines=(RESET,)), ended(3, torn_down=True, signal=15)])
    assert (got.kind, got.action, got.cause_ranks) == ("user_code", "fix_code", (1,))
    assert roles(got) == {0: "victim", 1: "cause", 2: "victim", 3: "torn_down"}


def test_the_error_file_speaks_when_the_log_does_not() -> None:
    got = attribute([ended(0, lines=(RESET,)), ended(1, error="Traceback ...\nKeyError: 'input_ids'")])
    assert got.cause_ranks == (1,)


def test_the_same_error_everywhere_is_one_cause_on_all() -> None:
    got = attribute([ended(rank, lines=("TypeError: forward() missing 1 required positional argument: 'mask'",)) for rank in range(4)])
    assert (got.kind, got.cause_ranks) == ("user_code", (0, 1, 2, 3))


@pytest.mark.parametrize("told_by", ["agent", "kernel"])
def test_out_of_memory_on_a_node(told_by: str) -> None:
    killed = ended(2, signal=9, oom_killed=told_by == "agent")
    kernel = NodeEvidence(
        node="n1",
        kernel_lines=("Memory cgroup out of memory: Killed process 1002 (python3) total-vm:1kB, anon-rss:1kB",)
        if told_by == "kernel"
        else (),
    )
    got = attribute([ended(0, lines=(RESET,)), ended(1, lines=(RESET,)), killed, ended(3, lines=(RESET,))], [kernel])
    assert got.cause_ranks == (2,)
    assert got.kind.startswith("host_oom")
    assert got.action == "restart_app"


def test_an_oom_kill_of_another_process_is_not_this_ranks() -> None:
    node = NodeEvidence(node="n1", kernel_lines=("Out of memory: Killed process 77 (java) total-vm:1kB",))
    got = attribute([ended(2, signal=9), ended(0, lines=(RESET,))], [node])
    assert (got.kind, got.cause_ranks) == ("worker_killed", (2,))


def test_a_lost_node_outranks_everything_said_elsewhere() -> None:
    got = attribute([ended(0, lines=(RESET,)), timeout(1), running(2), running(3)], [NodeEvidence(node="n1", lost=True)])
    assert (got.kind, got.cause_nodes, got.cause_ranks) == ("node_lost", ("n1",), (2, 3))


def test_the_gpu_that_is_unhealthy_names_its_rank_and_no_other() -> None:
    sick = HealthVerdict(state="unhealthy", action="reset", reason="gpu_mem_uncorrectable: Xid 48", device_uuids=("GPU-b",))
    crash = ("RuntimeError: CUDA error: an illegal memory access was encountered",)
    got = attribute(
        [
            ended(0, lines=crash, device_uuid="GPU-a"),
            ended(1, lines=crash, device_uuid="GPU-b"),
            ended(2, lines=(RESET,), device_uuid="GPU-c"),
        ],
        [NodeEvidence(node="n0", health=sick)],
    )
    assert (got.kind, got.action, got.cause_ranks) == ("gpu_mem_uncorrectable", "reset", (1,))


def test_a_fault_of_a_gpu_that_no_rank_uses_blames_no_rank() -> None:
    sick = HealthVerdict(state="unhealthy", action="reboot", reason="gpu_lost: x", device_uuids=("GPU-unused",))
    got = attribute([ended(0, lines=("ValueError: x",), device_uuid="GPU-a")], [NodeEvidence(node="n0", health=sick)])
    assert (got.kind, got.cause_ranks) == ("user_code", (0,))


def test_a_degraded_node_is_not_condemned() -> None:
    warm = HealthVerdict(state="degraded", action="watch", reason="gpu_thermal: near")
    got = attribute([ended(0, lines=("ValueError: x",)), ended(1, lines=(RESET,))], [NodeEvidence(node="n0", health=warm)])
    assert got.kind == "user_code"


def test_two_different_words_without_an_order_are_unknown() -> None:
    lines = (("ValueError: x",), ("RuntimeError: CUDA error: device-side assert triggered",))
    assert attribute([ended(0, lines=lines[0]), ended(1, lines=lines[1])]).kind == "unknown"
    got = attribute([ended(0, lines=lines[0], received=2), ended(1, lines=lines[1], received=1)])
    assert (got.kind, got.cause_ranks) == ("cuda_assert", (1,))


def test_ends_without_words() -> None:
    assert attribute([ended(0, signal=11), ended(1, lines=(RESET,))]).cause_ranks == (0,)
    assert attribute([ended(0, code=1), ended(1, lines=(RESET,))]).kind == "unknown"
    done = attribute([ended(0, code=0, declared_end=True), ended(1, code=0, declared_end=True)])
    assert roles(done) == {0: "finished", 1: "finished"}


SCENES: tuple[tuple[list[RankEvidence], list[NodeEvidence]], ...] = (
    ([timeout(0), timeout(1), timeout(2), running(3)], []),
    ([ended(0, lines=(RESET,)), ended(1, lines=("ValueError: bad",)), ended(2, lines=(RESET,)), ended(3, lines=(RESET,))], []),
    ([ended(0, lines=(RESET,)), ended(1, lines=(RESET,)), ended(2, signal=9, oom_killed=True), ended(3, lines=(RESET,))], []),
)


@pytest.mark.parametrize(("scene", "cause"), list(zip(SCENES, (3, 1, 2), strict=True)))
@pytest.mark.parametrize("skew", [-2, 0, 2])
def test_skewed_clocks_do_not_invert_the_answer(scene: tuple[list[RankEvidence], list[NodeEvidence]], cause: int, skew: int) -> None:
    """The stamps that agents print into lines differ by the skew of their clocks: any order of stamps gives the same answer."""
    ranks, nodes = scene
    shifted = [
        msgspec.structs.replace(
            one, last_lines=tuple(f"2026-11-28 04:41:{(10 + skew * (one.rank % 2)):02d} {line}" for line in one.last_lines)
        )
        for one in ranks
    ]
    assert attribute(shifted, nodes).cause_ranks == (cause,)


def test_the_order_of_the_arguments_does_not_matter() -> None:
    for ranks, nodes in SCENES:
        answers = {msgspec.json.encode(attribute(order, nodes)) for order in itertools.permutations(ranks)}
        assert len(answers) == 1


@given(st.integers(0, 2**32))
def test_any_evidence_gets_an_answer(seed: int) -> None:
    draw = random.Random(seed)
    makers = (
        timeout,
        lambda rank: running(rank, step=draw.randrange(3), stopped=draw.random() < 0.2),
        lambda rank: ended(rank, code=draw.randrange(3), declared_end=draw.random() < 0.5),
        lambda rank: ended(rank, signal=draw.choice([6, 9, 11, 15]), torn_down=draw.random() < 0.5),
        lambda rank: ended(
            rank, lines=(draw.choice([RESET, "ValueError: x", "Xid", "RuntimeError: CUDA error: unspecified launch failure"]),)
        ),
    )
    ranks = [draw.choice(makers)(rank) for rank in range(draw.randrange(6))]
    got = attribute(ranks, [NodeEvidence(node="n0", lost=draw.random() < 0.1)])
    assert [one.rank for one in got.ranks] == [one.rank for one in ranks]
    assert set(got.cause_ranks) == {one.rank for one in got.ranks if one.role == "cause"}
    assert all(
        one.role == "torn_down"
        for one, rank in zip(got.ranks, ranks, strict=True)
        if rank.exit and rank.exit.torn_down and one.kind != "node_lost"
    )
