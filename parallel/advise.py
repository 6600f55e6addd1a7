"""The rules of the seed texts as advice on a concrete plan: which wall binds, what to try first, what not to do.

Each line has a source; a rule is told only where its condition holds for this request.
"""

from __future__ import annotations

import msgspec

from regrow.parallel import comm, cost, pipeline, shape
from regrow.parallel.search import Plan, Request


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    topic: str
    text: str
    source: str


_SEED = "seed: distributed training, definitions 9.1-9.6"
_LECTURE = "seed: CS336 lecture 7"
_K_AND_M = (
    "K (accumulation) and M (pipeline micro-batches) are kept apart: B = K x M x micro-batch x DP. M splits a replica's share and adds no"
    " samples; scaling the learning rate by P x M (GPipe's way to count) would be wrong"
)
_QLORA = (
    "QLoRA keeps the frozen base at 0.55-0.6 byte a parameter ({:.3g}-{:.3g} GB here, 0.5 is NF4's ideal), plus adapters, activations and"
    " a layer's dequantised copy"
)


def advise(request: Request, best: Plan, critical_batch: int | None = None) -> list[Advice]:
    """Advice on the best plan, the most pressing first."""
    lines = [
        *_walls(request, best),
        *_memory(request, best),
        *_tokens(request, best),
        *_batch(request, best, critical_batch),
        *_axes(request, best),
        *_numbers(request),
    ]
    return [Advice(topic=topic, text=text, source=source) for topic, text, source in lines]


def _walls(request: Request, best: Plan) -> list[tuple[str, str, str]]:
    if best.times is None:
        return [("walls", "only memory can be judged from a parameter count; give the shape for compute and communication", _SEED)]
    found = cost.wall(best.times, best.usage.total, request.inventory.gpu_memory_bytes, best.setup)
    lines = [
        (
            "walls",
            f"the {found.binds} wall binds: {found.why}. Try first: {found.lift}. On a running job it shows as {found.symptom}",
            _SEED,
        )
    ]
    if found.binds == "communication":
        lines.append(
            (
                "walls",
                "splitting to get past the memory wall is what builds the communication wall: check whether a smaller TP, CP or PP fits",
                _SEED,
            )
        )
    lines.append(
        ("efficiency", f"E = {best.times.efficiency:.2f}; at E = 0.5 half of the GPUs wait. Compare E at the same global batch only", _SEED)
    )
    return lines


def _zero(request: Request, best: Plan, local: float, ddp: float) -> list[tuple[str, str, str]]:
    """`local`: parameters of a GPU before ZeRO; `ddp`: their state in bytes."""
    lines: list[tuple[str, str, str]] = []
    ranks, capacity = best.mesh.dp * best.mesh.cp, request.inventory.gpu_memory_bytes
    if best.zero_stage == 3:
        if ddp + best.usage.activations + best.usage.buffers <= capacity:
            lines.append(
                ("zero", "the model fits without sharding parameters: ZeRO-3 only adds traffic here (3S instead of 2S); use ZeRO-1", _SEED)
            )
        if ranks <= 4:
            lines.append(("zero", f"with {ranks} ranks ZeRO-3 saves little and adds a gather per layer", _SEED))
        if ranks > request.inventory.nvlink_gpus and local * 2 / max(1, request.model.layers) / ranks < 1e6:
            lines.append(("zero", "each layer's shard is below 1 MB across nodes: latency rules, shard inside a node (HSDP)", _SEED))
    elif best.zero_stage == 0 and ranks > 1:
        waste = (ranks - 1) * ddp / 1e9
        lines.append(
            ("zero", f"{ranks} replicas keep {waste:.3g} GB of copies of the same state: ZeRO-1 removes most of it for free", _SEED)
        )
    elif best.zero_stage == 1:
        lines.append(
            (
                "zero",
                "ZeRO-1 moves the same bytes as DDP (reduce-scatter + all-gather = all-reduce): free memory while bandwidth rules",
                _LECTURE,
            )
        )
    elif best.zero_stage == 2:
        many = best.micro_batches[0]
        lines.append(
            (
                "zero",
                (
                    f"ZeRO-2 moves no more than DDP for one micro-batch (2S), but keeps a share of the gradients only: each of the {many}"
                    " micro-batches of a step is reduced by itself. Where memory allows it ZeRO-1 reduces once"
                ),
                _LECTURE,
            )
        )
    return lines


def _memory(request: Request, best: Plan) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    params = request.model.params or shape.counts(request.model).total
    local = params / (best.mesh.tp * best.mesh.pp)
    ddp = local * request.recipe.total
    capacity = request.inventory.gpu_memory_bytes
    lines += _zero(request, best, local, ddp)
    if request.recipe.name == "mixed" and ddp > 0.5 * capacity:
        lines.append(
            (
                "memory",
                f"8-bit moments take 10 instead of 16 bytes a parameter: {local * 16 / 1e9:.3g} -> {local * 10 / 1e9:.3g} GB before sharding",
                _SEED,
            )
        )
    lines.append(
        (
            "memory",
            "mixed precision does not lower model state: 2+2+4+8 = 16 bytes as fp32 Adam; it speeds up and halves activations",
            _SEED,
        )
    )
    if best.usage.activations > 0.4 * best.usage.total:
        lines.append(
            (
                "memory",
                "activations are the larger part: sharding (ZeRO) cannot help; smaller micro-batch, recomputation or sequence parallelism do",
                _SEED,
            )
        )
    if best.setup.recompute == "full":
        lines.append(
            (
                "memory",
                "full recomputation costs a third more compute; it pays where it allows a micro-batch or DP that it hides behind",
                _LECTURE,
            )
        )
    return lines


def _tokens(request: Request, best: Plan) -> list[tuple[str, str, str]]:
    """Tokens a GPU and step against what hides the gathers of FSDP: too few is what lets communication get out of hand."""
    seq = request.model.seq
    if not seq:
        return []
    each = request.global_batch * seq / best.gpus_used
    needed = request.inventory.device.peak_flops * request.constants.efficiency / request.inventory.infiniband.bandwidth
    if each >= needed or best.gpus_used <= request.inventory.nvlink_gpus:
        return [
            ("tokens", f"{each:.0f} tokens a GPU and step: enough to hide parameter traffic across nodes ({needed:.0f} are needed)", _SEED)
        ]
    return [
        (
            "tokens",
            f"{each:.0f} tokens a GPU and step are too few to hide parameter traffic across nodes ({needed:.0f} are needed): ZeRO-3 would wait",
            _SEED,
        )
    ]


def _batch(request: Request, best: Plan, critical: int | None) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    total, mesh = request.global_batch // best.micro_batch, best.mesh
    lines.append(
        (
            "batch",
            f"the batch is a budget of {total} micro-batches: DP {mesh.dp} spends it on replicas, PP {mesh.pp} on hiding its bubble",
            _LECTURE,
        )
    )
    if mesh.pp > 1:
        needed = pipeline.micro_batches_for(0.1, mesh.pp)
        have = best.micro_batches[0]
        if have < needed:
            lines.append(("bubble", f"a bubble of 10 % takes M = {needed} micro-batches (about 9 P), a replica has {have}", _SEED))
        lines.append(
            (
                "batch",
                _K_AND_M,
                _SEED,
            )
        )
    elif best.micro_batches[0] > 1:
        lines.append(
            (
                "batch",
                f"accumulation over {best.micro_batches[0]} micro-batches synchronises once a step: traffic per sample falls by that factor",
                _SEED,
            )
        )
    if critical is not None and request.global_batch > critical:
        lines.append(
            (
                "batch",
                f"global batch {request.global_batch} is above the critical batch {critical}: more samples a step buy few fewer steps",
                _LECTURE,
            )
        )
    return lines


def _axes(request: Request, best: Plan) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    tp = best.mesh.tp
    if tp > 1:
        loss = comm.tp_reference_loss(tp)
        lines.append(
            ("tp", f"measured reference: TP {tp} loses about {loss:.0%} of throughput (10-12 % to 8, 42 % at 16, 65 % at 32)", _LECTURE)
        )
        lines.append(
            (
                "tp",
                (
                    f"TP {tp} sends {2 * (tp - 1) / tp:.3g} of each layer's output, TP {2 * tp} would send {2 * (2 * tp - 1) / (2 * tp):.3g}:"
                    " more TP does not lower a GPU's traffic, it makes the matrices narrower"
                ),
                _SEED,
            )
        )
    if tp > request.inventory.gpus_per_node:
        lines.append(
            (
                "tp",
                (
                    f"TP {tp} leaves the node of {request.inventory.gpus_per_node} GPUs: {_tp_calls(request, best)} latency-bound"
                    " all-reduces a micro-batch on the slow link, where DP has one a step"
                ),
                _SEED,
            )
        )
    if tp > 1 and best.usage.total < 0.5 * request.inventory.gpu_memory_bytes:
        lines.append(("tp", "memory is not short: if a larger batch would do, do not add TP", _SEED))
    if best.mesh.world_size > request.inventory.domain_gpus:
        lines.append(
            (
                "network",
                f"beyond {request.inventory.domain_gpus} GPUs traffic crosses leaf and spine switches, one tier slower; a torus (TPU) has no such step",
                _LECTURE,
            )
        )
    if best.mesh.pp > 1:
        lines.append(
            (
                "pp",
                (
                    "PP is the hardest part to build and debug, zero-bubble schedules most of all: take it where TP and ZeRO-3 do not fit the model,"
                    " on the slowest links, for it sends least"
                ),
                _LECTURE,
            )
        )
    if best.mesh.pp > 1 and best.setup.schedule == "1f1b":
        lines.append(
            ("pp", "1F1B lowers the activations in flight from M to P, not the bubble; interleaving or zero-bubble lower the bubble", _SEED)
        )
    return lines


def _tp_calls(request: Request, best: Plan) -> int:
    """All-reduces of one micro-batch's forward and backward pass on the fullest stage."""
    return 2 * comm.TP_POINTS * max(best.layers_per_stage, default=request.model.layers)


def _numbers(request: Request) -> list[tuple[str, str, str]]:
    params = request.model.params or shape.counts(request.model).total
    return [
        ("precision", "FP8 matrix products lift the compute wall where the loss allows it; they change no optimizer state", _SEED),
        (
            "precision",
            _QLORA.format(params * 0.55 / 1e9, params * 0.6 / 1e9),
            _SEED,
        ),
        (
            "precision",
            "GPTQ and AWQ compress weights for inference: training is bound by moments, master weights (12 N) and activations",
            _SEED,
        ),
        (
            "restart",
            "a checkpoint alone is not a restart: layout, optimizer step, samples consumed, random state and scheduler come back too",
            _SEED,
        ),
    ]


def regimes(request: Request, most_chips: int, most_tokens: float) -> list[tuple[int, float, str]]:
    """The batch x chips diagram: for each point whether pure FSDP computes faster than it communicates, needs model
    parallelism to do so, or is bound by communication whatever the mesh (after Google's TPU scaling book, seed lecture).

    FSDP gathers 2 N bytes for a forward pass of 2 N x (tokens per chip) operations: it is compute-bound when the tokens per
    chip exceed reachable operations / bandwidth; with TP t over the fast links the same holds at 1/t of that.
    """
    device = request.inventory.device
    fsdp = device.peak_flops * request.constants.efficiency / request.inventory.infiniband.bandwidth
    mixed = fsdp / request.inventory.nvlink_gpus
    made: list[tuple[int, float, str]] = []
    chips = 8
    while chips <= most_chips:
        tokens = 2.0**14
        while tokens <= most_tokens:
            each = tokens / chips
            made.append(
                (chips, tokens, "FSDP alone" if each >= fsdp else "FSDP + model parallel" if each >= mixed else "communication-bound")
            )
            tokens *= 2.0
        chips *= 2
    return made
