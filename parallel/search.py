"""What the planner searches: requests, candidate meshes, and the judgement of one of them.

The search is exhaustive over TP x PP x CP x EP x micro-batch x ZeRO x recomputation with two cuts that cannot lose the
best: a number of stages that does not lower the fullest stage, and settings that cost more than one that already fits.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import batch, cost, legal, memory, pipeline
from regrow.parallel.cost import Constants
from regrow.parallel.inventory import Inventory
from regrow.parallel.memory import Recipe, Setup, Usage
from regrow.parallel.mesh import layers_per_stage
from regrow.parallel.shape import Model

NO_MEMORY = "needs at least"
"""How a rejection for memory begins."""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_LONG_SEQUENCE = 32768
"""From here on CP is tried without being asked for."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the planner. None: the planner chooses."""

    model: Model
    inventory: Inventory
    global_batch: int
    micro_batch: tuple[int, ...] = ()
    """Allowed micro-batches; empty: powers of two up to 16."""
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero: int | None = None
    schedule: str = "1f1b"
    """One of pipeline.SCHEDULES, or "auto" (only `planner.plan` knows it)."""
    virtual: int = 1
    recompute: str | None = None
    recipe: Recipe = memory.RECIPES["mixed"]
    offload: str = "none"
    hsdp_shard: int = 0
    equal_replicas: bool = False
    sequence_parallel: bool = True
    replicate_kv: bool = False
    context_bytes: float = memory.CONTEXT_BYTES
    fragmentation: float = memory.FRAGMENTATION
    constants: Constants = Constants()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One legal plan with its price. Bytes a GPU of the fullest stage, seconds a step."""

    mesh: MeshShape
    zero_stage: int
    micro_batch: int
    micro_batches: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    setup: Setup
    usage: Usage
    times: cost.Times | None
    """None: only a parameter count is known."""
    step_seconds: float
    bubble_fraction: float
    gpus_used: int
    gpus_idle: int
    reason: str = ""


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh that is out, and why."""

    mesh: MeshShape
    reason: str


def check(request: Request) -> None:
    """Refuse what no mesh could mend.

    Raises:
        ConfigurationError: with flag, value and nearest values that work.
    """
    for name in ("dp", "tp", "pp", "cp", "ep"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name.upper()} is {value}", where=f"--{name}", hint="an axis has at least size 1")
    if request.zero is not None and not 0 <= request.zero <= 3:
        raise ConfigurationError(f"ZeRO stage {request.zero}", where="--zero", hint="0 (DDP), 1, 2 or 3 (FSDP)")
    if request.global_batch < 1:
        raise ConfigurationError(f"global batch {request.global_batch}", where="--global-batch", hint="give at least 1 sample")
    if request.hsdp_shard < 0:
        raise ConfigurationError(f"HSDP groups of {request.hsdp_shard}", where="--hsdp-shard", hint="ranks of one group; 0: all")
    if request.virtual < 1:
        raise ConfigurationError(f"{request.virtual} virtual stages", where="--virtual", hint="give at least 1")
    fitting = [micro for micro in request.micro_batch if micro >= 1 and request.global_batch % micro == 0]
    if request.micro_batch and not fitting:
        batch.num_micro_batches(request.global_batch, request.micro_batch[0])


def candidates(request: Request) -> Iterator[tuple[MeshShape, int]]:
    """Meshes and micro-batches to judge. DP is as large as nodes and batch allow, where it is not forced."""
    model, inventory = request.model, request.inventory
    usual = _MICRO_BATCHES if model.known else (1,)
    micros = [micro for micro in request.micro_batch or usual if request.global_batch % micro == 0]
    widest = min(inventory.gpus, inventory.nvlink_gpus)
    for tp in [request.tp] if request.tp else range(1, widest + 1) if model.known else legal.axis_sizes(model, widest):
        groups = inventory.tp_groups(tp)
        for cp in [request.cp] if request.cp else _context_sizes(model, groups):
            problem = legal.shape_problem(
                model, MeshShape(tp=tp, cp=cp), sequence_parallel=request.sequence_parallel, replicate_kv=request.replicate_kv
            )
            stages = [request.pp] if request.pp else legal.stage_sizes(model.layers, groups // cp) if not problem else [1]
            for pp in stages or [1]:
                for ep in [request.ep] if request.ep else _expert_sizes(model) if not problem else [1]:
                    for micro in micros if not problem else micros[:1]:
                        dp = request.dp or widest_dp(request, groups // (pp * cp), micro, tp * cp, ep)
                        yield MeshShape(dp=max(1, dp), tp=tp, pp=pp, cp=cp, ep=ep), micro


def _context_sizes(model: Model, groups: int) -> list[int]:
    if model.seq < _LONG_SEQUENCE:
        return [1]
    return [size for size in (1, 2, 4, 8, 16, 32) if size <= max(1, groups) and model.seq % (2 * size) == 0]


def _expert_sizes(model: Model) -> list[int]:
    if not model.experts:
        return [1]
    return [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if model.experts % size == 0]


def widest_dp(request: Request, replicas: int, micro: int, inner: int, ep: int) -> int:
    """The most replicas that nodes, batch and expert axis allow; 0: none. `inner` is TP x CP."""
    most = min(replicas, request.global_batch // micro)
    if request.equal_replicas and most:
        most = batch.largest_equal_dp(request.global_batch, micro, most)
    group = request.hsdp_shard
    while most > 1 and ((most * inner) % ep or (0 < group < most and most % group)):
        most -= 1
        if request.equal_replicas:
            most = batch.largest_equal_dp(request.global_batch, micro, most)
    return most


def judge(request: Request, mesh: MeshShape, micro: int) -> Plan | str:
    """The cheapest plan on one mesh with one micro-batch, or why there is none."""
    problem = _problem(request, mesh)
    if problem:
        return problem
    try:
        counts = batch.split(request.global_batch, micro, mesh.dp)
    except ConfigurationError as error:
        return error.what
    if request.equal_replicas and counts[0] != counts[-1]:
        return f"global batch {request.global_batch} in micro-batches of {micro} is not a multiple of DP {mesh.dp} (--equal-replicas)"
    layers = layers_per_stage(request.model.layers, mesh.pp) if request.model.layers else ()
    problem = pipeline.problem(request.schedule, mesh.pp, request.virtual, request.model.layers, counts)
    if problem:
        return problem
    return _cheapest_setting(request, mesh, micro, counts, layers)


def _problem(request: Request, mesh: MeshShape) -> str:
    ranks, group = mesh.dp * mesh.cp, request.hsdp_shard
    return (
        legal.shape_problem(request.model, mesh, sequence_parallel=request.sequence_parallel, replicate_kv=request.replicate_kv)
        or legal.world_problem(request.inventory, mesh, tp_asked=request.tp is not None)
        or (f"HSDP groups of {group} do not divide DP {mesh.dp} x CP {mesh.cp} = {ranks}" if 0 < group < ranks and ranks % group else "")
    )


def _cheapest_setting(request: Request, mesh: MeshShape, micro: int, counts: tuple[int, ...], layers: tuple[int, ...]) -> Plan | str:
    levels = recompute_levels(request)
    ranks = mesh.dp * mesh.cp
    stages = (request.zero,) if request.zero is not None else (1, 2, 3) if ranks > 1 else (0,)
    base = setup_of(request, mesh, micro, counts[0])
    capacity = request.inventory.gpu_memory_bytes

    def fits(recompute: str, zero: int) -> Setup | None:
        setup = msgspec.structs.replace(base, zero=zero, recompute=recompute)
        return setup if memory.peak_bytes(request.model, layers, setup) <= capacity else None

    setup = fits(levels[0], stages[0])
    if setup is not None:
        return _price(request, mesh, counts, layers, setup)  # Every other setting costs more.
    if fits(levels[-1], stages[-1]) is None:
        least = msgspec.structs.replace(base, zero=stages[-1], recompute=levels[-1])
        return _does_not_fit(request, memory.usage(request.model, layers, least))
    best: Plan | None = None
    for recompute in levels:
        setup = next(filter(None, (fits(recompute, zero) for zero in stages)), None)
        if setup is not None:
            made = _price(request, mesh, counts, layers, setup)
            if best is None or made.step_seconds < best.step_seconds:
                best = made
            if setup.zero == stages[0]:
                break  # More recomputation could only lower the ZeRO stage, which is at its lowest.
    assert best is not None
    return best


def recompute_levels(request: Request) -> tuple[str, ...]:
    """Levels to try, cheapest first. Flash attention costs nothing, so "none" is taken only when asked for."""
    return (request.recompute,) if request.recompute else ("flash", "selective", "full")


def setup_of(request: Request, mesh: MeshShape, micro: int, count: int) -> Setup:
    """The memory setup of a mesh with the request's settings; ZeRO stage and recomputation at their defaults."""
    return Setup(
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        ep=mesh.ep,
        hsdp_shard=request.hsdp_shard,
        micro_batch=micro,
        micro_batches=count,
        schedule=request.schedule,
        virtual=request.virtual,
        sequence_parallel=request.sequence_parallel,
        recipe=request.recipe,
        offload=request.offload,
        context_bytes=request.context_bytes,
        fragmentation=request.fragmentation,
    )


def _does_not_fit(request: Request, least: Usage) -> str:
    capacity = request.inventory.gpu_memory_bytes
    state = least.weights + least.gradients + least.optimizer
    parts = f"state {state / 1e9:.1f}, activations {least.activations / 1e9:.1f}, buffers {least.buffers / 1e9:.1f}"
    return f"{NO_MEMORY} {least.total / 1e9:.1f} GB a GPU ({parts}), {capacity / 1e9:g} GB are there"


def _price(request: Request, mesh: MeshShape, counts: tuple[int, ...], layers: tuple[int, ...], setup: Setup) -> Plan:
    model, inventory = request.model, request.inventory
    times = None
    if model.known:
        times = cost.step_times(model, layers, setup, inventory, request.global_batch, request.constants)
        seconds = times.step
    else:
        seconds = cost.params_only_seconds(model.params, setup, inventory, request.global_batch, model.seq, request.constants)
    return Plan(
        mesh=mesh,
        zero_stage=setup.zero,
        micro_batch=setup.micro_batch,
        micro_batches=counts,
        layers_per_stage=layers,
        setup=setup,
        usage=memory.usage(model, layers, setup),
        times=times,
        step_seconds=seconds,
        bubble_fraction=pipeline.bubble_fraction(request.schedule, mesh.pp, counts[0], request.virtual),
        gpus_used=mesh.world_size,
        gpus_idle=inventory.gpus - mesh.world_size,
    )
