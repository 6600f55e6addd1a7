"""Bytes on one GPU: model state, activations, buffers, and the largest model that fits. GB = 1e9 bytes.

Model state is sharded by ZeRO and split by TP, PP and EP; activations are split by TP with sequence parallelism, by CP
and by layers, never by ZeRO. State is permanent and grows with the parameters, activations come and go and grow with
micro-batch x sequence: the cures are not interchangeable.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import msgspec

from regrow.errors import ConfigurationError
from regrow.parallel import pipeline, shape
from regrow.parallel.shape import Model

RECOMPUTE = ("none", "flash", "selective", "full")
"""Least to most recomputation. none keeps the attention matrix; flash rebuilds it in the kernel; selective also the
MLP's inner activations; full keeps a layer's input only. Classic block, bytes per s b h: 34 + 5 a s / h, 34, 18, 2."""
BUCKET_BYTES = 2 * 25 * 1024 * 1024
"""Two gradient buckets of DDP's default size in flight."""
CONTEXT_BYTES = 1.0e9
"""CUDA context, kernels and NCCL channels. Ours, of the usual size; --reserve-gb replaces it."""
FRAGMENTATION = 0.03
"""Share of state and activations that the allocator cannot use. Ours."""

LOGITS_BYTES = 12.0
"""Per token and vocabulary entry at the peak of the loss's backward pass, as eager torch holds it in fp32: log-probabilities,
their gradient, and that of the logits (tests/parallel/test_torch_memory.py). A fused or chunked loss needs less."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per parameter of each part of the model state."""

    name: str
    weight: float
    gradient: float
    master: float
    moments: float
    source: str = ""

    @property
    def total(self) -> float:
        """Bytes per parameter on one GPU without sharding."""
        return self.weight + self.gradient + self.master + self.moments


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="mixed", weight=2, gradient=2, master=4, moments=8, source="seed texts: bf16 with fp32 master, Adam: 2+2+4+4+4 = 16"),
        Recipe(name="mixed-fp32-grad", weight=2, gradient=4, master=4, moments=8, source="gradients accumulated in fp32: 18"),
        Recipe(name="fp32", weight=4, gradient=4, master=0, moments=8, source="seed text: fp32 Adam: 4+4+8 = 16"),
        Recipe(name="8bit", weight=2, gradient=2, master=4, moments=2, source="seed text: 8-bit moments: 2+2+2+4 = 10"),
        Recipe(name="bf16", weight=2, gradient=2, master=0, moments=4, source="all in bf16, no master copy: 8"),
        Recipe(name="sgd", weight=4, gradient=4, master=0, moments=4, source="fp32 SGD with momentum: 12"),
    )
}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Model state on one GPU in bytes; `host` lies in host memory instead (offload)."""

    weights: float
    gradients: float
    optimizer: float
    """Moments and fp32 master weights."""
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return self.weights + self.gradients + self.optimizer


def model_state(params: float, shards: int, zero: int, recipe: Recipe = RECIPES["mixed"], *, offload: str = "none") -> State:
    """State of `params` parameters over `shards` data-parallel ranks.

    DDP 16 N; ZeRO-1 4 N + 12 N/k; ZeRO-2 2 N + 14 N/k; ZeRO-3 16 N/k (https://arxiv.org/abs/1910.02054, section 3.1). A
    share that does not divide is rounded up to whole parameters. HSDP: pass the size of the sharding group as `shards`.
    Offload "optimizer" moves moments and master weights to the host, "all" also weights and gradients at rest.
    """
    share = math.ceil(params / shards) if shards > 1 else params
    weights = recipe.weight * (share if zero >= 3 else params)
    gradients = recipe.gradient * (share if zero >= 2 else params)
    optimizer = (recipe.master + recipe.moments) * (share if zero >= 1 else params)
    if offload == "optimizer":
        return State(weights=weights, gradients=gradients, optimizer=0.0, host=optimizer)
    if offload == "all":
        return State(weights=0.0, gradients=0.0, optimizer=0.0, host=weights + gradients + optimizer)
    return State(weights=weights, gradients=gradients, optimizer=optimizer)


def largest_model(memory_bytes: float, shards: int, zero: int, recipe: Recipe = RECIPES["mixed"]) -> float:
    """Parameters whose state alone fills `memory_bytes` on each of `shards` GPUs: the inverse of `model_state`."""
    return memory_bytes / bytes_per_parameter(shards, zero, recipe)


def bytes_per_parameter(shards: int, zero: int, recipe: Recipe = RECIPES["mixed"]) -> float:
    """State bytes per parameter and GPU."""
    parts = (recipe.weight, recipe.gradient, recipe.master + recipe.moments)
    return sum(part / (shards if zero >= 3 - index else 1) for index, part in enumerate(parts))


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per (sequence x micro-batch x hidden) of one layer, before any splitting."""

    outside: float
    """What TP leaves whole: norms, dropout, inputs of the projections (classic block: 10)."""
    inside: float
    """What TP splits, without the attention matrix (classic block: 24)."""
    mlp: float
    """The part of `inside` that selective recomputation drops (classic block: 16)."""
    quadratic: float
    """The attention matrix: 5 a s / h with dropout, 2 a s / h without; gone with flash attention."""


@lru_cache(maxsize=256)
def activation_terms(model: Model) -> Activation:
    """Terms of one layer in 16 bits.

    Classic: 34 = 10 outside + 8 attention + 16 MLP, and 5 a s / h (https://arxiv.org/abs/2205.05198, section 4.1).
    Gated (no dropout), as eager torch keeps it: outside 8; attention 2 q, 4 x KV share, 4 for its output in two layouts; MLP
    gate, up, silu(gate) and product 8 f/h (a fused SwiGLU keeps 6); MoE counts the chosen and shared experts and 4 per
    chosen expert for dispatched inputs and outputs. tests/parallel/test_torch_memory.py compares with torch's own count.
    """
    h = model.hidden
    wide = model.heads * model.head_dim / h
    rows = model.heads * model.seq / h
    if not model.gated:
        return Activation(outside=10.0, inside=8.0 + 4.0 * model.ffn / h, mlp=4.0 * model.ffn / h, quadratic=5.0 * rows)
    attention = 6.0 * wide + 4.0 * wide * model.kv_heads / model.heads
    sparse = (model.layers - model.dense_layers) / model.layers if model.experts else 0.0
    experts = 8.0 * model.expert_ffn / h * (model.experts_per_token + model.shared_experts)
    mlp = (1.0 - sparse) * 8.0 * model.ffn / h + sparse * experts
    dispatch = sparse * 4.0 * model.experts_per_token
    return Activation(outside=8.0 + dispatch, inside=attention + mlp, mlp=mlp, quadratic=2.0 * rows)


def activation_per_layer(
    model: Model, micro_batch: int, recompute: str = "flash", *, tp: int = 1, cp: int = 1, sequence_parallel: bool = True
) -> float:
    """Bytes that one layer keeps of one micro-batch for the backward pass.

    TP alone divides what is inside: s b h (10 + 24/t + 5 a s/(h t)); with sequence parallelism everything:
    s b h (34 + 5 a s/h)/t; CP divides the sequence (https://arxiv.org/abs/2205.05198, table 2).
    """
    terms = activation_terms(model)
    sbh = float(model.seq) * micro_batch * model.hidden / cp
    outer = tp if sequence_parallel else 1
    if recompute == "full":
        return sbh * 2.0 / outer
    inside = terms.inside - (terms.mlp if recompute == "selective" else 0.0) + (terms.quadratic if recompute == "none" else 0.0)
    return sbh * (terms.outside / outer + inside / tp)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a plan that decides memory."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    hsdp_shard: int = 0
    """Ranks of one sharding group; 0: all data-parallel ranks."""
    micro_batch: int = 1
    micro_batches: int = 1
    """Of the replica with the most."""
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: str = "flash"
    sequence_parallel: bool = True
    recipe: Recipe = RECIPES["mixed"]
    offload: str = "none"
    context_bytes: float = CONTEXT_BYTES
    fragmentation: float = FRAGMENTATION


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU at the peak of a step, which lies in the middle of the backward pass."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    total: float
    stage: int = 0
    host: float = 0.0
    parts: dict[str, float] = {}
    """What the buffers consist of."""


def usage(model: Model, layers: tuple[int, ...], setup: Setup) -> Usage:
    """Memory of the pipeline stage that needs most. Candidates are the first, second and last stage."""
    made, stage = max(((_stage(model, layers, stage, setup), stage) for stage in _stages(setup)), key=lambda pair: pair[0].total)
    parts = {name: value for name, value in zip(_BUFFERS, made[5:], strict=True) if value}
    return Usage(
        weights=made.weights,
        gradients=made.gradients,
        optimizer=made.optimizer,
        activations=made.activations,
        buffers=sum(parts.values()),
        total=made.total,
        stage=stage,
        host=made.host,
        parts=parts,
    )


def peak_bytes(model: Model, layers: tuple[int, ...], setup: Setup) -> float:
    """`usage(...).total` without the details: what the search calls thousands of times."""
    return max(_stage(model, layers, stage, setup).total for stage in _stages(setup))


def _stages(setup: Setup) -> tuple[int, ...]:
    last = setup.pp - 1
    return (0,) if last == 0 else (0, last) if last == 1 else (0, 1, last)


def stage_params(model: Model, layers: int, stage: int, setup: Setup) -> tuple[float, float]:
    """(dense, expert) parameters on one GPU of a stage before ZeRO. KV heads fewer than TP are replicated."""
    parts = shape.counts(model)
    dense = layers * parts.layer
    if stage == 0:
        dense += parts.embedding
    if stage == setup.pp - 1 and not (model.tied and setup.pp == 1):
        dense += parts.head
    split = setup.ep if setup.ep > 1 else setup.tp
    copies = pipeline.weight_copies(setup.schedule) if setup.pp > 1 else 1
    return copies * dense / setup.tp, copies * layers * parts.layer_experts / split


def shard_groups(setup: Setup) -> tuple[int, int]:
    """Ranks over which ZeRO shards dense and expert parameters. CP ranks share weights, so they count as data-parallel."""
    dense = setup.dp * setup.cp
    if 0 < setup.hsdp_shard < dense:
        dense = setup.hsdp_shard
    experts = max(1, setup.dp * setup.cp * setup.tp // setup.ep) if setup.ep > 1 else dense
    return dense, experts


class _Stage(NamedTuple):
    weights: float
    gradients: float
    optimizer: float
    host: float
    activations: float
    context: float
    communication: float
    prefetch: float = 0.0
    pipeline: float = 0.0
    embedding: float = 0.0
    logits: float = 0.0
    recompute: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        return sum(self) - self.host


_BUFFERS = _Stage._fields[5:]


def _stage(model: Model, layers: tuple[int, ...], stage: int, setup: Setup) -> _Stage:
    group, expert_group = shard_groups(setup)
    ranks = setup.dp * setup.cp
    bucket = float(BUCKET_BYTES) if ranks > 1 else 0.0
    if not model.known:
        state = model_state(model.params / (setup.tp * setup.pp), group, setup.zero, setup.recipe, offload=setup.offload)
        waste = setup.fragmentation * state.total
        return _Stage(state.weights, state.gradients, state.optimizer, state.host, 0.0, setup.context_bytes, bucket, fragmentation=waste)
    depth = layers[stage]
    dense, experts = stage_params(model, depth, stage, setup)
    weights, gradients, optimizer, host = _state(dense, group, setup)
    if experts:
        more = _state(experts, expert_group, setup)
        weights, gradients, optimizer, host = weights + more[0], gradients + more[1], optimizer + more[2], host + more[3]
    tp, outer = setup.tp, setup.tp if setup.sequence_parallel else 1
    flying = pipeline.in_flight(setup.schedule, setup.pp, setup.micro_batches, setup.virtual, stage)
    one = activation_per_layer(model, setup.micro_batch, setup.recompute, tp=tp, cp=setup.cp, sequence_parallel=setup.sequence_parallel)
    kept = one * depth * flying
    tokens = float(model.seq) * setup.micro_batch / setup.cp
    prefetch = repeated = 0.0
    if (setup.zero >= 3 and ranks > 1) or setup.offload == "all":
        # The layer in use and the prefetched one as whole weights, and one layer's whole gradient.
        prefetch = (dense + experts) / depth * (2 * setup.recipe.weight + setup.recipe.gradient)
    if setup.recompute in ("selective", "full"):
        repeated = activation_per_layer(model, setup.micro_batch, "flash", tp=tp, cp=setup.cp, sequence_parallel=setup.sequence_parallel)
    last = stage == setup.pp - 1
    return _Stage(
        weights,
        gradients,
        optimizer,
        host,
        kept,
        setup.context_bytes,
        bucket,
        prefetch,
        8.0 * tokens * model.hidden / outer if setup.pp > 1 else 0.0,
        2.0 * tokens * model.hidden / outer if stage == 0 else 0.0,
        LOGITS_BYTES * tokens * shape.padded_vocab(model.vocab, tp) / tp if last else 0.0,
        repeated,
        setup.fragmentation * (weights + gradients + optimizer + kept),
    )


def _state(params: float, group: int, setup: Setup) -> tuple[float, float, float, float]:
    state = model_state(params, group, setup.zero, setup.recipe, offload=setup.offload)
    return state.weights, state.gradients, state.optimizer, state.host


def check_recompute(name: str) -> str:
    """The recomputation level's name.

    Raises:
        ConfigurationError: unknown.
    """
    if name not in RECOMPUTE:
        raise ConfigurationError(f"unknown recomputation {name!r}", where="--recompute", hint=f"one of {', '.join(RECOMPUTE)}")
    return name


def lecture_table(gpus: int, memory_bytes: float) -> list[dict[str, float | str | bool]]:
    """The seed's table of largest models (8 x A100-80): what its printed bytes per parameter give, beside what it prints.

    Bytes "5" and "2 + 10/8" leave out parts of the 16; the printed ZeRO-1 row does not follow from its own 5 bytes, and
    6.6 for the baseline means 12 bytes, not 16. Report formulas, never the table.
    """
    rows = (
        ("baseline", "16", 16.0, 6.6),
        ("zero1", "5", 5.0, 6.6),
        ("zero2", "2+10/k", 2 + 10 / gpus, 24.6),
        ("zero3", "12/k", 12 / gpus, 53.3),
    )
    made: list[dict[str, float | str | bool]] = []
    for name, formula, size, printed in rows:
        billion = memory_bytes / size / 1e9
        row: dict[str, float | str | bool] = {
            "row": name,
            "printed_formula": formula,
            "bytes_per_parameter": size,
            "from_printed_formula_billion": billion,
        }
        if gpus == 8 and abs(memory_bytes - 80e9) < 1e6:
            row |= {"printed_billion": printed, "follows_from_its_formula": abs(billion / printed - 1.0) < 0.01}
        made.append(row)
    return made
