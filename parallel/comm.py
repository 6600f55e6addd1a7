"""Bytes that collectives move and the time they take. Bytes are sent by one GPU; S is the whole tensor's size.

Ring algorithms, which are optimal in bandwidth; an all-reduce is a reduce-scatter and an all-gather, byte for byte. On
a torus (TPU) the same ring bounds hold between neighbours, without the tiers below.
"""

from __future__ import annotations

import itertools
import math

import msgspec

from regrow.parallel.inventory import Inventory, Link
from regrow.parallel.shape import Model


def all_reduce(size: float, ranks: int) -> float:
    """2 S (k-1)/k; 0 for one rank (Thakur, Rabenseifner and Gropp 2005)."""
    return 2.0 * size * (ranks - 1) / ranks


def reduce_scatter(size: float, ranks: int) -> float:
    """S (k-1)/k."""
    return size * (ranks - 1) / ranks


def all_gather(size: float, ranks: int) -> float:
    """S (k-1)/k, S the gathered size."""
    return size * (ranks - 1) / ranks


def all_to_all(size: float, ranks: int) -> float:
    """S (k-1)/k: each rank keeps its own part (expert parallelism, Ulysses)."""
    return size * (ranks - 1) / ranks


def broadcast(size: float, ranks: int) -> float:
    """S, pipelined along a chain; 0 for one rank."""
    return size if ranks > 1 else 0.0


def reduce(size: float, ranks: int) -> float:
    """S; 0 for one rank."""
    return size if ranks > 1 else 0.0


def point_to_point(size: float) -> float:
    """S."""
    return size


class ZeroVolume(msgspec.Struct, frozen=True, kw_only=True):
    """Data-parallel traffic of one GPU and step, in bytes, with both readings of the seed texts."""

    gradients: float
    """The gradient part only: all-reduce 2S under DDP, reduce-scatter S from ZeRO-1 on ("halved")."""
    parameters: float
    """All-gathers of parameters: after the update S (ZeRO-1, 2); before forward and backward 2S (ZeRO-3)."""
    total: float
    """2S for DDP, ZeRO-1 and 2; 3S for ZeRO-3 ("1.5 x 2S" and "3 x parameters" are the same thing)."""


def zero_volume(gradient_bytes: float, weight_bytes: float, ranks: int, zero: int) -> ZeroVolume:
    """Volume by ZeRO stage (https://arxiv.org/abs/1910.02054, section 7). It does not depend on the batch.

    ZeRO-1 can reduce-scatter as well as ZeRO-2 does, so its total is 2S and only the place of the cut differs.
    """
    if zero == 0:
        gradients, parameters = all_reduce(gradient_bytes, ranks), 0.0
    else:
        gradients = reduce_scatter(gradient_bytes, ranks)
        parameters = all_gather(weight_bytes, ranks) * (2.0 if zero >= 3 else 1.0)
    return ZeroVolume(gradients=gradients, parameters=parameters, total=gradients + parameters)


def tp_message(model: Model, micro_batch: int, cp: int = 1) -> float:
    """Bytes of one tensor-parallel collective: the output of a row-parallel matrix, b x s x h in 16 bits."""
    return 2.0 * micro_batch * model.seq * model.hidden / cp


TP_POINTS = 2
"""All-reduces of a layer in one pass: after the attention's and after the MLP's output matrix
(https://arxiv.org/abs/1909.08053). With sequence parallelism each is an all-gather and a reduce-scatter: same bytes."""


def tp_volume(model: Model, micro_batch: int, tp: int, *, passes: int, cp: int = 1) -> float:
    """Bytes a layer and micro-batch: 2 x all-reduce x passes (2: forward and backward; 3 with full recomputation)."""
    return TP_POINTS * passes * all_reduce(tp_message(model, micro_batch, cp), tp)


def pp_message(model: Model, micro_batch: int, tp: int = 1, cp: int = 1) -> float:
    """Bytes of one stage boundary: activations of a micro-batch, scattered over TP ranks when TP splits them."""
    return tp_message(model, micro_batch, cp) / tp


def ep_volume(model: Model, micro_batch: int, ep: int, *, tp: int = 1, cp: int = 1) -> float:
    """Bytes of one MoE layer and micro-batch: dispatch and combine, forward and backward, k copies of each token."""
    tokens = 2.0 * micro_batch * model.seq * model.hidden / (cp * tp)
    return 4.0 * all_to_all(tokens * model.experts_per_token, ep)


def cp_volume(model: Model, micro_batch: int, cp: int, tp: int = 1) -> float:
    """Bytes of one layer and micro-batch: all-gather of K and V forward, again and a reduce-scatter backward
    (Llama 3, section 3.3.2; ring attention moves the same)."""
    keys_values = 2.0 * 2.0 * micro_batch * model.seq * model.kv_heads * model.head_dim / tp
    return 3.0 * all_gather(keys_values, cp)


def ring_seconds(volume: float, ranks: int, link: Link, *, rounds: int = 1) -> float:
    """Time of a ring collective that sends `volume` bytes a rank: volume / bandwidth + hops x latency."""
    return volume / link.bandwidth + rounds * (ranks - 1) * link.latency if ranks > 1 else 0.0


def tree_seconds(volume: float, ranks: int, link: Link) -> float:
    """Time of a large collective with logarithmic latency, as libraries choose for many ranks."""
    return volume / link.bandwidth + 2.0 * math.ceil(math.log2(ranks)) * link.latency if ranks > 1 else 0.0


def link_for(inventory: Inventory, span: int) -> Link:
    """The slowest link class that a group spanning `span` consecutive GPUs crosses."""
    if inventory.torus or span <= inventory.nvlink_gpus:
        return inventory.device.nvlink
    return inventory.infiniband if span <= inventory.domain_gpus else inventory.cross


TP_LOSS = ((1, 0.0), (8, 0.11), (16, 0.42), (32, 0.65))
"""Throughput lost to TP as measured in Hugging Face's parallelism tutorial (seed text: 10-12 % to 8, 42 % at 16, 65 % at
32). A reference curve for people; the planner's own numbers come from bytes and links."""


def tp_reference_loss(tp: int) -> float:
    """The reference curve, linear in log2 between its points, flat after the last."""
    if tp >= TP_LOSS[-1][0]:
        return TP_LOSS[-1][1]
    place = math.log2(max(1, tp))
    for (low, low_loss), (high, high_loss) in itertools.pairwise(TP_LOSS):
        if tp <= high:
            start, end = math.log2(low), math.log2(high)
            return low_loss + (high_loss - low_loss) * (place - start) / (end - start)
    return TP_LOSS[-1][1]
