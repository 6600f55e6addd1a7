"""Time of a step: compute, bubble, exposed communication; MFU, scaling efficiency, and which wall binds.

An analytic model for *ranking* plans. Its constants are set so that published runs (Megatron-LM 2021 on A100, Llama 3 on
H100) come out within about 20 %; `calibrate` replaces them by a measured run. Times on a CPU prove the ranking only.
"""

from __future__ import annotations

import msgspec

from regrow.parallel import comm, memory, pipeline, shape
from regrow.parallel.inventory import Inventory, Link
from regrow.parallel.memory import Setup
from regrow.parallel.shape import Model


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """What a run on real hardware calibrates. Ours unless a run is given."""

    efficiency: float = 0.65
    """Share of peak that large matrix products of a whole layer reach, norms and activations included."""
    half_width: float = 900.0
    """Width of a GPU's matrices (hidden / TP^0.5) at which half of that efficiency is lost."""
    half_tokens: float = 100.0
    """Tokens of a micro-batch at which half of that efficiency is lost."""
    half_expert: float = 256.0
    """Width of an expert's matrices on a GPU (expert FFN, divided by TP where EP does not place whole experts)."""
    overlap: float = 0.8
    """Share of the compute next to it behind which data-parallel traffic hides."""
    tp_overlap: float = 0.15
    """Share of tensor-parallel traffic that hides behind matrix products."""
    ep_overlap: float = 0.5
    """Share of expert all-to-all traffic that hides behind computation; DualPipe is built to hide 0.9."""
    pp_overlap: float = 0.9
    """Share of stage boundaries that the steady 1F1B state hides."""
    step_overhead: float = 0.0
    """Seconds a step that nothing above explains (launch, data, logging)."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch on the slowest stage, forward and backward, in seconds. Does not depend on DP."""

    compute: float
    tp: float
    ep: float
    cp: float
    pp: float
    """One crossing of a stage boundary in each direction."""
    layer_compute: float
    layers: int
    recomputed: float
    """Part of `compute` that repeats the forward pass."""

    @property
    def total(self) -> float:
        """Busy seconds of the slowest stage."""
        return self.compute + self.tp + self.ep + self.cp


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's seconds go. The parts add up to `step`."""

    step: float
    compute: float
    bubble: float
    tp: float
    ep: float
    cp: float
    pp: float
    dp: float
    """Exposed part only."""
    optimizer: float
    overhead: float
    dp_hidden: float
    mfu: float
    """Useful operations / (time x GPUs x peak). Recomputation is not useful."""
    efficiency: float
    """E = t_1 / (k t_k) at the same global batch: useful compute time without any parallel cost over step time."""


def kernel_efficiency(constants: Constants, model: Model, tp: int, tokens: float, *, ep: int = 1) -> float:
    """Share of peak of one layer's matrix products on one GPU: narrow slices, narrow experts and few tokens cost efficiency."""
    width = model.hidden / tp**0.5
    share = constants.efficiency * width / (width + constants.half_width) * tokens / (tokens + constants.half_tokens)
    if model.experts:
        expert = model.expert_ffn / (tp if ep == 1 else 1)
        share *= expert / (expert + constants.half_expert)
    return share


def recompute_factor(model: Model, recompute: str) -> float:
    """Forward passes repeated in the backward pass: full 1; selective the first MLP matrices; else 0."""
    if recompute == "full":
        return 1.0
    if recompute == "selective":
        parts = shape.counts(model)
        return parts.mlp / parts.layer_active * (2.0 / 3.0 if model.gated else 0.5)
    return 0.0


def slice_seconds(model: Model, layers: tuple[int, ...], setup: Setup, inventory: Inventory, constants: Constants) -> Slice:
    """Cost of one micro-batch on the stage that takes longest."""
    tokens = float(setup.micro_batch) * model.seq / setup.cp
    rate = inventory.device.peak_flops * kernel_efficiency(constants, model, setup.tp, tokens, ep=setup.ep)
    forward = shape.layer_forward_flops(model, tokens) / setup.tp / rate
    repeats = recompute_factor(model, setup.recompute)
    layer = forward * (3.0 + repeats)
    head = 3.0 * shape.head_forward_flops(model, tokens) / setup.tp / rate
    last = layers[-1] * layer + head
    widest = max(layers)
    compute, count = (last, layers[-1]) if last >= widest * layer else (widest * layer, widest)
    passes = 3 if setup.recompute == "full" else 2
    tp_link = comm.link_for(inventory, setup.tp)
    tp_bytes = comm.tp_volume(model, setup.micro_batch, setup.tp, passes=passes, cp=setup.cp)
    tp = comm.ring_seconds(tp_bytes, setup.tp, tp_link, rounds=2 * comm.TP_POINTS * passes) * (1.0 - constants.tp_overlap)
    ep = cp = pp = 0.0
    if setup.ep > 1:
        share = (model.layers - model.dense_layers) / model.layers
        volume = comm.ep_volume(model, setup.micro_batch, setup.ep, tp=setup.tp, cp=setup.cp) * share
        hidden = 0.9 if setup.schedule == "dualpipe" else constants.ep_overlap
        ep = comm.ring_seconds(volume, 2, comm.link_for(inventory, setup.ep), rounds=4) * (1.0 - hidden)
    if setup.cp > 1:
        volume = comm.cp_volume(model, setup.micro_batch, setup.cp, setup.tp)
        cp = comm.ring_seconds(volume, setup.cp, comm.link_for(inventory, setup.tp * setup.cp), rounds=3)
        cp = max(0.2 * cp, cp - 0.5 * layer)
    if setup.pp > 1:
        link = comm.link_for(inventory, setup.tp * setup.cp * setup.pp)
        pp = 2.0 * (comm.pp_message(model, setup.micro_batch, setup.tp, setup.cp) / link.bandwidth + link.latency)
    return Slice(
        compute=compute,
        tp=count * tp,
        ep=count * ep,
        cp=count * cp,
        pp=pp,
        layer_compute=layer,
        layers=count,
        recomputed=count * forward * repeats,
    )


def dp_seconds(model: Model, layers: int, setup: Setup, inventory: Inventory) -> tuple[float, float]:
    """(gradient, parameter) seconds of one step's data-parallel collectives of one stage; under ZeRO-3 the parameters of
    one micro-batch.

    Members of a group inside one NVLink domain reduce there first, so that each adapter carries its share only. ZeRO-3
    pays the ring's latency for each layer (NCCL gathers in rings; its newer PAT algorithm pays less), which is what
    limits it on thousands of ranks and what HSDP avoids.
    """
    ranks = setup.dp * setup.cp
    if ranks == 1:
        return 0.0, 0.0
    dense, experts = memory.stage_params(model, layers, 0, setup)
    params = dense + experts
    group = memory.shard_groups(setup)[0] if setup.zero >= 3 else ranks
    volume = comm.zero_volume(params * setup.recipe.gradient, params * setup.recipe.weight, group, setup.zero)
    link, hops = _group_link(group, setup, inventory)
    if setup.zero < 3:
        return comm.tree_seconds(volume.gradients, ranks, link), comm.tree_seconds(volume.parameters, ranks, link)
    gradients = volume.gradients / link.bandwidth + layers * hops * link.latency
    parameters = volume.parameters / link.bandwidth + 2 * layers * hops * link.latency
    if group < ranks:
        outer, _ = _group_link(ranks, setup, inventory)
        gradients += comm.tree_seconds(comm.all_reduce(params * setup.recipe.gradient / group, ranks // group), ranks // group, outer)
    return gradients, parameters


def _group_link(ranks: int, setup: Setup, inventory: Inventory) -> tuple[Link, int]:
    """(effective link of a data-parallel group, hops of its ring between NVLink domains)."""
    replica = setup.tp * setup.pp
    span = replica * ranks
    if inventory.torus or span <= inventory.nvlink_gpus:
        return inventory.device.nvlink, ranks - 1
    local = max(1, min(ranks, inventory.nvlink_gpus // replica))
    far = comm.link_for(inventory, span)
    near = 1.0 / inventory.device.nvlink.bandwidth if local > 1 else 0.0
    return Link(bandwidth=1.0 / (1.0 / (far.bandwidth * local) + near), latency=far.latency), max(1, ranks // local - 1)


def step_times(
    model: Model,
    layers: tuple[int, ...],
    setup: Setup,
    inventory: Inventory,
    global_batch: int,
    constants: Constants,
    part: Slice | None = None,
) -> Times:
    """Seconds of one optimizer step. `setup.micro_batches` is the count of the fullest replica, which sets the pace."""
    part = part or slice_seconds(model, layers, setup, inventory, constants)
    count = setup.micro_batches
    busy = part.total
    ratio = pipeline.bubble_ratio(setup.schedule, setup.pp, count, setup.virtual)
    bubble = ratio * count * busy
    pp = part.pp * (setup.pp - 1 + (1.0 - constants.pp_overlap) * count) if setup.pp > 1 else 0.0
    gradients, parameters = dp_seconds(model, part.layers, setup, inventory)
    hidden_behind = constants.overlap * part.compute
    if setup.zero >= 3:
        # Parameters are gathered for every micro-batch, forward and backward, one layer ahead of their use; gradients leave
        # with the last one, behind the same compute.
        dp = (count - 1) * max(0.0, parameters - hidden_behind) + max(0.0, parameters + gradients - hidden_behind)
        moved = count * parameters + gradients
    else:
        # ZeRO-2 keeps only its share of the gradients, so each micro-batch is reduced, not only the last one.
        times = count if setup.zero == 2 else 1
        dp = times * max(0.0, gradients - 0.66 * hidden_behind) + max(0.0, parameters - 0.33 * hidden_behind)
        moved = times * gradients + parameters
    optimizer = _optimizer_seconds(model, part.layers, setup, inventory)
    step = count * busy + bubble + pp + dp + optimizer + constants.step_overhead
    gpus = setup.dp * setup.tp * setup.pp * setup.cp
    flops = shape.step_flops(model, global_batch)
    useful = flops / (inventory.device.peak_flops * kernel_efficiency(constants, model, 1, setup.micro_batch * model.seq)) / gpus
    return Times(
        step=step,
        compute=count * part.compute,
        bubble=bubble,
        tp=count * part.tp,
        ep=count * part.ep,
        cp=count * part.cp,
        pp=pp,
        dp=dp,
        optimizer=optimizer,
        overhead=constants.step_overhead,
        dp_hidden=moved - dp,
        mfu=flops / (step * gpus * inventory.device.peak_flops),
        efficiency=min(1.0, useful / step),
    )


def _optimizer_seconds(model: Model, layers: int, setup: Setup, inventory: Inventory) -> float:
    """Adam reads and writes its state once: about 2 x state bytes over memory bandwidth."""
    dense, experts = memory.stage_params(model, layers, 0, setup)
    group, expert_group = memory.shard_groups(setup)
    own = dense / group + experts / expert_group if setup.zero >= 1 else dense + experts
    return 2.0 * own * setup.recipe.total / inventory.device.memory_bandwidth


def params_only_seconds(params: float, setup: Setup, inventory: Inventory, global_batch: int, seq: int, constants: Constants) -> float:
    """A rough step time when only a parameter count is known: 6 N tokens at the constants' efficiency, plus the bubble.

    Without a sequence length samples count as 2,048 tokens.
    """
    gpus = setup.dp * setup.tp * setup.pp * setup.cp
    even = 6.0 * params * global_batch * (seq or 2048) / gpus / (inventory.device.peak_flops * constants.efficiency)
    slack = setup.micro_batches * setup.dp * setup.micro_batch / global_batch
    ratio = pipeline.bubble_ratio(setup.schedule, setup.pp, setup.micro_batches, setup.virtual)
    ranks = setup.dp * setup.cp
    local = params / (setup.tp * setup.pp)
    volume = comm.zero_volume(local * setup.recipe.gradient, local * setup.recipe.weight, ranks, setup.zero)
    link = comm.link_for(inventory, gpus)
    tp_penalty = 1.0 / (1.0 - comm.tp_reference_loss(setup.tp))
    return even * slack * tp_penalty * (1.0 + ratio) + max(0.0, comm.tree_seconds(volume.total, ranks, link) - constants.overlap * even)


class Wall(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the three walls binds a plan."""

    binds: str
    """memory, compute or communication."""
    memory_ratio: float
    """Bytes needed over bytes there."""
    communication_ratio: float
    """Exposed communication and bubble over the step."""
    why: str
    lift: str
    """What would move it."""
    symptom: str
    """How it shows on a running job, to check the model against (seed text, definition 9.1.2)."""


def wall(times: Times, used_bytes: float, capacity_bytes: float, setup: Setup) -> Wall:
    """The wall that binds (seed text, definition 9.1.2): memory when the plan had to recompute or lies within a tenth of
    the capacity, communication when exposed traffic and bubble take a third of the step, else compute."""
    ratio = used_bytes / capacity_bytes
    exposed = (times.bubble + times.tp + times.ep + times.cp + times.pp + times.dp) / times.step
    if exposed > 1.0 / 3.0:
        parts = {"bubble": times.bubble, "tp": times.tp, "ep": times.ep, "cp": times.cp, "pp": times.pp, "dp": times.dp}
        most = max(parts, key=lambda name: parts[name])
        return Wall(
            binds="communication",
            symptom=_SYMPTOMS["communication"],
            memory_ratio=ratio,
            communication_ratio=exposed,
            why=f"{exposed:.0%} of the step is waiting; most of it for {most} ({parts[most] / times.step:.0%})",
            lift=_LIFTS[most],
        )
    if ratio > 0.9 or setup.recompute in ("selective", "full"):
        return Wall(
            binds="memory",
            symptom=_SYMPTOMS["memory"],
            memory_ratio=ratio,
            communication_ratio=exposed,
            why=f"{ratio:.0%} of the memory is used" + (f" and {setup.recompute} recomputation was needed" if ratio <= 0.9 else ""),
            lift="a higher ZeRO stage, 8-bit moments, more TP or PP; for activations a smaller micro-batch or more recomputation",
        )
    return Wall(
        binds="compute",
        symptom=_SYMPTOMS["compute"],
        memory_ratio=ratio,
        communication_ratio=exposed,
        why=f"{times.compute / times.step:.0%} of the step computes",
        lift="more GPUs within the batch, FP8 where the loss allows it, larger matrices per GPU",
    )


_SYMPTOMS = {
    "memory": "out of memory, or a micro-batch made small to avoid it",
    "compute": "GPUs busy all the time, and a step much longer than operations over peak",
    "communication": "utilisation that swings, efficiency that falls as GPUs are added",
}
_LIFTS = {
    "bubble": "more micro-batches a replica (about 9 x PP for 10 %), interleaving or a zero-bubble schedule, fewer stages",
    "tp": "a smaller TP inside the NVLink domain, a larger micro-batch",
    "ep": "experts inside the NVLink domain, limited routing across nodes",
    "cp": "less context parallelism, a longer sequence per rank",
    "pp": "stages inside a node, larger micro-batches",
    "dp": "more tokens a GPU between two synchronisations (accumulation), ZeRO-1 or 2 instead of 3, HSDP",
}
