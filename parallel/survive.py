"""After a loss: shrink, re-plan, re-route or wait; and whether spare nodes pay. Pure estimates with their numbers shown.

Everything is counted in lost seconds of full-speed training over the expected repair time, so the options compare.
"""

from __future__ import annotations

import math

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import shape
from regrow.parallel.planner import Row, plan
from regrow.parallel.reroute import reroute
from regrow.parallel.search import Plan, Request, judge, widest_dp

_MARGIN = 0.05
"""Share of the repair time that a new TP or PP must save to be chosen. Ours: the model ranks plans, it is off by more than
that, and a change of DP alone is the smaller risk."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What a change of mesh costs besides bytes. Seconds and bytes a second; defaults are ours, to be replaced by measured ones."""

    reform_seconds: float = 10.0
    """Fence, stop, start, rendezvous, first step."""
    restore_bytes_per_second: float = 5e9
    """Bytes one GPU reads, from storage or a peer."""
    repair_seconds: float = 3600.0
    """Until a lost node is replaced."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to go on."""

    name: str
    mesh: MeshShape | None
    plan: Plan | None
    step_seconds: float
    """Infinity: training stands still."""
    moved_bytes: float
    """Read by the rank that reads most."""
    transition_seconds: float
    lost_seconds: float
    """Of full-speed training until the repair, a second change back included."""
    reason: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All options in ascending order of lost seconds, and one sentence."""

    lost_nodes: int
    options: tuple[Option, ...]
    verdict: str


def moved_bytes(old: Plan | None, new: Plan) -> float:
    """Bytes that the rank reading most must read to go from `old` to `new`.

    Weights stay where TP, PP and CP are the same; of ZeRO shares a rank keeps the overlap of its old and new range. Any
    other change, or no old plan, reads a rank's whole state: its weights (2 bytes a parameter before ZeRO-3) and its
    share of master weights and moments. Gradients are never moved.
    """
    used = new.usage
    whole = used.weights + used.optimizer
    same = ("tp", "pp", "cp", "ep")
    if old is None or any(getattr(old.mesh, axis) != getattr(new.mesh, axis) for axis in same):
        return whole
    kept_weights = used.weights * (_overlap(old.mesh.dp, new.mesh.dp) if new.zero_stage >= 3 else 1.0)
    share = _overlap(old.mesh.dp, new.mesh.dp) if new.zero_stage >= 1 else 1.0
    return (used.weights - kept_weights) + used.optimizer * (1.0 - share)


def _overlap(old: int, new: int) -> float:
    """Least share of its new range that a rank held before, when `old` equal ranges become `new` and ranks keep order."""
    if old == new:
        return 1.0
    worst = 1.0
    for rank in range(min(old, new)):
        low = max(rank / old, rank / new)
        high = min((rank + 1) / old, (rank + 1) / new)
        worst = min(worst, max(0.0, high - low) * new)
    return 0.0 if new > old else worst


def after_loss(request: Request, before: Plan, lost: int, recovery: Recovery) -> Answer:
    """Options after losing `lost` nodes of a job that runs `before` on all of the request's inventory.

    Raises:
        ConfigurationError: a recovery cost that is negative or not finite.
    """
    _check(recovery)
    here = msgspec.structs.replace(request, inventory=request.inventory.without(lost))
    here = msgspec.structs.replace(here, schedule=before.setup.schedule, virtual=before.setup.virtual)
    keep = msgspec.structs.replace(
        here, tp=before.mesh.tp, pp=before.mesh.pp, cp=before.mesh.cp, ep=before.mesh.ep, micro_batch=(before.micro_batch,), dp=None
    )
    free = msgspec.structs.replace(here, dp=None)
    found: list[Option] = []
    shrunk = plan(keep, most=1).best
    if shrunk is not None:
        found.append(_option("shrink", before, shrunk, recovery, f"keep TP {before.mesh.tp} x PP {before.mesh.pp}, drop replicas"))
        if request.equal_replicas is False:
            equal = plan(msgspec.structs.replace(keep, equal_replicas=True), most=1).best
            if equal is not None and equal.mesh != shrunk.mesh:
                found.append(_option("shrink, equal replicas", before, equal, recovery, "the same count on every replica"))
    best = plan(free, most=1).best
    if best is not None and (shrunk is None or best.mesh != shrunk.mesh):
        found.append(_option("re-plan", before, best, recovery, "another TP or PP for what is left"))
    if before.mesh.dp > 1 and before.mesh.pp > 1 and before.zero_stage < 3:
        other = _reroute(before, lost, request.inventory.gpus_per_node, recovery)
        if other is not None:
            found.append(_with_loss(other, before, recovery))
    found.append(_with_loss(_wait(recovery), before, recovery))
    found.sort(key=lambda option: option.lost_seconds)
    return Answer(lost_nodes=lost, options=tuple(found), verdict=_verdict(found, before, request, recovery))


def _option(name: str, before: Plan, made: Plan, recovery: Recovery, reason: str) -> Option:
    size = moved_bytes(before, made)
    seconds = recovery.reform_seconds + size / recovery.restore_bytes_per_second
    option = Option(
        name=name,
        mesh=made.mesh,
        plan=made,
        step_seconds=made.step_seconds,
        moved_bytes=size,
        transition_seconds=seconds,
        lost_seconds=0.0,
        reason=f"{reason}: step {made.step_seconds / before.step_seconds - 1.0:+.1%}, {made.gpus_idle} GPUs idle, {size / 1e9:.3g} GB a rank",
    )
    return _with_loss(option, before, recovery)


def _with_loss(option: Option, before: Plan, recovery: Recovery) -> Option:
    slower = 1.0 - before.step_seconds / option.step_seconds if math.isfinite(option.step_seconds) else 1.0
    running = max(0.0, recovery.repair_seconds - option.transition_seconds)
    # Growing back is a planned change at a checkpoint: it costs the transition once more.
    lost = 2.0 * min(option.transition_seconds, recovery.repair_seconds) + running * max(0.0, slower)
    return msgspec.structs.replace(option, lost_seconds=lost)


def _wait(recovery: Recovery) -> Option:
    return Option(
        name="wait",
        mesh=None,
        plan=None,
        step_seconds=math.inf,
        moved_bytes=0.0,
        transition_seconds=recovery.reform_seconds,
        lost_seconds=0.0,
        reason="stand still until the repair",
    )


def _reroute(before: Plan, lost: int, gpus_per_node: int, recovery: Recovery) -> Option | None:
    """Peers of the same stage in other replicas take the lost stage's micro-batches (`reroute`): evaluated, not in the runtime.

    A node holds consecutive stages of one replica (rank order TP, CP, PP, DP). The optimizer share that lay there is read again.
    """
    mesh = before.mesh
    ranks = range(lost * gpus_per_node // (mesh.tp * mesh.cp) or 1)
    workers = sorted({(rank // mesh.pp, rank % mesh.pp) for rank in ranks if rank < mesh.dp * mesh.pp})
    found = reroute(mesh.dp, mesh.pp, before.micro_batches[0], workers)
    if found is None:
        return None
    moved = before.usage.optimizer
    how = "played through" if found.played else "too large to play, taken as long as without the replica"
    return Option(
        name="re-route",
        mesh=mesh,
        plan=None,
        step_seconds=before.step_seconds * (1.0 + found.slower),
        moved_bytes=moved,
        transition_seconds=recovery.reform_seconds + moved / recovery.restore_bytes_per_second,
        lost_seconds=0.0,
        reason=f"an idea, not in the runtime: peers run the micro-batches of {_many(len(workers), 'lost stage')}, step {found.slower:+.1%} ({how})",
    )


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _verdict(options: list[Option], before: Plan, request: Request, recovery: Recovery) -> str:
    real = [option for option in options if option.name in ("shrink", "re-plan", "wait")]
    by_name = {option.name: option for option in real}
    shrink, replan = by_name.get("shrink"), by_name.get("re-plan")
    chosen = real[0]
    gain = shrink.lost_seconds - replan.lost_seconds if shrink and replan else 0.0
    if shrink is not None and chosen is replan and gain < _MARGIN * recovery.repair_seconds:
        chosen = shrink
    text = f"{chosen.name}: loses {chosen.lost_seconds:.0f} s of full-speed training until the repair"
    if shrink is None:
        return text + "; TP and PP as they are do not fit what is left"
    share = 1.0 - before.step_seconds / shrink.step_seconds
    scale = f"dropping replicas costs {share:.1%} of {request.inventory.gpus} GPUs' speed"
    if replan is None:
        return f"{text}; {scale}, and no other TP or PP would be faster"
    if chosen is replan:
        return f"{text}; {scale}: new TP or PP saves {gain:.0f} s more than it costs"
    if gain > 0:
        return f"{text}; {scale}: new TP or PP would save {gain:.0f} s, less than {_MARGIN:.0%} of the repair time"
    return f"{text}; {scale}: new TP or PP would not pay back {replan.transition_seconds:.0f} s of re-sharding"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What to do when a job on all nodes comes down to a row of the plan table."""

    kind: str
    """none, drop replicas (TP, PP, CP and EP stay) or new mesh."""
    plan: Plan
    """The plan to change to: the row's, or that of dropped replicas where the row's does not pay for its transition."""
    moved_bytes: float
    transition_seconds: float
    lost_seconds: float


def changes(request: Request, rows: tuple[Row, ...], recovery: Recovery) -> tuple[Change | None, ...]:
    """For each row the change from the first row's plan that loses least until the repair; None: nothing fits.

    A new mesh must save 5 % of the repair time against dropping replicas, as in `after_loss`.

    Raises:
        ConfigurationError: a recovery cost that is negative or not finite.
    """
    _check(recovery)
    before = rows[0].plan if rows else None
    order = request.inventory.by_loss()
    made: list[Change | None] = []
    for row in rows:
        if row.plan is None:
            made.append(None)
        elif before is None or row.nodes == rows[0].nodes:
            made.append(Change(kind="none", plan=row.plan, moved_bytes=0.0, transition_seconds=0.0, lost_seconds=0.0))
        else:
            here = msgspec.structs.replace(request, inventory=msgspec.structs.replace(request.inventory, nodes=order[: row.nodes]))
            made.append(_change(here, before, row.plan, recovery))
    return tuple(made)


def _change(here: Request, before: Plan, best: Plan, recovery: Recovery) -> Change:
    options = [_option("re-plan", before, best, recovery, "")]
    mesh = before.mesh
    if any(getattr(best.mesh, axis) != getattr(mesh, axis) for axis in ("tp", "pp", "cp", "ep")):
        replicas = here.inventory.tp_groups(mesh.tp) // (mesh.pp * mesh.cp)
        dp = widest_dp(here, min(replicas, mesh.dp), before.micro_batch, mesh.tp * mesh.cp, mesh.ep)
        same = msgspec.structs.replace(here, schedule=before.setup.schedule, virtual=before.setup.virtual, dp=None)
        kept = judge(same, msgspec.structs.replace(mesh, dp=dp), before.micro_batch) if dp else ""
        if isinstance(kept, Plan):
            options.append(_option("shrink", before, kept, recovery, ""))
            if options[1].lost_seconds - options[0].lost_seconds < _MARGIN * recovery.repair_seconds:
                options.reverse()
        kind = "new mesh" if options[0].name == "re-plan" else "drop replicas"
    else:
        kind = "drop replicas"
    first = options[0]
    assert first.plan is not None
    chosen = msgspec.structs.replace(first.plan, gpus_idle=here.inventory.gpus - first.plan.gpus_used)
    return Change(
        kind=kind, plan=chosen, moved_bytes=first.moved_bytes, transition_seconds=first.transition_seconds, lost_seconds=first.lost_seconds
    )


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """Expected speed by number of spare nodes, as a share of all nodes at work and never failing."""

    spares: int
    speed: tuple[float, ...]
    """Index: spare nodes."""
    nodes_down: float
    """Expected number of nodes under repair."""
    reason: str


def spare_nodes(rows: tuple[Row, ...], failures_per_node_hour: float, repair_hours: float, most: int = 16) -> Spares:
    """How many nodes to hold back. Nodes under repair are Poisson with mean N x rate x repair time; a spare that waits
    earns nothing, a loss beyond the spares runs on the plan that the table has for what is left.

    Raises:
        ConfigurationError: numbers that are negative or not finite, or a table without a plan.
    """
    for name, value in (("rate", failures_per_node_hour), ("repair time", repair_hours)):
        if not math.isfinite(value) or value < 0:
            raise ConfigurationError(f"{name} is {value}", where="--rate-per-gpu-hour", hint="give finite numbers of at least 0")
    speeds = {row.nodes: 1.0 / row.plan.step_seconds if row.plan else 0.0 for row in rows}
    nodes = max(speeds, default=0)
    if not speeds.get(nodes):
        raise ConfigurationError("no plan fits even all nodes", where="spares", hint="see the reasons in `rejected`")
    down = nodes * failures_per_node_hour * repair_hours
    chances = _poisson(down, min(nodes, int(down + 12 * math.sqrt(down) + 12)))
    made: list[float] = []
    for held in range(min(most, nodes - 1) + 1):
        at_work = nodes - held
        expected = sum(chance * speeds.get(at_work - max(0, lost - held), 0.0) for lost, chance in enumerate(chances))
        made.append(expected / speeds[nodes])
    best = max(range(len(made)), key=lambda held: (made[held], -held))
    gain = made[best] - made[0]
    reason = f"{down:.2g} of {nodes} nodes are under repair on average; " + (
        f"{best} spares keep {made[best]:.2%} of the speed, {gain:.2%} more than shrinking"
        if best
        else f"shrinking keeps {made[0]:.2%}, no spare pays"
    )
    return Spares(spares=best, speed=tuple(made), nodes_down=down, reason=reason)


def _poisson(mean: float, most: int) -> list[float]:
    chances = [math.exp(-mean)]
    for count in range(1, most + 1):
        chances.append(chances[-1] * mean / count)
    return chances


def _check(recovery: Recovery) -> None:
    for name in recovery.__struct_fields__:
        value = getattr(recovery, name)
        if not math.isfinite(value) or value < 0 or (name == "restore_bytes_per_second" and value == 0):
            flag = {"reform_seconds": "--reform-seconds", "repair_seconds": "--repair-hours"}.get(name, "--restore-gb-per-second")
            raise ConfigurationError(f"{name} is {value}", where=flag, hint="give a finite number above 0")


def state_bytes(request: Request) -> float:
    """Bytes of a whole checkpoint: weights, master weights and moments once."""
    recipe, model = request.recipe, request.model
    params = shape.counts(model).total
    return params * (recipe.weight + recipe.master + recipe.moments)
