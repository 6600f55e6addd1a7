"""The planner's public face: the best plans, the table for every number of survivors, the mesh of a running job."""

from __future__ import annotations

import msgspec

from regrow.ids import MeshShape
from regrow.parallel import cost, legal, memory, pipeline
from regrow.parallel.elastic import MeshChoice, choose_mesh
from regrow.parallel.inventory import Inventory
from regrow.parallel.mesh import layers_per_stage
from regrow.parallel.search import NO_MEMORY, Plan, Rejection, Request, candidates, check, judge, recompute_levels, setup_of, widest_dp

__all__ = ["MeshChoice", "Plan", "Rejection", "Request", "Result", "Row", "choose_mesh", "plan", "plan_table"]


AUTO_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 1))
"""What "auto" tries. DualPipe is taken only when asked for: it holds two copies of the weights."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Plans in ascending order of step time."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]

    @property
    def best(self) -> Plan | None:
        """The cheapest, if there is one."""
        return self.plans[0] if self.plans else None


def plan(request: Request, *, most: int = 10) -> Result:
    """The best `most` plans and the reasons against the rest.

    Raises:
        ConfigurationError: nonsense in the request, before anything is searched.
    """
    check(request)
    found: list[Plan] = []
    rejected: dict[MeshShape, Rejection] = {}
    for one in _schedules(request):
        for mesh, micro in candidates(one):
            made = judge(one, mesh, micro)
            if isinstance(made, Plan):
                found.append(made)
            else:
                rejected.setdefault(_without_dp(mesh), Rejection(mesh=mesh, reason=made))
    found.sort(key=lambda each: (each.step_seconds, each.gpus_used, each.usage.total))
    kept = _distinct(found, most)
    if kept:
        kept[0] = msgspec.structs.replace(kept[0], reason=_why_best(kept, len(found)))
    legal_shapes = {_without_dp(each.mesh) for each in found}
    return Result(plans=tuple(kept), rejected=tuple(each for shape, each in rejected.items() if shape not in legal_shapes))


def _schedules(request: Request) -> list[Request]:
    """The request once per schedule when the planner may choose it ("auto"), simplest first."""
    if request.schedule != "auto":
        return [request]
    return [msgspec.structs.replace(request, schedule=name, virtual=virtual) for name, virtual in AUTO_SCHEDULES]


def _without_dp(mesh: MeshShape) -> MeshShape:
    return msgspec.structs.replace(mesh, dp=0)


def _distinct(found: list[Plan], most: int) -> list[Plan]:
    kept: dict[MeshShape, Plan] = {}
    for each in found:
        kept.setdefault(each.mesh, each)
        if len(kept) == most:
            break
    return list(kept.values())


def _why_best(kept: list[Plan], judged: int) -> str:
    best = kept[0]
    text = f"shortest step of {judged} plans that fit" if judged > 1 else "the mesh that was asked for fits"
    if len(kept) > 1:
        second = kept[1]
        text += f"; the next, {second.mesh}, takes {second.step_seconds / best.step_seconds - 1.0:+.1%}"
    if best.micro_batches[0] != best.micro_batches[-1]:
        many = sum(1 for count in best.micro_batches if count == best.micro_batches[0])
        text += f"; {many} replicas run {best.micro_batches[0]} micro-batches, the others {best.micro_batches[-1]}: the global batch stays exact"
        spare = best.mesh.dp - -(-sum(best.micro_batches) // best.micro_batches[0])
        if spare > 0:
            text += f"; {spare} replicas fewer would take as long"
    if best.gpus_idle:
        text += f"; {best.gpus_idle} GPUs idle"
    return text


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan for one number of surviving nodes. None: nothing fits."""

    nodes: int
    gpus: int
    plan: Plan | None


class _Template:
    """A mesh without its DP, with a bound on its step time that holds for every DP."""

    def __init__(self, request: Request, mesh: MeshShape, micro: int) -> None:
        self.mesh = mesh
        self.micro = micro
        self.replica = mesh.pp * mesh.cp
        self.total = request.global_batch // micro
        self.fits = True
        """Turns False at the first DP that does not fit: fewer replicas need more memory each, never less."""
        self._seen: dict[int, Plan | str] = {}
        self._layers = layers_per_stage(request.model.layers, mesh.pp) if request.model.layers else ()
        self._extra = pipeline.bubble_ratio(request.schedule, mesh.pp, 1, request.virtual)
        self._levels = list(recompute_levels(request))
        self._slot = self._busy(request)

    def _busy(self, request: Request) -> float:
        if not request.model.known:
            return 0.0
        setup = msgspec.structs.replace(setup_of(request, self.mesh, self.micro, 1), recompute=self._levels[0])
        return cost.slice_seconds(request.model, self._layers, setup, request.inventory, request.constants).total

    def bound(self, dp: int) -> float:
        """No step with `dp` replicas is shorter: busy time of the fullest replica and its bubble."""
        return self._slot * (-(-self.total // dp) + self._extra)

    def price(self, request: Request, dp: int) -> Plan | str:
        """The plan on `dp` replicas, priced once."""
        made = self._seen.get(dp)
        if made is None:
            made = self._seen[dp] = judge(request, msgspec.structs.replace(self.mesh, dp=dp), self.micro)
            if isinstance(made, Plan) and made.setup.recompute != self._levels[0]:
                self._raise_bound(request, made)
        return made

    def _raise_bound(self, request: Request, made: Plan) -> None:
        """A level of recomputation that fits at no ZeRO stage now fits at no smaller DP either."""
        while len(self._levels) > 1:
            least = msgspec.structs.replace(made.setup, recompute=self._levels[0], zero=3 if request.zero is None else request.zero)
            if memory.peak_bytes(request.model, self._layers, least) <= request.inventory.gpu_memory_bytes:
                break
            self._levels.pop(0)
        self._slot = self._busy(request)


def plan_table(request: Request, *, least_nodes: int = 1) -> tuple[Row, ...]:
    """The best plan for every number of surviving nodes from all down to `least_nodes`, computed ahead.

    Which nodes are lost is taken as the worst case (`Inventory.without`). Exact: templates are priced in the order of
    their bound until the bound exceeds the best price. A forced DP is an upper limit here.
    """
    check(request)
    free = msgspec.structs.replace(request, dp=None, schedule="1f1b" if request.schedule == "auto" else request.schedule)
    templates = _templates(free)
    rows: list[Row] = []
    order = request.inventory.by_loss()
    for nodes in range(len(order), max(0, least_nodes - 1), -1):
        there = msgspec.structs.replace(request.inventory, nodes=order[:nodes])
        rows.append(Row(nodes=nodes, gpus=there.gpus, plan=_best_of(free, templates, there, request.dp)))
    return tuple(rows)


def _templates(request: Request) -> list[_Template]:
    made: dict[tuple[MeshShape, int], _Template] = {}
    for mesh, micro in candidates(request):
        one = msgspec.structs.replace(mesh, dp=mesh.ep)  # the smallest DP in which EP folds for sure
        if not legal.shape_problem(request.model, one, sequence_parallel=request.sequence_parallel, replicate_kv=request.replicate_kv):
            one = msgspec.structs.replace(mesh, dp=1)
            made.setdefault((one, micro), _Template(request, one, micro))
    return list(made.values())


def _best_of(request: Request, templates: list[_Template], there: Inventory, most_dp: int | None) -> Plan | None:
    here = msgspec.structs.replace(request, inventory=there)
    groups: dict[int, int] = {}
    order: list[tuple[float, int, int]] = []
    for index, template in enumerate(templates):
        if not template.fits:
            continue
        mesh = template.mesh
        if mesh.tp not in groups:
            groups[mesh.tp] = there.tp_groups(mesh.tp)
        dp = min(groups[mesh.tp] // template.replica, template.total)
        if request.equal_replicas or mesh.ep > 1 or request.hsdp_shard:
            dp = widest_dp(request, dp, template.micro, mesh.tp * mesh.cp, mesh.ep)
        if most_dp is not None:
            dp = min(dp, most_dp)
        if dp >= 1:
            order.append((template.bound(dp), index, dp))
    order.sort()
    best: Plan | None = None
    for bound, index, dp in order:
        if best is not None and bound > best.step_seconds:
            break
        template = templates[index]
        made = template.price(here, dp)
        if isinstance(made, str):
            template.fits = template.fits and not made.startswith(NO_MEMORY)
        elif best is None or (made.step_seconds, made.gpus_used) < (best.step_seconds, best.gpus_used):
            best = made
    return best and msgspec.structs.replace(best, gpus_idle=there.gpus - best.gpus_used)
