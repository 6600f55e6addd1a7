"""What the core remembers to save work at thousands of nodes must give what looking at everything gives."""

from __future__ import annotations

import random

import msgspec
import pytest

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import membership
from regrow.supervisor.core import turn as turns
from regrow.supervisor.core.fold import fold
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.sim import faults
from regrow.supervisor.sim.simulate import run_seed

change = msgspec.structs.replace


def test_changed_nodes_only_equals_a_scan_of_all(small) -> None:
    """Nodes fall silent, come back, get other hardware, appear, are quarantined and cordoned, in any order."""
    setup, workload = small(nodes=24, days=0.05)
    worlds = []
    run_seed(setup, workload, lambda _rng: (), 1, prepare=worlds.append)
    view = worlds[0].leader.view
    job = view.jobs[workload.spec.job]
    rng = random.Random(7)
    num_out = 0
    for round_ in range(400):
        name = rng.choice(sorted(view.nodes))
        node = view.nodes[name]
        match rng.randrange(6):
            case 0:
                view = change(view, nodes=view.nodes | {name: change(node, silent_since=None if node.silent_since else 1.0)})
            case 1:
                view = change(view, nodes=view.nodes | {name: change(node, hardware_id=rng.choice(["", "twin", f"c-{name}"]))})
            case 2:
                key = rng.choice([f"node:{name}", "twin", f"c-{name}", *(device.uuid for device in node.devices)])
                state = rng.choice(["quarantined", "healthy"])
                record = QuarantineRecord(key=key, state=state, since=0.0, until=9.0, node=name, reason="x")
                view = change(view, quarantine=view.quarantine | {key: record})
            case 3:
                view = change(view, cordoned=view.cordoned ^ {name})
            case 4:
                view = change(view, nodes=view.nodes | {f"x{round_}": change(node, name=f"x{round_}")})
            case _:
                view = change(view, nodes=view.nodes | {name: change(node, leaving="" if node.leaving else "asked")})
        expected = {other: why for other, found in view.nodes.items() if (why := membership.why_not(view, found, job))}
        assert membership.blocked(view, job) == expected
        assert list(membership.blocked(view, job)) == list(expected)
        num_out += len(expected)
    assert num_out > 400


def test_a_start_folded_at_once_equals_one_by_one(small, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, workload = small(days=0.5)
    at_once = run_seed(setup, workload, lambda rng: faults.chaos(setup, rng), 3)
    num_starts = 0

    def one_by_one(view, decision, now):
        nonlocal num_starts
        for action in decision.actions:
            num_starts += isinstance(action, a.StartMember)
            view = fold(view, e.Issued(at=now, seq=view.next_seq, action=action, reason=decision.reason))
        return view

    monkeypatch.setattr(turns, "_fold_decided", one_by_one)
    assert run_seed(setup, workload, lambda rng: faults.chaos(setup, rng), 3).digest == at_once.digest
    assert num_starts > 128
