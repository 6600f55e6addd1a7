"""Bugs of the core that seeds have found, as the shortest events that show them."""

from __future__ import annotations

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.invariants import check
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.core.turn import turn
from regrow.supervisor.core.view import View

POLICY = Policy(join_seconds=0.0)
SPEC = wire.JobSpec(
    job="j", argv=("t.py",), min_nodes=1, max_nodes=2, mesh=MeshShape(dp=2), global_batch=2, checkpoint=wire.CheckpointPolicy(path="/c")
)
ERROR = 'Traceback (most recent call last):\n  File "t.py", line 3, in step\nRuntimeError: x'


def tell(view: View, now: float, *events: e.Event):
    result = turn(view, events, POLICY, now)
    assert not check(result.view)
    return result


def hello(name: str) -> wire.Hello:
    return wire.Hello(
        cluster="c", node=name, incarnation=name, address=name, peer_address=f"{name}:7", slots=1, spare_store=f"{name}:9",
        health=wire.HealthVerdict(state="healthy"), boot_id="b",
    )  # fmt: skip


def training() -> View:
    view = tell(
        View(), 0.0, e.LeaderStarted(at=0.0, epoch=1), e.NodeJoined(at=0.0, hello=hello("a")), e.NodeJoined(at=0.0, hello=hello("b"))
    ).view
    view = tell(view, 1.0, e.JobLoaded(at=1.0, spec=SPEC, submitted=True)).view
    view = tell(view, 1.1, e.GenerationRecorded(at=1.1, job="j", generation=1)).view
    return tell(view, 9.0, e.StepsCompleted(at=9.0, job="j", generation=1, step=1, step_seconds=1.0)).view


def test_a_record_that_failed_is_not_a_second_failure() -> None:
    """Chaos seed 5: the store was away when the next generation was to be recorded; the retry judged the incident by its own charge."""
    failed = wire.WorkerExit(rank=0, local_rank=0, pid=1, exit_code=1, error=ERROR, last_step=1)
    view = tell(training(), 10.0, e.WorkersExited(at=10.0, node="a", job="j", generation=1, exits=(failed,))).view
    decided = tell(view, 10.2)
    assert any(isinstance(action, a.RecordGeneration) for action in decided.decision.actions)
    lost = e.ActionFailed(at=14.2, seq=1, kind="record_generation", job="j", generation=2, reason="no answer")
    view = tell(decided.view, 14.2, lost).view
    assert view.jobs["j"].outcome is None
    again = tell(view, 15.0)
    assert any(isinstance(action, a.RecordGeneration) for action in again.decision.actions)
    assert len(again.view.jobs["j"].ledger.charges) == 1


def test_a_new_leader_finds_a_job_that_is_over() -> None:
    """Chaos seed 5: the generation record of a failed job is still in the store; it is not a running one."""
    generation = training().jobs["j"].generation
    assert generation is not None
    loaded = e.JobLoaded(
        at=0.0, spec=SPEC, generation=generation.spec, ledger=LedgerRecord(state="failed", reason="x", exit_code=1), highest_generation=1
    )
    result = tell(View(), 0.0, e.LeaderStarted(at=0.0, epoch=2), loaded)
    assert result.view.jobs["j"].outcome is not None
