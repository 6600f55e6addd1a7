"""The simulator against runs that happened: the same world and faults, and the medians of the recovery phases side by side.

Delays are measured in some runs and tried on others. What is *not* measured is what the simulator is to predict: detection and
decision by the production rules, and which mesh follows. How many steps an incident lost is given to it, as the fault is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import phases
from regrow.supervisor.sim import constants, setup
from regrow.supervisor.sim.constants import Constants, Delay
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.inject import Injector
from regrow.supervisor.sim.models import JOB, Workload
from regrow.supervisor.sim.recorded import KINDS, Recorded, Seen, median
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed
from regrow.supervisor.sim.world import World

WITHIN = 0.20
"""Largest relative error of a phase's median."""
RESOLUTION_SECONDS = 0.1
"""Shorter phases are shown and not judged: they are a few messages between processes that share two cores."""
LEAST_OF_A_KIND = 5
"""So many incidents of a kind are shown by themselves, and draw delays of their own."""
JUDGED_OF_A_KIND = 9
"""So many are judged by themselves, too: the 95 % interval of a median of fewer goes from the least to the greatest of them."""
_SPACING_SECONDS = 200.0
"""Between faults in the simulation: each finds a job that trains, as it did in the run."""
_NEVER_SECONDS = 1e7
_WRITE_SECONDS = 1e-3


def measured(runs: Sequence[Recorded]) -> Constants:
    """The shipped constants; what these runs show is drawn from what they show."""
    delays: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, by_fault in run.delays.items():
            for fault, values in by_fault.items():
                delays.setdefault(name, {}).setdefault(fault, []).extend(values)
    return msgspec.structs.replace(constants.load(), **{name: _drawn(by_fault) for name, by_fault in sorted(delays.items())})


def _drawn(by_fault: dict[str, list[float]]) -> Delay:
    values = tuple(value for found in by_fault.values() for value in found)
    after = {fault: tuple(found) for fault, found in by_fault.items() if fault and len(found) >= LEAST_OF_A_KIND}
    return Delay(median=median(values), source="measured in a run", values=values, after=after)


# --- the same in virtual time


def simulated(run: Recorded, delays: Constants, seed: int) -> list[tuple[str, dict[str, float]]]:
    """(label, spans) of the incidents of one simulated repetition of a run."""
    rng = random.Random(f"{run.name}/{seed}/instants")  # noqa: S311  # a simulation is to be repeated
    home = run.home
    usual = run.step_seconds.get(str(home)) or median(list(run.step_seconds.values()))
    sequences = max(1, run.spec.global_batch // run.spec.micro_batch)
    shape = setup.check(
        Setup(
            constants=_of_a_run(delays, usual),
            nodes=len(run.nodes),
            gpus_per_node=run.spec.nproc_per_node,
            days=(len(run.incidents) + 2) * _SPACING_SECONDS / 86_400.0,
            save_seconds=_WRITE_SECONDS,
            stall_seconds=run.stall_seconds,
            interval_seconds=usual * max(run.save_steps, 2 + max(seen.lost_steps for seen in run.incidents)),
            max_interval_seconds=_SPACING_SECONDS,
            step_seconds=usual,
            mesh=home,
            sequences=sequences,
            places=run.spec.nproc_per_node,
            keep=max(2, run.spec.checkpoint.keep_last),
            rate_per_gpu_hour=0.0,
        )
    )
    known = {MeshShape.parse(mesh): seconds for mesh, seconds in run.step_seconds.items()}
    workload = Workload(
        spec=msgspec.structs.replace(run.spec, job=JOB, checkpoint=wire.CheckpointPolicy(path="/c", max_interval_seconds=_SPACING_SECONDS)),
        step_seconds={(mesh.dp, mesh.pp): seconds for mesh, seconds in known.items()},
        home=home,
        full_seconds=usual,
        micro_batches=sequences,
        source="measured in the run",
    )
    worlds: list[World] = []

    def prepare(world: World) -> None:
        worlds.append(world)
        injector = Injector(world)
        for number, (seen, fault) in enumerate(_faults(run), 1):
            world.loop.at(_SPACING_SECONDS * number, lambda seen=seen, fault=fault: _place(world, injector, seen, fault, rng.random()))
            world.loop.at(_SPACING_SECONDS * (number + 0.9), world.leader.post)  # a look at the steps since

    run_seed(shape, workload, lambda _rng: (), seed, prepare=prepare)
    incidents = worlds[0].leader.view.jobs[JOB].incidents
    labels = {number: seen for number, (seen, _) in enumerate(_faults(run), 1)}
    found: list[tuple[str, dict[str, float]]] = []
    for one in incidents:
        if one.recovered_at is not None and one.cause != "planned":
            seen = labels.get(int(one.symptom_at / _SPACING_SECONDS))
            found.append((seen.label if seen is not None and seen.kind == one.kind else one.kind, phases.spans(one)))
    return found


def _of_a_run(delays: Constants, step_seconds: float) -> Constants:
    """Digests are compared once a step in the runs that flip bits. What was committed, or was in memory, is the restore point: the steps
    since then are the run's own."""
    at_once = msgspec.structs.replace(delays.commit, median=0.0, sigma=0.0)
    return msgspec.structs.replace(
        delays, sdc_seen=msgspec.structs.replace(delays.sdc_seen, median=step_seconds, sigma=0.0), commit=at_once
    )


def _compared(run: Recorded) -> list[Seen]:
    """Incidents that the simulator can be given."""
    return [seen for seen in run.incidents if seen.kind in KINDS and not seen.alone and (seen.node in run.nodes or seen.how == "alike")]


def _faults(run: Recorded) -> list[tuple[Seen, Fault]]:
    """The run's faults in their order."""
    found: list[tuple[Seen, Fault]] = []
    for seen in _compared(run):
        seconds = _NEVER_SECONDS if seen.returns_seconds is None else seen.returns_seconds
        place = (run.nodes.index(seen.node) if seen.node in run.nodes else 0,)
        kind = KINDS[seen.kind]
        found.append((seen, Fault(at=0.0, kind=kind, nodes=place, seconds=seconds, component=seen.kind, category=seen.kind, how=seen.how)))
    return found


def _place(world: World, injector: Injector, seen: Seen, fault: Fault, share: float) -> None:
    """As many steps after a save as in the run, and `share` of a step more."""
    run = world.run
    if run is None or run.paces is None or run.state != "training":
        world.loop.after(1.0, lambda: _place(world, injector, seen, fault, share))
        return
    saves = run.paces.saves(run.completed(world.now), world.now + _SPACING_SECONDS)
    done = run.step_done_at(saves[0][0] + seen.lost_steps) if saves else world.now
    world.loop.at(done + share * run.step_seconds, lambda: injector.happen(fault))


# --- side by side


def compare(measured_in: Sequence[Recorded], tried_on: Sequence[Recorded], *, seeds: int = 20) -> dict[str, Any]:
    """The document: medians of each phase over the incidents of `tried_on`, as they were and as simulated with the delays of `measured_in`."""
    delays = measured(measured_in)
    was = [(seen.label, seen.spans) for run in tried_on for seen in _compared(run)]
    made = [pair for run in tried_on for seed in range(1, seeds + 1) for pair in simulated(run, delays, seed)]
    labels = sorted({label for label, _ in was})
    rows = _rows(was, made)
    kinds = {label: ([pair for pair in was if pair[0] == label], [pair for pair in made if pair[0] == label]) for label in labels}
    by_kind = {label: _rows(*pairs) for label, pairs in kinds.items() if len(pairs[0]) >= LEAST_OF_A_KIND}
    off = [row["name"] for row in rows if row["judged"] and not row["within"]]
    many = [(label, found) for label, found in by_kind.items() if len(kinds[label][0]) >= JUDGED_OF_A_KIND]
    off += [f"{label}/{row['name']}" for label, found in many for row in found if row["judged"] and not row["within"]]
    return {
        "phases": {row["name"]: row for row in rows},
        "phases_by_kind": {label: {row["name"]: row for row in found} for label, found in by_kind.items()},
        "whole": _whole("whole", was, made),
        "whole_by_kind": {label: _whole(label, *pairs) for label, pairs in kinds.items()},
        "within": WITHIN,
        "off": off,
        "ok": not off,
        "incidents": {
            "measured_in": sum(len(run.incidents) for run in measured_in),
            "tried_on": len(was),
            "simulated": len(made),
            "left_out": sum(len(run.incidents) for run in tried_on) - len(was),
        },
        "same_kinds": sorted({label for label, _ in made}) == labels,
        "delays": {name: delays.named(name).median for name in sorted({name for run in measured_in for name in run.delays})},
        "seeds": seeds,
    }


_Pairs = list[tuple[str, dict[str, float]]]


def _rows(was: _Pairs, made: _Pairs) -> list[dict[str, Any]]:
    return [_row(phase, [spans[phase] for _, spans in was], [spans[phase] for _, spans in made]) for phase in phases.NAMES]


def _whole(name: str, was: _Pairs, made: _Pairs) -> dict[str, Any]:
    return _row(name, [sum(spans.values()) for _, spans in was], [sum(spans.values()) for _, spans in made])


def _row(name: str, was: list[float], made: list[float]) -> dict[str, Any]:
    real, virtual = median(was), median(made)
    error = virtual / real - 1.0 if real > 0 else 0.0
    judged = max(real, virtual) >= RESOLUTION_SECONDS
    return {
        "name": name,
        "measured_seconds": real,
        "simulated_seconds": virtual,
        "error": error,
        "judged": judged,
        "within": bool(made) and (abs(error) <= WITHIN or not judged),
    }


def text(document: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    numbers = document["incidents"]
    lines = [
        f"delays measured in {numbers['measured_in']} incidents, tried on {numbers['tried_on']} others, {document['seeds']} seeds",
        "phase         measured  simulated    error",
    ]
    lines += [_line(row, document) for row in (*document["phases"].values(), document["whole"], *document["whole_by_kind"].values())]
    for label, rows in document["phases_by_kind"].items():
        lines += [f"-- {label}", *(_line(row, document) for row in rows.values())]
    if numbers["left_out"]:
        lines.append(f"{numbers['left_out']} incidents are left out: of a job with one member, or of a kind that the simulator has not")
    return lines


def _line(row: dict[str, Any], document: dict[str, Any]) -> str:
    note = "" if not row["judged"] else "  ok" if row["within"] else f"  off by more than {document['within']:.0%}"
    return f"{row['name']:<13}{row['measured_seconds']:8.2f} s {row['simulated_seconds']:8.2f} s {row['error']:+8.0%}{note}"
